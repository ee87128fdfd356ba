"""All the parts of one open group consumer, put together and taken apart.

*Failure.* What cannot be opened is closed again, and the error raised. *Cancellation.* Likewise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from broker import TopicPartition
from broker.driver import Hooks
from broker_kafka.client.consumer import IN_FLIGHT, LARGEST_BATCH, ConsumerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of
from broker_kafka.group.assigned_partition import Held
from broker_kafka.group.buffer import Intake
from broker_kafka.group.claims import Claims
from broker_kafka.group.commits import Commits
from broker_kafka.group.idle import Idleness
from broker_kafka.group.member import Member
from broker_kafka.group.options import GroupOptions
from broker_kafka.group.readers import Delivery, Streams
from broker_kafka.group.start_offsets import StartPositions
from broker_kafka.group.topics import TopicWatch
from broker_kafka.offsets.identified import IdentifiedStore
from broker_kafka.offsets.kafka import ThreadOffsetStore
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["Membership"]

_MARGIN: Final = 0.5
_STOP_SECONDS: Final = 5.0


class Membership:
    """:param owner: what records are bound to."""

    def __init__(self, connection: Connection, options: GroupOptions, hooks: Hooks, owner: Any) -> None:
        self._options = options
        settings = options.settings
        held: dict[TopicPartition, Held] = {}
        self.delivery = Delivery(options.stop_when_idle, self._is_idle)
        self.intake = Intake(
            held,
            owner,
            max_records=options.max_buffered,
            max_bytes=options.max_buffered_bytes,
            decode=None if options.codec is None else options.codec.decode,
            changed=self.delivery.changed,
        )
        self.streams = Streams(self.intake, self.delivery, owner)
        self.member = member = Member(connection, options, held, self.intake, self.delivery, self.streams, hooks)
        config = settings.client_config("consumer") | {
            "error_cb": connection.client_config("consumer")["error_cb"],
            "group.id": options.group,
            "isolation.level": options.isolation,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
        }
        self.thread = ConsumerThread(
            config,
            member,
            name=f"broker-kafka-{options.group}",
            warn=connection.warn,
            # What is on its way comes on top of what waits here, and is to be no more than that.
            max_batch=max(1, min(LARGEST_BATCH, options.max_buffered // IN_FLIGHT)),
            in_flight=IN_FLIGHT,
            revoke_seconds=options.flush_seconds + options.commit_seconds + _MARGIN,
            ended=member.ended,
        )
        self.store: ThreadOffsetStore | IdentifiedStore = (
            ThreadOffsetStore(self.thread, timeout=settings.request_timeout)
            if options.store is None
            else IdentifiedStore(options.store, member.identity, member.moved)
        )
        self._starts = StartPositions(connection, options.begin, committed=options.isolation == "read_committed")
        self.claims = Claims(
            connection,
            options.group,
            self.store,
            self._starts,
            None if options.store is None else self._metadata,
        )
        self.commits = Commits(
            held,
            self.store,
            lambda: self.claims.owner,
            interval=options.commit_interval,
            every=options.commit_every,
            timeout=settings.request_timeout,
            report=lambda place, error: member.warn(f"{place.topic!r}[{place.partition}] is not committed: {error}"),
            ends=lambda places: bounds_of(connection, places, committed=False),
            gone=lambda: self._watch.look(),
        )
        refresh = settings.topic_metadata_refresh_interval_ms
        self._watch = TopicWatch(
            connection,
            options.subscription,
            interval=None if refresh < 0 else max(0.1, refresh / 1000),
            subscribe=self._subscribe,
            failed=self.delivery.fail,
        )
        self._idleness = Idleness(
            connection,
            settings,
            self.thread,
            self.store,
            group=options.group,
            committed=options.isolation == "read_committed",
            topics=lambda: self._watch.topics,
            held=held.keys,
            paused=lambda: {place for place, each in held.items() if each.paused},
        )
        self.intake.connect(self.thread)
        member.connect(self.thread, self.claims, self.commits, self.store, self._watch.look)

    @property
    def topics(self) -> list[str]:
        """What is subscribed to."""
        return self._watch.topics

    def identified(self, positions: Mapping[TopicPartition, StoredOffset]) -> Mapping[TopicPartition, StoredOffset]:
        """These as the store is to keep them."""
        return self.store.identified(positions) if isinstance(self.store, IdentifiedStore) else positions

    async def join(self) -> None:
        """Join the group.

        :raises TopicNotFound: an explicit topic does not exist.
        :raises ConfigurationError: `start` names a partition that a topic does not have.
        :raises BrokerError: the client cannot be made, or no broker answers.
        """
        try:
            partitions = await self._watch.open()
            self._starts.check(partitions)
            await self.thread.start()
            await self._starts.capture(partitions)
            if self._options.store is None and self._starts.moves:
                await self._starts.found(self._options.group, partitions)
            await self._watch.start()
        except BaseException:
            await self._watch.stop()
            await self.thread.stop(_STOP_SECONDS)
            raise

    async def leave(self, timeout: float, caller: asyncio.Task[Any] | None) -> None:
        """Release everything, which takes so many seconds at most for what is in hand, and leave the group.

        :param caller: a task that waits for this, and cannot come back for more meanwhile.
        """
        try:
            await self._watch.stop()
        finally:
            await self.member.leave(timeout, caller)

    async def _subscribe(self, topics: Sequence[str]) -> None:
        if topics:
            await self.thread.subscribe(topics)
        else:
            await self.thread.call(lambda client: client.unsubscribe())

    async def _is_idle(self, seconds: float) -> bool:
        return await self._idleness.confirmed(seconds)

    async def _metadata(self) -> Any:
        return await self.thread.group_metadata()
