"""Metrics in the text format of Prometheus, version 0.0.4. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = ["CONTENT_TYPE", "Histogram", "Series", "prometheus_text"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The HTTP content type of the text."""

_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 10_000.0, 86_400.0)
_NO_HELP: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(slots=True)
class Histogram:
    """A histogram of durations.

    :ivar bounds: the upper bound of each bucket, in seconds; ascending.
    :ivar counts: the count of each bucket, and of longer durations.
    :ivar sum: the sum of all durations.
    """

    bounds: tuple[float, ...] = _BOUNDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Series(NamedTuple):
    """The name of a metric, with its labels as pairs of name and value."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, name: str, **labels: str) -> Series:
        """The series `name` with these labels."""
        return cls(name, tuple(labels.items()))


def prometheus_text(metrics: Mapping[Series, float | Histogram], help: Mapping[str, str] = _NO_HELP) -> str:
    """The metrics as text. Names that end in `_total` are counters, other numbers gauges.

    :param help: the HELP text of each metric by name; optional for every metric.
    """
    by_name: dict[str, list[tuple[Series, float | Histogram]]] = {}
    for series, value in metrics.items():
        by_name.setdefault(series.name, []).append((series, value))
    lines: list[str] = []
    for name, found in by_name.items():
        if name in help:
            lines.append(f"# HELP {name} {_escaped(help[name])}")
        lines.append(f"# TYPE {name} {_kind(name, found[0][1])}")
        for (_, labels), value in found:
            if isinstance(value, Histogram):
                lines += _histogram(name, labels, value)
            else:
                lines.append(_sample(name, labels, value))
    return "".join(f"{line}\n" for line in lines)


def _kind(name: str, value: float | Histogram) -> str:
    if isinstance(value, Histogram):
        return "histogram"
    return "counter" if name.endswith("_total") else "gauge"


def _histogram(name: str, labels: tuple[tuple[str, str], ...], value: Histogram) -> Iterator[str]:
    at_most = list(accumulate(value.counts))
    for bound, count in zip([*value.bounds, inf], at_most, strict=True):
        yield _sample(f"{name}_bucket", (*labels, ("le", "+Inf" if bound == inf else f"{bound:g}")), count)
    yield _sample(f"{name}_sum", labels, value.sum)
    yield _sample(f"{name}_count", labels, at_most[-1])


def _sample(name: str, labels: tuple[tuple[str, str], ...], value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text, quotes=True)}"' for label, text in labels)
    return f"{name}{{{pairs}}} {value:.17g}" if pairs else f"{name} {value:.17g}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
