"""Latency from publish to consumer, at a fixed rate.

Messages are sent by the clock, whether earlier ones have arrived or not, so that a stall delays all messages behind
it. Each carries the time at which it was due; sender and consumer are one process with one clock.
"""

from __future__ import annotations

import asyncio
import statistics
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import broker
from benchmarks.report import Section, Table

__all__ = ["RATE", "Arrived", "Pipe", "latency_of", "measure_latency", "median_of", "our_way"]

RATE: Final = 200
_SECONDS: Final = 5
_MOST: Final = 100
_PATIENCE: Final = 60.0
_TIME: Final = struct.Struct(">d")
_PADDING: Final = bytes(92)

Arrived = Callable[[bytes | None], None]


@dataclass(frozen=True, slots=True)
class Pipe:
    """A way from a publisher to a consumer.

    :ivar send: publishes one message, and returns when the broker has it.
    :ivar receive: waits for messages, reports each body on arrival, and acks them.
    """

    send: Callable[[bytes], Awaitable[object]]
    receive: Callable[[Arrived], Awaitable[object]]


Way = Callable[[], AbstractAsyncContextManager[Pipe]]


def our_way(bus: broker.Bus, topic: str, subscribed: Callable[[], AbstractAsyncContextManager[str]]) -> Way:
    """Our way, in batches of the available messages.

    :param subscribed: yields a subscription of the topic.
    """

    @asynccontextmanager
    async def way() -> AsyncGenerator[Pipe]:
        async with subscribed() as name, bus.messages(topic, subscription=name) as inbox:

            async def receive(arrived: Arrived) -> None:
                batch = await inbox.next_batch(_MOST, timeout=_PATIENCE)
                for message in batch:
                    arrived(message.data)
                await batch.ack()

            yield Pipe(bus.topic(topic).publish, receive)

    return way


async def measure_latency(
    section: Section,
    ways: Mapping[str, Way],
    scale: float,
    rounds: int,
) -> None:
    """Add a table of p50 and p99 of each way; the table has the medians over the rounds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(await latency_of(way, scale))
    section.tables.append(
        Table(
            (f"From publish to consumer, {RATE} messages a second", "p50", "p99"),
            [(name, *(median_of(numbers) for numbers in zip(*runs, strict=True))) for name, runs in found.items()],
        )
    )


async def latency_of(way: Way, scale: float) -> tuple[float, float]:
    """Seconds, p50 and p99."""
    count = max(20, int(RATE * _SECONDS * scale))
    async with way() as pipe:
        late = sorted(await _delays(pipe, count))
    return late[count // 2], late[count * 99 // 100]


def median_of(numbers: Sequence[float]) -> str:
    """The median as shown in a table."""
    return f"{1e3 * statistics.median(numbers):.2f} ms"


async def _delays(pipe: Pipe, count: int) -> list[float]:
    """Seconds of each message, after a first message that opens the connections."""
    late: list[float] = []

    def arrived(body: bytes | None) -> None:
        late.append(time.perf_counter() - _TIME.unpack_from(body or b"")[0])

    async def receive(until: int) -> None:
        async with asyncio.timeout(_PATIENCE):
            while len(late) < until:
                await pipe.receive(arrived)

    await pipe.send(_TIME.pack(time.perf_counter()) + _PADDING)
    await receive(1)
    late.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(receive(count))
        start = time.perf_counter()
        for number in range(count):
            due = start + number / RATE
            await asyncio.sleep(due - time.perf_counter())
            tasks.create_task(_send(pipe, _TIME.pack(due) + _PADDING))
    return late


async def _send(pipe: Pipe, body: bytes) -> None:
    await pipe.send(body)
