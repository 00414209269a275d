"""Plots as SVG text: lines and bars, with axes, a legend and nothing else. Benchmarks use it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 44, 56
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
_FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="#374151"'


class Series(NamedTuple):
    """One line: points in order of x."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def cumulative(name: str, values: Sequence[float], points: int = 400) -> Series:
    """The share of values at or below x, thinned to at most `points` + 1 of them."""
    ordered = sorted(values)
    if not ordered:
        return Series(name, [], [])
    step = max(1, len(ordered) // points)
    picked = list(range(0, len(ordered), step))
    if picked[-1] != len(ordered) - 1:
        picked.append(len(ordered) - 1)
    return Series(name, [ordered[i] for i in picked], [(i + 1) / len(ordered) for i in picked])


def line_chart(series: Sequence[Series], *, title: str, x_label: str, y_label: str, logarithmic_x: bool = False) -> str:
    """All series on common axes. On a logarithmic x axis points at or below 0 are left out."""
    shown = [_above_zero(item) if logarithmic_x else item for item in series]
    xs = [x for item in shown for x in item.xs]
    ys = [y for item in shown for y in item.ys]
    x_axis = _Axis(min(xs, default=0.0), max(xs, default=1.0), LEFT, WIDTH - RIGHT, logarithmic_x)
    y_axis = _Axis(min(0.0, min(ys, default=0.0)), max(ys, default=1.0), HEIGHT - BOTTOM, TOP, False)
    parts = _frame(title, x_label, y_label) + _grid(x_axis, y_axis)
    for index, item in enumerate(shown):
        points = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in zip(item.xs, item.ys, strict=True))
        color = COLORS[index % len(COLORS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    return _document(parts + _legend([item.name for item in shown]))


def bar_chart(
    groups: Sequence[str], bars: Sequence[Series], *, title: str, y_label: str, show_values: bool = True
) -> str:
    """For each group one bar per series; `ys[g]` is the series' value in group g (its xs are not looked at)."""
    most = max((y for item in bars for y in item.ys if math.isfinite(y)), default=1.0)
    y_axis = _Axis(0.0, most * 1.07 or 1.0, HEIGHT - BOTTOM, TOP, False)  # room for the highest bar's value
    parts = _frame(title, "", y_label) + _grid(None, y_axis)
    slot = (WIDTH - RIGHT - LEFT) / max(1, len(groups))
    width = slot * 0.8 / max(1, len(bars))
    for g, group in enumerate(groups):
        begin = LEFT + g * slot + slot * 0.1
        parts.append(_text(begin + slot * 0.4, HEIGHT - BOTTOM + 18, group, "middle"))
        for s, item in enumerate(bars):
            value = item.ys[g]
            if not math.isfinite(value):
                continue
            top, x = y_axis.place(value), begin + s * width
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width * 0.92:.1f}" height="{HEIGHT - BOTTOM - top:.1f}" '
                f'fill="{COLORS[s % len(COLORS)]}"/>'
            )
            if show_values and width > 24:
                shown = f"{value / 1000:.1f}k" if width < 40 and 1000 <= value < 10_000 else _number(value)
                parts.append(_text(x + width * 0.46, top - 4, shown, "middle"))
    return _document(parts + _legend([item.name for item in bars]))


class _Axis:
    """From values to pixels, and where the ticks are."""

    def __init__(self, low: float, high: float, begin: float, end: float, logarithmic: bool) -> None:
        if logarithmic:
            low, high = math.log10(low if low > 0 else 1e-3), math.log10(high if high > 0 else 1.0)
        if high <= low:
            high = low + 1.0
        self._low, self._high, self._begin, self._end = low, high, begin, end
        self._logarithmic = logarithmic

    def place(self, value: float) -> float:
        scaled = math.log10(value) if self._logarithmic else value
        return self._begin + (scaled - self._low) / (self._high - self._low) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        if self._logarithmic:
            decades = range(math.ceil(self._low), math.floor(self._high) + 1)
            marks = [m * 10.0**d for d in decades for m in ((1,) if len(decades) > 2 else (1, 2, 5))]
            return [mark for mark in marks if math.log10(mark) <= self._high + 1e-9]
        rough = (self._high - self._low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first = math.ceil(self._low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self._high / step + 1e-9) + 1)]


def _above_zero(item: Series) -> Series:
    kept = [(x, y) for x, y in zip(item.xs, item.ys, strict=True) if x > 0]
    return Series(item.name, [x for x, _ in kept], [y for _, y in kept])


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" {_FONT} font-weight="600">{escape(title)}</text>',
        _text(middle, HEIGHT - 12, x_label, "middle"),
        f'<text transform="translate(16 {HEIGHT / 2:.0f}) rotate(-90)" {_FONT} '
        f'text-anchor="middle">{escape(y_label)}</text>',
    ]


def _grid(x_axis: _Axis | None, y_axis: _Axis) -> list[str]:
    parts: list[str] = []
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(_text(LEFT - 8, y + 4, _number(tick), "end"))
    for tick in x_axis.ticks() if x_axis is not None else []:
        x = x_axis.place(tick) if x_axis is not None else 0.0
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#f3f4f6"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 18, _number(tick), "middle"))
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x = float(LEFT)
    for index, name in enumerate(names):
        parts.append(f'<rect x="{x:.0f}" y="28" width="10" height="10" fill="{COLORS[index % len(COLORS)]}"/>')
        parts.append(_text(x + 14, 37, name, "start"))
        x += 28 + 7 * len(name)
    return parts


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {_FONT} text-anchor="{anchor}">{escape(content)}</text>'


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _document(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, *parts, "</svg>"]) + "\n"
