"""Several groups in one program: one has no table, one has a table, and one joins two tables.

celsius, fahrenheit ──> cleaner ──> readings ──┬──> averages      a table: the mean of each sensor
                                               └──> watcher ──> alarms
                                                      └ joins averages, and limits, which anybody may write

.venv/bin/python -m examples.streams.multiple
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import msgspec

import broker
from broker import Json
from broker_streams import Context, Emitter, Group, Input, Join, Memory, Output, Persist, Processor, table_of

__all__ = ["AVERAGES", "CLEANER", "GROUPS", "WATCHER", "Alarm", "Mean", "main"]

ABSOLUTE_ZERO = -273.15


# Two inputs with a callback each, one output, and nothing to remember.
readings = Output("demo-readings", Json(float))


def on_celsius(ctx: Context, degrees: float) -> None:
    if degrees >= ABSOLUTE_ZERO:
        ctx.emit(readings, key=ctx.key, value=round(degrees, 2))


def on_fahrenheit(ctx: Context, degrees: float) -> None:
    on_celsius(ctx, (degrees - 32) * 5 / 9)


CLEANER = Group(
    "demo-cleaner",
    Input("demo-celsius", Json(float), on_celsius),
    Input("demo-fahrenheit", Json(float), on_fahrenheit),
    readings,
)


# The mean of each sensor.
class Mean(msgspec.Struct):
    """A mean that can go on."""

    count: int = 0
    total: float = 0.0

    @property
    def value(self) -> float:
        return self.total / self.count


means = Persist(Json(Mean))


def average(ctx: Context, degrees: float) -> None:
    mean = ctx[means] or Mean()
    ctx[means] = Mean(mean.count + 1, mean.total + degrees)


AVERAGES = Group("demo-averages", Input("demo-readings", Json(float), average), means)


# Readings far from the mean. The joined table is a copy that may be a moment behind: good enough for a mean.
class Alarm(msgspec.Struct, frozen=True):
    """A reading beyond the limit of its sensor."""

    degrees: float
    mean: float


mean_of_sensor = Join(table_of("demo-averages"), Json(Mean))
limit_of_sensor = Join("demo-limits", Json(float))
alarms = Output("demo-alarms", Json(Alarm))


def watch(ctx: Context, degrees: float) -> None:
    mean, limit = ctx[mean_of_sensor], ctx[limit_of_sensor]
    if mean is not None and limit is not None and abs(degrees - mean.value) > limit:
        ctx.emit(alarms, key=ctx.key, value=Alarm(degrees, mean.value))


WATCHER = Group("demo-watcher", Input("demo-readings", Json(float), watch), mean_of_sensor, limit_of_sensor, alarms)

GROUPS = (CLEANER, AVERAGES, WATCHER)


async def main() -> Alarm | None:
    """Publish readings until the watcher finds one too high; return its alarm."""
    async with broker.connect(os.environ.get("BROKER_URL", "inmem://multiple")) as bus, AsyncExitStack() as stack:
        for topic in ("demo-celsius", "demo-fahrenheit", "demo-readings", "demo-alarms"):
            await bus.admin.ensure_topic(topic, partitions=2)
        await bus.admin.ensure_topic("demo-limits", partitions=2, compacted=True)
        async with Emitter(bus, "demo-limits", Json(float)) as limits:
            await limits.emit("kitchen", 10.0)
        for group in GROUPS:
            processor = Processor(bus, group, store=Memory(), checkpoint_interval=0.1)
            await (await stack.enter_async_context(processor)).ready()
        celsius = await stack.enter_async_context(Emitter(bus, "demo-celsius", Json(float)))
        fahrenheit = await stack.enter_async_context(Emitter(bus, "demo-fahrenheit", Json(float)))
        async with bus.records("demo-alarms", group="demo-printer", codec=Json(Alarm)) as printer:
            for _ in range(5):
                await celsius.emit("kitchen", 20.0)
                await fahrenheit.emit("kitchen", 68.0)
            while True:
                # The watcher may see a reading before the mean of the others.
                await celsius.emit("kitchen", 90.0)
                if (record := await printer.next_record(timeout=1)) is not None:
                    print(f"{(record.key or b'').decode()}: {record.payload}")
                    return record.payload


if __name__ == "__main__":
    asyncio.run(main())
