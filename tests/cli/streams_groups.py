"""Groups for the tests of `broker streams`. Their topics are named after the variable STREAMS_TEST."""

from __future__ import annotations

import os

from broker import Json
from broker_streams import Context, Group, Input, Loop, Output, Persist, Visitor

__all__ = ["broken", "counting", "failing", "nothing", "single"]

sums = Persist(Json(int))


def counting() -> Group:
    """Sums the values of each key in its table, and in its loop under the key `all`; publishes the sums."""
    name = os.environ.get("STREAMS_TEST", "counting")
    totals = Output(f"{name}-totals", Json(int))

    def add(ctx: Context, value: int) -> None:
        total = ctx[sums] = (ctx[sums] or 0) + value
        ctx.emit(totals, key=ctx.key, value=total)
        ctx.loop(loop, key="all", value=value)

    def looped(ctx: Context, value: int) -> None:
        ctx[sums] = (ctx[sums] or 0) + value

    def scale(ctx: Context, factor: int) -> None:
        ctx[sums] = (ctx[sums] or 0) * factor

    loop = Loop(Json(int), looped)
    return Group(name, Input(f"{name}-in", Json(int), add), sums, loop, totals, Visitor("scale", scale))


def single() -> Group:
    """Sums the values of each key in its table; of one topic."""
    name = os.environ.get("STREAMS_TEST", "single")

    def add(ctx: Context, value: int) -> None:
        ctx[sums] = (ctx[sums] or 0) + value

    return Group(name, Input(f"{name}-in", Json(int), add), sums)


def failing() -> Group:
    """Fails at the first message."""
    name = os.environ.get("STREAMS_TEST", "failing")

    def fail(ctx: Context, value: int) -> None:
        raise ValueError(f"no {value}")

    return Group(name, Input(f"{name}-in", Json(int), fail), sums)


nothing = 3


def broken() -> Group:
    raise KeyError("a setting")
