"""The same work in FastStream on the same NATS server: a handler per message with its ack, and confirmed publishes.

For comparison, without a target. FastStream pulls batches of 500 and acks after each handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from faststream.nats import JStream, NatsBroker, NatsToken, PullSub

import broker
from benchmarks.measure import Variant, alternate
from benchmarks.report import Finding, Section
from benchmarks.stages import FILLED, TARGET, Stage, open_stage

__all__ = ["measure_faststream"]


async def measure_faststream(scale: float, rounds: int) -> Section:
    """Consume with a handler, publish with confirmations."""
    section = Section(
        "FastStream beside it",
        "The same work, a handler per message, on the same server: ratios of messages per second, and CPU per message.",
    )
    count = max(500, int(20_000 * scale))
    async with open_stage("jetstream", count) as stage:
        consuming: dict[str, Variant] = {
            "ours, receive(handler)": _ours_consuming(stage, count),
            "FastStream, subscriber": _theirs_consuming(stage, count),
        }
        publishing: dict[str, Variant] = {
            "ours, enqueue": _publishing(stage, count, _enqueue),
            "FastStream, publish, 1000 at a time": _publishing(stage, count, _publish_with_faststream),
        }
        for what, variants in (("consume", consuming), ("publish", publishing)):
            series = await alternate(variants, count=count, rounds=rounds)
            section.runs.update({f"{what}: {name}": runs for name, runs in series.items()})
            ours, theirs = series.values()
            section.findings += [
                Finding(f"{what}: messages per second, ours / FastStream", ours.times_rate_of(theirs), "x"),
                Finding(f"{what}: CPU per message, ours", ours.cost, "µs"),
                Finding(f"{what}: CPU per message, FastStream", theirs.cost, "µs"),
            ]
    return section


def _ours_consuming(stage: Stage, count: int) -> Variant:
    async def receive(subscription: str) -> None:
        left = count

        async def handle(message: broker.Message) -> None:
            nonlocal left
            left -= 1
            if not left:
                inbox.stop()

        async with stage.bus.messages(FILLED, subscription=subscription) as inbox:
            await inbox.receive(handle, concurrency=10)

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.subscription() as subscription:
            yield partial(receive, subscription)

    return variant


def _theirs_consuming(stage: Stage, count: int) -> Variant:
    stream = FILLED.replace(".", "=")

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.subscription() as subscription:
            theirs = _faststream(stage)
            left, done = count, asyncio.Event()

            async def handle(body: bytes) -> None:
                nonlocal left
                left -= 1
                if not left:
                    done.set()

            subscriber = theirs.subscriber(
                f"{stream}.*",
                durable=subscription,
                stream=JStream(stream, declare=False),
                pull_sub=PullSub(batch_size=500),
            )
            subscriber(handle)

            async def consume() -> None:
                await theirs.start()
                await done.wait()

            try:
                yield consume
            finally:
                await theirs.stop()

    return variant


def _publishing(
    stage: Stage, count: int, work: Callable[[Stage, list[broker.OutboundMessage]], Awaitable[None]]
) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        await stage.empty()
        yield partial(work, stage, stage.messages(count))

    return variant


async def _enqueue(stage: Stage, messages: list[broker.OutboundMessage]) -> None:
    topic = stage.bus.topic(TARGET)
    for message in messages:
        await topic.enqueue(message)
    await topic.flush()


async def _publish_with_faststream(stage: Stage, messages: list[broker.OutboundMessage]) -> None:
    stream = TARGET.replace(".", "=")
    async with _faststream(stage) as theirs:
        for start in range(0, len(messages), 1000):
            await asyncio.gather(
                *(
                    theirs.publish(
                        message.data,
                        f"{stream}.0",
                        stream=stream,
                        timeout=30.0,
                        headers={
                            "key": (message.key or b"").decode(),
                            "Nats-Msg-Id": message.id or "",
                            "type": "created",
                        },
                    )
                    for message in messages[start : start + 1000]
                )
            )


def _faststream(stage: Stage) -> Any:
    return NatsBroker(stage.server.url, security=NatsToken(stage.server.token), logger=None)
