"""Line and bar charts as SVG text, drawn by matplotlib (`pip install 'inferengine[plots]'`). Benchmarks use them too.

The same data gives the same bytes with one version of matplotlib: ids are salted, and no date is written.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inferengine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
SIZE_INCHES = (7.5, 4.2)
STYLE: Any = {  # matplotlib's rc parameters
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "inferengine",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": "#e5e7eb",
    "lines.linewidth": 1.8,
}


class Series(NamedTuple):
    """One line: points in order of x."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def cumulative(name: str, values: Sequence[float], points: int = 400) -> Series:
    """Return the share of values at or below x, thinned to at most `points` + 1 of them."""
    ordered = sorted(values)
    if not ordered:
        return Series(name, [], [])
    step = max(1, len(ordered) // points)
    picked = list(range(0, len(ordered), step))
    if picked[-1] != len(ordered) - 1:
        picked.append(len(ordered) - 1)
    return Series(name, [ordered[i] for i in picked], [(i + 1) / len(ordered) for i in picked])


def require_matplotlib() -> None:
    """Raise ConfigError where matplotlib is not installed; call it before long work whose result is plotted."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plots", "needs matplotlib: pip install 'inferengine[plots]'") from None


def line_chart(series: Sequence[Series], *, title: str, x_label: str, y_label: str, logarithmic_x: bool = False) -> str:
    """Draw all series on common axes. On a logarithmic x axis points at or below 0 are left out.

    Raises ConfigError without matplotlib.
    """

    def draw(axes: Axes) -> None:
        for index, item in enumerate(series):
            points = [(x, y) for x, y in zip(item.xs, item.ys, strict=True) if x > 0 or not logarithmic_x]
            axes.plot([x for x, _ in points], [y for _, y in points], label=item.name, color=_color(index))
        if logarithmic_x:
            axes.set_xscale("log")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if _lowest(series) < 0 else 0.0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)

    return _svg(draw, title, len(series))


def bar_chart(
    groups: Sequence[str], bars: Sequence[Series], *, title: str, y_label: str, show_values: bool = True
) -> str:
    """Draw for each group one bar per series; `ys[g]` is the series' value in group g, and its xs are not used.

    A value that is not finite has no bar. Raises ConfigError without matplotlib.
    """

    def draw(axes: Axes) -> None:
        width = 0.8 / max(1, len(bars))
        for index, item in enumerate(bars):
            places = [g + (index - (len(bars) - 1) / 2) * width for g in range(len(groups))]
            shown = [(place, value) for place, value in zip(places, item.ys, strict=True) if math.isfinite(value)]
            drawn = axes.bar(
                [place for place, _ in shown],
                [value for _, value in shown],
                0.92 * width,
                label=item.name,
                color=_color(index),
            )
            if show_values:
                axes.bar_label(drawn, [_number(value) for _, value in shown], fontsize=7, padding=2)
        axes.set_xticks(range(len(groups)), groups)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(y_label)

    return _svg(draw, title, len(bars))


def _svg(draw: Callable[[Axes], None], title: str, num_series: int) -> str:
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title, fontweight="bold", fontsize=10, pad=22)
        if num_series:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=num_series, frameon=False, borderaxespad=0.2)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _lowest(series: Sequence[Series]) -> float:
    return min((y for item in series for y in item.ys), default=0.0)


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
