"""The groups that are measured, and their messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from broker import Codec, Json, OutboundMessage
from broker_streams import Context, Group, Input, Output, Persist, Tumbling

__all__ = ["Alert", "Click", "Row", "click", "clicks", "counting", "windowed"]


class Click(msgspec.Struct):
    item: str
    price: int


class Row(msgspec.Struct):
    clicks: int
    spent: int


class Alert(msgspec.Struct):
    user: str
    clicks: int


def counting(
    codec: Callable[[Any], Codec[Any]] = Json, *, name: str = "clicks", source: str = "source", target: str = "target"
) -> Group:
    """A group that for each message reads a row, writes it, and publishes a message."""
    rows: Persist[Row] = Persist(codec(Row))
    alerts: Output[Alert] = Output(target, codec(Alert))

    def on_click(ctx: Context, click: Click) -> None:
        row = ctx[rows] or Row(0, 0)
        ctx[rows] = row = Row(row.clicks + 1, row.spent + click.price)
        ctx.emit(alerts, key=ctx.key, value=Alert(ctx.key, row.clicks))

    return Group(name, Input(source, Json(Click), on_click), rows, alerts)


def windowed(codec: Callable[[Any], Codec[Any]] = Json) -> Group:
    """A group that counts in windows of a minute."""
    per_minute: Tumbling[int] = Tumbling("per-minute", codec(int), size=60)

    def on_click(ctx: Context, click: Click) -> None:
        for window in ctx.windows(per_minute):
            window.value = (window.value or 0) + 1

    return Group("minutes", Input("source", Json(Click), on_click), per_minute)


def click(number: int) -> bytes:
    """The body of a click."""
    return b'{"item":"hat-%d","price":12}' % number


def clicks(start: int, stop: int, keys: int) -> list[OutboundMessage]:
    """Clicks of that many users in turn."""
    return [OutboundMessage(click(number), b"user-%d" % (number % keys)) for number in range(start, stop)]
