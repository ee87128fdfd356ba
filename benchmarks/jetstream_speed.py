"""JetStream next to nats-py on the same server, with all of our headers on every message.

One process, one event loop, one server, the same messages; each run has a durable consumer of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import broker
from benchmarks.measure import Variant, alternate
from benchmarks.raw_nats import RawNats
from benchmarks.report import Finding, Section
from benchmarks.stages import FILLED, TARGET, Stage, open_stage

__all__ = ["measure_jetstream"]

_BATCH = 1000


async def measure_jetstream(scale: float, rounds: int) -> Section:
    """Consume with acks, and publish with confirmations."""
    section = Section(
        "JetStream beside nats-py",
        "Ratios of messages per second. Every message carries key, time, id and an attribute as headers; each is "
        "acked, or confirmed. The bare loops ack and publish by joined writes and use private calls of nats-py.",
        "times as fast",
    )
    # Many short rounds, because client and server share the cores, and wall-clock times vary with the load.
    rounds = 2 * rounds if rounds > 1 else 1
    count = max(1000, int(50_000 * scale))
    async with open_stage("jetstream", count) as stage:
        raw = await RawNats.connect(stage.server, FILLED)
        try:
            await _consuming(section, stage, raw, count, rounds)
        finally:
            await raw.close()
        raw = await RawNats.connect(stage.server, TARGET)
        try:
            await _publishing(section, stage, raw, max(1000, int(20_000 * scale)), rounds)
        finally:
            await raw.close()
    return section


async def _consuming(section: Section, stage: Stage, raw: RawNats, count: int, rounds: int) -> None:
    variants: dict[str, Variant] = {
        "ours, batches": _with_subscription(stage, partial(_consume, stage, count=count)),
        "nats-py, fetch + ack": _with_subscription(stage, partial(raw.fetch_and_ack, count=count)),
        "nats-py, pulls with a callback": _with_subscription(stage, partial(raw.pull_with_callback, count=count)),
        "nats-py, bare raw pulls": _with_subscription(stage, partial(raw.pull_raw, count=count)),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"consume: {name}": runs for name, runs in series.items()})
    ours = series["ours, batches"]
    bars = {"nats-py, fetch + ack": 3.0, "nats-py, pulls with a callback": None, "nats-py, bare raw pulls": 0.8}
    for name, bar in bars.items():
        section.findings.append(
            Finding(f"consume and ack by batch / {name}", ours.times_rate_of(series[name]), "x", at_least=bar)
        )


def _with_subscription(stage: Stage, work: Callable[[str], Awaitable[None]]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.subscription() as subscription:
            yield partial(work, subscription)

    return variant


async def _consume(stage: Stage, subscription: str, count: int) -> None:
    async with stage.bus.messages(FILLED, subscription=subscription, max_outstanding=4000) as inbox:
        async for batch in inbox.batches(_BATCH):
            count -= len(batch)
            await batch.ack()
            if not count:
                break


async def _publishing(section: Section, stage: Stage, raw: RawNats, count: int, rounds: int) -> None:
    variants: dict[str, Variant] = {
        "ours, enqueue": _with_messages(stage, count, partial(_enqueue, stage)),
        "ours, publish_batch": _with_messages(stage, count, partial(_publish_batch, stage)),
        "nats-py, gathered js.publish": _with_messages(stage, count, raw.gathered),
        "nats-py, js.publish_async": _with_messages(stage, count, raw.publish_async),
        "nats-py, own inbox, joined writes": _with_messages(stage, count, raw.own_inbox),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"publish: {name}": runs for name, runs in series.items()})
    for ours, theirs, bar in (
        ("ours, enqueue", "nats-py, gathered js.publish", 3.0),
        ("ours, enqueue", "nats-py, js.publish_async", 1.7),
        ("ours, publish_batch", "nats-py, own inbox, joined writes", 0.9),
    ):
        section.findings.append(
            Finding(
                f"{ours.removeprefix('ours, ')} / {theirs}",
                series[ours].times_rate_of(series[theirs]),
                "x",
                at_least=bar,
            )
        )


def _with_messages(
    stage: Stage, count: int, work: Callable[[list[broker.OutboundMessage]], Awaitable[None]]
) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        await stage.empty()
        yield partial(work, stage.messages(count))

    return variant


async def _enqueue(stage: Stage, messages: list[broker.OutboundMessage]) -> None:
    topic = stage.bus.topic(TARGET)
    receipts = [await topic.enqueue(message) for message in messages]
    await topic.flush()
    if not all(receipt.result().offset for receipt in receipts):
        raise RuntimeError("A message has no place in the log")


async def _publish_batch(stage: Stage, messages: list[broker.OutboundMessage]) -> None:
    topic = stage.bus.topic(TARGET)
    for start in range(0, len(messages), 4 * _BATCH):
        await topic.publish_batch(messages[start : start + 4 * _BATCH])
