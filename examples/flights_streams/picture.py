"""Draws throughput and lag over time as a PNG, without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from examples.flights_streams.story import Outcome

__all__ = ["draw"]

_STEP: Final = 0.5
"""Seconds between points; a rate is that of the two seconds around its point: members report once a checkpoint."""
_COLOURS: Final = ("#c0392b", "#3b7dd8", "#6aa5e8", "#e08e45")


def draw(outcome: Outcome, path: Path) -> None:
    """Draw the rate of each member above, and the flights that wait below, with the kill and the newcomer marked.

    :param path: of the PNG; missing directories are created.
    """
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    pyplot: Any = plt
    samples = outcome.samples
    times = [sample.seconds for sample in samples]
    points: Any = np.arange(0.0, max(times, default=0.0) + _STEP, _STEP)
    rates: dict[str, Any] = {
        name: (np.interp(points + 1, times, counts) - np.interp(points - 1, times, counts)) / 2
        for name in outcome.recoveries
        if any(counts := [sample.handled.get(name, 0) for sample in samples])
    }
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(12, 7), sharex=True, layout="constrained")
    above.stackplot(points, list(rates.values()), labels=list(rates), colors=_COLOURS, alpha=0.85)
    above.set_ylabel("flights per second")
    above.set_title("Throughput, by member")
    below.fill_between(times, [sample.published - sample.counted for sample in samples], color="#7f8c8d", alpha=0.6)
    below.set_ylabel("flights")
    below.set_title("Lag: published, and not yet in the view")
    below.set_xlabel("seconds since the first flight")
    for axis in (above, below):
        axis.axvline(outcome.killed_at, color="#c0392b", linestyle="--", label="SIGKILL")
        axis.axvline(outcome.joined_at, color="#27ae60", linestyle="--", label="a member joins")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    above.legend(loc="upper right")
    figure.suptitle(f"{outcome.with_aircraft:,} flights through stream processors", fontsize=14)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
