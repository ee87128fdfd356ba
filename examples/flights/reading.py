"""Reads whole topics: from the log, or from subscriptions on a broker without a log.

A subscription receives only what is published after its creation, so call `subscribe` first. Reading a log changes
nothing. On a subscription `follow` acks and thus consumes; `read_all` does not ack.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import broker

__all__ = ["Entry", "follow", "keeps_log", "read_all", "subscribe"]

Entry = broker.Record[bytes] | broker.Message[bytes]

_MOST: Final = 2000
_ALL: Final = 1_000_000
_IDLE_SECONDS: Final = 0.5
_QUIET_SECONDS: Final = 1.0
"""Seconds without a message after which a topic counts as empty, on a broker that cannot report its end."""


def keeps_log(bus: broker.Bus) -> bool:
    """Whether the broker has a log, which can be read again."""
    return bus.capabilities.records is not None


async def subscribe(bus: broker.Bus, readers: Mapping[str, Sequence[str]], whole: Collection[str] = ()) -> None:
    """Create the subscriptions of each topic's readers, on a broker without a log.

    :param whole: readers that use `read_all` and need no order.
    """
    if not keeps_log(bus):
        for topic, names in readers.items():
            for name in names:
                # An ordered Pub/Sub subscription holds back later messages of a key until the earlier ones are acked.
                plain = name in whole and bus.capabilities.backend == "pubsub"
                options: dict[str, Any] = {"ordering": False} if plain else {}
                await bus.admin.ensure_subscription(topic, name, **options)


async def read_all(bus: broker.Bus, topic: str, reader: str) -> AsyncGenerator[Sequence[Entry]]:
    """What the topic holds now, in batches. Consumes nothing."""
    if keeps_log(bus):
        for partition in await bus.log.partitions(topic):
            async for batch in bus.log.read(topic, partition):
                yield list(batch)
        return
    async with bus.messages(topic, subscription=reader, max_outstanding=_ALL) as inbox:
        while batch := await inbox.next_batch(_MOST, timeout=_QUIET_SECONDS):
            yield list(batch)


async def follow(bus: broker.Bus, topics: Sequence[str], reader: str) -> AsyncGenerator[Sequence[Entry]]:
    """Everything that arrives, in batches, forever. Yields an empty batch when nothing arrives for a moment."""
    if keeps_log(bus):
        async with bus.records(list(topics), group=reader) as log:
            while True:
                batch = await log.next_batch(_MOST, timeout=_IDLE_SECONDS)
                yield list(batch)
                if batch:
                    await _commit(batch)
    async with AsyncExitStack() as stack:
        inboxes = [
            await stack.enter_async_context(bus.messages(topic, subscription=reader, max_outstanding=_MOST))
            for topic in topics
        ]
        while True:
            came = False
            for inbox in inboxes:
                if batch := await inbox.next_batch(_MOST, timeout=_IDLE_SECONDS / len(inboxes)):
                    came = True
                    yield list(batch)
                    await batch.ack()
            if not came:
                yield []


async def _commit(batch: broker.RecordBatch[bytes]) -> None:
    try:
        await batch.commit()
    except broker.BrokerError as error:
        # The commit of the next batch covers this one.
        if not error.retriable:
            raise
