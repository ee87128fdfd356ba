"""Draws the delays as a PNG, without a display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.flights.fold import CarrierDelays

__all__ = ["draw"]

_FIRST_HOUR, _LAST_HOUR = 5, 23
_LEAST_FLIGHTS = 20


def draw(carriers: Mapping[str, CarrierDelays], airlines: Mapping[str, str], path: Path) -> None:
    """Draw the mean delay per carrier on the left, and per hour of the day on the right.

    :param path: of the PNG; missing directories are created.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    codes = sorted(carriers, key=lambda code: (carriers[code].mean_departure, code), reverse=True)
    names = [airlines.get(code, code) for code in codes]
    pyplot: Any = plt
    figure, (bars, heat) = pyplot.subplots(
        1, 2, figsize=(14, 6), width_ratios=(1, 1.6), sharey=True, layout="constrained"
    )
    means = [carriers[code].mean_departure for code in codes]
    colours = ["#c0392b" if mean > 15 else "#e08e45" if mean > 10 else "#3b7dd8" for mean in means]
    bars.barh(names, means, color=colours)
    for row, mean in enumerate(means):
        bars.text(mean + 0.2, row, f"{mean:.1f}", va="center", fontsize=9)
    bars.set_xlim(right=max([*means, 1.0]) * 1.15)
    bars.set_xlabel("mean delay at departure, minutes")
    bars.set_title("Who was late")
    bars.spines[["top", "right"]].set_visible(False)

    hours = range(_FIRST_HOUR, _LAST_HOUR + 1)
    cells = [[_mean(carriers[code], hour) for hour in hours] for code in codes]
    image = heat.imshow(
        cells,
        aspect="auto",
        cmap="YlOrRd",
        vmin=0,
        vmax=40,
        extent=(_FIRST_HOUR, _LAST_HOUR + 1, len(codes) - 0.5, -0.5),
    )
    heat.set_xticks(list(hours)[::2], [f"{hour}:00" for hour in list(hours)[::2]])
    heat.set_xlabel("hour of the scheduled departure")
    heat.set_title("When: delays pile up over the day")
    figure.colorbar(image, ax=heat, label="minutes, mean", extend="both")
    figure.suptitle("Flights from New York City in 2013", fontsize=14)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _mean(carrier: CarrierDelays, hour: int) -> float:
    flights, minutes = carrier.by_hour.get(hour, (0, 0))
    return minutes / flights if flights >= _LEAST_FLIGHTS else float("nan")
