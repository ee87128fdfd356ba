"""Everything that is on a topic, from its beginning: its log, or subscriptions where the broker keeps no log.

A subscription gets what is published after it was made, so that `subscribe` comes before everything else. Reading
changes nothing of a log; of a subscription it takes what is acked, which `follow` does and `read_all` does not.
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
"""After so long without a message there is none, on a broker that cannot tell where its topics end."""


def keeps_log(bus: broker.Bus) -> bool:
    """Whether what was read can be read again."""
    return bus.capabilities.records is not None


async def subscribe(bus: broker.Bus, readers: Mapping[str, Sequence[str]], whole: Collection[str] = ()) -> None:
    """Make the subscriptions of each topic's readers, where it has no log.

    :param whole: the readers for `read_all`, which need no order.
    """
    if not keeps_log(bus):
        for topic, names in readers.items():
            for name in names:
                # An ordered one of Pub/Sub keeps later messages of a key back until the earlier are acked.
                plain = name in whole and bus.capabilities.backend == "pubsub"
                options: dict[str, Any] = {"ordering": False} if plain else {}
                await bus.admin.ensure_subscription(topic, name, **options)


async def read_all(bus: broker.Bus, topic: str, reader: str) -> AsyncGenerator[Sequence[Entry]]:
    """What is there now, by batches; it stays there."""
    if keeps_log(bus):
        for partition in await bus.log.partitions(topic):
            async for batch in bus.log.read(topic, partition):
                yield list(batch)
        return
    async with bus.messages(topic, subscription=reader, max_outstanding=_ALL) as inbox:
        while batch := await inbox.next_batch(_MOST, timeout=_QUIET_SECONDS):
            yield list(batch)


async def follow(bus: broker.Bus, topics: Sequence[str], reader: str) -> AsyncGenerator[Sequence[Entry]]:
    """What comes, without end: by batches, an empty one whenever nothing came for a moment."""
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
