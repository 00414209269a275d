"""Several Prometheus expositions as one: the samples of a metric must stand together, under one HELP and TYPE."""

from __future__ import annotations

from collections.abc import Iterable

_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created")


def merge(texts: Iterable[str]) -> str:
    """The families in the order of their first appearance. Equal series of two sources keep the first: two engines
    are told apart by their `engine` label."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, str]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                samples.setdefault(family, {})
                if line.split(" ", 2)[1] not in {known.split(" ", 2)[1] for known in head}:
                    head.append(line)
            elif line and not line.startswith("#"):
                series = line[: line.rfind("} ") + 1] or line.partition(" ")[0]
                name = series.partition("{")[0]
                home = family if _belongs(name, family) else name
                samples.setdefault(home, {}).setdefault(series, line)
    lines: list[str] = []
    for family, series_lines in samples.items():
        lines += heads.get(family, ())
        lines += series_lines.values()
    return "\n".join(lines) + "\n" if lines else ""


def _belongs(name: str, family: str) -> bool:
    return name == family or (name.startswith(family) and name[len(family) :] in _SUFFIXES)
