"""Batches that lie apart in a log, counted and cut. Pure.

`bus.log.spans` tells where they begin. Of one in which a span begins half-way nothing may be left to read, so it counts
only where it is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.driver.contract import Span

__all__ = ["after", "batches_in", "below", "cut"]


def batches_in(spans: Sequence[Span]) -> int:
    """How many there are."""
    return sum(max(1, -(-span.stop // span.step) + -span.start // span.step) for span in spans)


def below(spans: Sequence[Span], stop: int) -> list[Span]:
    """What of these lies below a position."""
    return [span._replace(stop=min(span.stop, stop)) for span in spans if span.start < stop]


def after(spans: Sequence[Span], batches: int, stop: int) -> int:
    """The position behind so many batches."""
    for span in spans:
        here = batches_in([span])
        if batches < here:
            return min(stop, (-(-span.start // span.step) + batches) * span.step)
        if batches == here:
            return min(stop, span.stop)
        batches -= here
    return stop


def cut(spans: Sequence[Span], start: int, stop: int, pieces: int) -> list[int]:
    """Where up to `pieces` parts of about as many batches begin; the first at `start`, whatever lies there."""
    batches = batches_in(spans)
    pieces = min(pieces, batches)
    found = [start]
    for piece in range(1, pieces):
        place = after(spans, batches * piece // pieces, stop)
        if found[-1] < place < stop:
            found.append(place)
    return found
