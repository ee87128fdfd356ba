"""How a record of a share group is shown: as any other, with the number of its deliveries. Safe from any thread.

MERGED broker_kafka.share.messages: `Batch`: what one member of a share group has got and not settled. Used on the loop.

MERGED broker_kafka.share.messages: The Message family over a share group (KIP-932): the brokers lease each message and count its deliveries.

*Members.* A member of librdkafka gets nothing more until all it has got is settled, and only of the partitions that the
brokers give it. So one of them fetches, then others too where it gets nothing, and where that gets nothing while others
wait for their last message another is made, up to `share_members`. *Leases* last as long as the
group's lock and are not renewed. What is not settled in time is told as lost, a little before the broker's clock says
so, since one late ack takes those of its partition along that are sent with it. What waits here for half of the lock
without being asked for is released, for others; each delivery counts. The last one is nobody else's: it goes before all
that waits, and is kept. Where it ends without an ack, that is told. *Settling.* The broker answers each ack. *Close*
leaves the group, which gives back at once what is not settled. *Failure.* Members reconnect by themselves.


MERGED broker_kafka.share.messages: Opens messages of a share group: makes the group where it is missing, and joins it.

*Cancellation* leaves no member, and the group's configuration as it is by then. *Failure.* As told by `subscribe`. A
group of its own, shorter lock than the connection counts with is told by a `Warned` event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from confluent_kafka import AcknowledgeType, KafkaError

from broker import BrokerError, Closed, ConnectionFailed, LeaseLost, Message, Outcome, Unsupported
from broker.driver import (
    Ephemeral,
    MessageSubscription,
    Settlement,
    SourceListener,
    Waker,
    Warned,
    lease_time,
    logger,
    take_from,
)
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.cluster.names import group_id
from broker_kafka.codec.headers import NativeRecord, RecordView
from broker_kafka.errors import kafka_error
from broker_kafka.share.fetch_scheduling import FetchScheduler
from broker_kafka.share.group_config import configured_lock, delete_group, no_share_groups, prepare, require
from broker_kafka.share.join_state import JoinState
from broker_kafka.share.member import Acknowledgement, ShareMember, member_config

__all__ = ["SHARE_VIEW", "Batch", "ShareMessageSource", "place_of", "subscribe"]


class _ShareView(RecordView):
    __slots__ = ()

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return raw.delivery_count()


SHARE_VIEW: Final = _ShareView()
"""The one view of them all."""


class Batch:
    """The lease of its messages."""

    __slots__ = ("deadline", "member", "open", "timers")

    def __init__(self, member: ShareMember, deadline: float) -> None:
        self.member = member
        self.deadline = deadline
        """The `lease_time` at which the lock may end."""
        self.open: dict[tuple[int, int], Message[Any]] = {}
        self.timers: list[asyncio.TimerHandle] = []

    def stop_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()


def place_of(message: Message[Any]) -> tuple[int, int]:
    """Partition and offset."""
    return message.raw.partition(), message.raw.offset()


_CLOSE_SECONDS: Final = 8.0
_MOST_AT_ONCE: Final = 500
_PATIENCE: Final = 0.05
"""How long all members may be waiting for their last message before there is one more."""

_KINDS: Final = {
    Outcome.ACK: AcknowledgeType.ACCEPT,
    Outcome.REJECT: AcknowledgeType.REJECT,
    Outcome.NACK: AcknowledgeType.RELEASE,
    Outcome.RELEASE: AcknowledgeType.RELEASE,
}


class ShareMessageSource:
    """Implements `MessageSource`, `TellsIdle`, `LosesOver` and `TellsLeaseLeft`.

    :param lock: seconds for which a message is ours.
    :param limit: deliveries after which the brokers drop it, if they tell.
    :param partitions: of the topic.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: MessageSubscription,
        listener: SourceListener,
        *,
        group: str,
        lock: float,
        limit: int | None,
        partitions: int,
        on_close: Callable[[ShareMessageSource], object],
    ) -> None:
        self._connection = connection
        self._topic = subscription.topic
        self._ephemeral = isinstance(subscription.subscription, Ephemeral)
        self._listener = listener
        self.group: Final = group
        self._lock = lock
        self._limit = limit
        self._on_close = on_close
        self._what = f"Share group {group!r} of topic {self._topic!r}"
        most = max(1, min(_MOST_AT_ONCE, subscription.max_outstanding))
        self._config = member_config(connection.client_config("consumer"), group, most)
        self._loop = asyncio.get_running_loop()
        self._members: dict[ShareMember, Batch | None] = {}
        self._asking: FetchScheduler[ShareMember] = FetchScheduler(connection.settings.share_members, partitions)
        self._adding: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[bool]] = set()
        self._buffer: deque[Message[Any]] = deque()
        self._failures: deque[BrokerError] = deque()
        self._part = JoinState(self._what, connection.settings)
        self._waker = Waker()
        self._interrupted = self._fetching = self._closed = False

    async def open(self, *, waits: bool) -> None:
        """Start the first member.

        :param waits: until it takes part, which shows that the brokers have share groups.
        :raises OperationTimeout: it does not in time.
        """
        await self._add(watches=True)
        if not waits:
            return
        self._ask(self._loop.time())
        await self._part.wait()

    # -- fetching ------------------------------------------------------------------------------------------

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        self._fetching = True
        until = self._loop.time() + wait
        stuck_at = self._loop.time() + _PATIENCE
        try:
            while True:
                self._expire_late()
                if self._buffer:
                    return take_from(self._buffer, max_messages, max_bytes)
                if self._failures:
                    raise self._failures.popleft()
                if self._interrupted:
                    return []
                now = self._loop.time()
                self._ask(now)
                if now >= stuck_at and self._asking.needs_another(self._members, now):
                    self._add_soon()
                left = until - now
                if left <= 0:
                    if self._connection.down:
                        raise ConnectionFailed(f"No broker at {self._connection.servers} can be reached")
                    self._let_idle_go(now)
                    return []
                look = self._asking.look_after(self._members)
                await self._waker.wait(left if look is None else min(left, stuck_at - now if now < stuck_at else look))
                if self._closed:
                    return []
        finally:
            self._fetching = self._interrupted = False

    async def is_idle(self, seconds: float) -> bool:
        """The brokers do not tell: it has taken part for so long that it was answered what there is."""
        return self._part.is_idle()

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def _ask(self, now: float) -> None:
        if (member := self._asking.next(self._members, now)) is not None:
            member.want()

    # -- settling ------------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        results: list[BrokerError | None] = [None] * len(settlements)
        now = lease_time()
        asked: dict[Batch, list[int]] = {}
        for index, settlement in enumerate(settlements):
            batch: Batch = settlement.message.lease
            if now >= batch.deadline or place_of(settlement.message) not in batch.open:
                results[index] = LeaseLost(f"{self._what}: the lock of message {settlement.message.id!r} has ended")
                continue
            asked.setdefault(batch, []).append(index)
            if settlement.outcome in (Outcome.NACK, Outcome.RELEASE):
                self._tell_if_last(settlement.message, "given back")

        async def of(batch: Batch, indices: list[int]) -> None:
            wanted = [
                Acknowledgement(*place_of(settlements[index].message), _KINDS[settlements[index].outcome])
                for index in indices
            ]
            try:
                answers: Sequence[BrokerError | None] = await batch.member.settle(wanted)
            except BrokerError as error:
                answers = [error] * len(indices)
            for index, answer in zip(indices, answers, strict=True):
                results[index] = answer
                batch.open.pop(place_of(settlements[index].message), None)
            self._finish(batch)

        await asyncio.gather(*(of(batch, indices) for batch, indices in asked.items()))
        return results

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Never done: the client of Kafka cannot renew a lock."""
        return [Unsupported("The lock of a share group's message cannot be renewed")] * len(messages)

    def lose_over(self, messages: Sequence[Message[Any]]) -> None:
        now = lease_time()
        if any(now >= message.lease.deadline for message in messages):
            self._expire_late()

    def lease_left(self, message: Message[Any]) -> float:
        return message.lease.deadline - lease_time()

    def _finish(self, batch: Batch) -> None:
        """If all of it is settled, its member is free for the next."""
        if batch.open or self._members.get(batch.member) is not batch:
            return
        self._members[batch.member] = None
        batch.stop_timers()
        self._waker.wake()

    def _is_last(self, message: Message[Any]) -> bool:
        """Whether the brokers drop it after this delivery."""
        attempt = message.raw.delivery_count()
        return self._limit is not None and attempt is not None and attempt >= self._limit

    def _tell_if_last(self, message: Message[Any], what: str) -> None:
        if self._is_last(message):
            delivery = f"delivery {message.raw.delivery_count()} of {self._limit}"
            text = f"{self._what}: message {message.id!r} was {what} after {delivery}, and the brokers drop it"
            logger.warning(text)
            self._listener.event(Warned(text=text))

    # -- locks ---------------------------------------------------------------------------------------------

    def _expire(self, batch: Batch) -> None:
        """The lock is about to end: nothing of it is ours any more."""
        if self._closed or not batch.open:
            return
        places = list(batch.open)
        self._lose(batch)
        self._give_up(batch, places)

    def _expire_late(self) -> None:
        """What came late, or timers that are late, as of a process that stood still: others may have these by now."""
        now = lease_time()
        for batch in list(self._members.values()):
            if batch is not None and now >= batch.deadline:
                self._expire(batch)

    def _lose(self, batch: Batch) -> None:
        gone = list(batch.open.values())
        self._buffer = deque(message for message in self._buffer if message.lease is not batch)
        batch.open.clear()
        self._listener.lost(gone)
        for message in gone:
            self._tell_if_last(message, "lost")

    def _give_back_waiting(self, batch: Batch) -> None:
        """What nobody has asked for in half of the lock is for others."""
        if self._closed:
            return
        waiting = [each for each in self._buffer if each.lease is batch and not self._is_last(each)]
        if waiting:
            self._buffer = deque(each for each in self._buffer if each.lease is not batch or self._is_last(each))
            places = [place_of(message) for message in waiting]
            for place in places:
                del batch.open[place]
            self._give_up(batch, places)

    def _give_up(self, batch: Batch, places: Sequence[tuple[int, int]]) -> None:
        try:
            batch.member.give_up(places)
        except BrokerError as error:
            logger.debug("%s: %s", self._what, error)
        self._finish(batch)

    # -- MemberHost ----------------------------------------------------------------------------------------

    def arrived(self, member: ShareMember, records: Sequence[NativeRecord], since: float) -> None:
        if self._closed or member not in self._members:
            return  # leaving the group gives them back
        self._asking.arrived(member, self._loop.time())
        batch = Batch(member, since + self._lock - min(1.0, self._lock / 10))
        for raw in records:
            message: Message[Any] = Message(self._topic, raw.value(), raw, SHARE_VIEW, lease=batch, size=len(raw))
            batch.open[place_of(message)] = message
            (self._buffer.appendleft if self._is_last(message) else self._buffer.append)(message)
        self._members[member] = batch
        now = lease_time()
        batch.timers = [
            self._loop.call_later(since + self._lock / 2 - now, self._give_back_waiting, batch),
            self._loop.call_later(batch.deadline - now, self._expire, batch),
        ]
        self._part.begun()
        self._waker.wake()

    def joined(self, member: ShareMember) -> None:
        self._part.begun()

    def failed(self, member: ShareMember, error: BrokerError) -> None:
        if self._closed:
            return
        if member.failure is not None:
            self._forget(member)
        found = kafka_error(error.native) if error.native is not None else None
        if found is not None and found.code() == KafkaError.UNSUPPORTED_VERSION:
            error = no_share_groups(self._connection, error.native)
        self._part.failed(error)
        self._fail(error)

    def _fail(self, error: BrokerError) -> None:
        """Have the next fetch raise it, unless one that says no less waits for that already.

        Members tell the same ten times a second, and it may be long until somebody fetches.
        """
        if not self._failures or (not error.retriable and all(each.retriable for each in self._failures)):
            self._failures.append(error)
        self._waker.wake()

    # -- members -------------------------------------------------------------------------------------------

    def _add_soon(self) -> None:
        if self._adding is None:
            self._adding = self._loop.create_task(self._add_another(), name="broker-kafka-share-member")

    async def _add_another(self) -> None:
        try:
            await self._add(watches=False)
        except BrokerError as error:
            self._fail(error)
        finally:
            self._adding = None
            self._waker.wake()

    async def _add(self, *, watches: bool) -> None:
        member = ShareMember(
            self._config,
            self,
            topic=self._topic,
            name=f"broker-kafka-share-{self.group}",
            watches=watches,
            timeout=self._connection.settings.request_timeout,
        )
        try:
            await member.start()
        except BaseException:
            self._end_soon(member)
            raise
        if self._closed:
            await member.stop(_CLOSE_SECONDS)
            return
        self._members[member] = None
        self._asking.added(member, self._loop.time())

    def _let_idle_go(self, now: float) -> None:
        """End a member that was not needed for long."""
        if (member := self._asking.idle(self._members, now)) is not None:
            del self._members[member]
            self._asking.gone(member)
            self._end_soon(member)

    def _end_soon(self, member: ShareMember) -> None:
        task = self._loop.create_task(member.stop(_CLOSE_SECONDS), name="broker-kafka-share-leaving")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _forget(self, member: ShareMember) -> None:
        """It has ended by itself: what it held comes again when the brokers miss it."""
        batch = self._members.pop(member, None)
        self._asking.gone(member)
        if batch is not None:
            batch.stop_timers()
            self._lose(batch)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._waker.wake()
        try:
            await self._leave()
        finally:
            self._on_close(self)

    async def _leave(self) -> None:
        for batch in self._members.values():
            if batch is not None:
                batch.stop_timers()
                for message in batch.open.values():
                    self._tell_if_last(message, "given back")
        if self._adding is not None:
            await asyncio.wait({self._adding})
        left = await asyncio.gather(*(member.stop(_CLOSE_SECONDS) for member in self._members), *self._leaving)
        if not all(left):
            logger.warning("%s: leaving takes long; what it holds comes again when its lock ends", self._what)
        self._members.clear()
        self._buffer.clear()
        if self._ephemeral:
            try:
                await delete_group(self._connection, self.group)
            except BrokerError as error:
                logger.debug("%s stays: %s", self._what, error)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._what} was closed")


async def subscribe(
    connection: Connection,
    subscription: MessageSubscription,
    listener: SourceListener,
    on_close: Callable[[ShareMessageSource], object],
) -> ShareMessageSource:
    """Join the group; a new one has a member when this returns.

    :raises TopicNotFound: there is no such topic.
    :raises SubscriptionNotFound: nobody has made the group, and it is not to be made.
    :raises InvalidName: a consumer group has the name of the group.
    :raises Unsupported: the brokers have no share groups, or retry topics are asked for.
    """
    if subscription.retry_topics:
        raise Unsupported("A share group has no retry topics", advice="Leave out retry_topics, or queue=share")
    partitions = await partitions_of(connection, subscription.topic)
    group, ephemeral = group_id(subscription.subscription), isinstance(subscription.subscription, Ephemeral)
    waits = False
    if subscription.create or ephemeral:
        before, config = await prepare(connection, group, subscription.start)
        waits = not before.exists
    else:
        config = await require(connection, subscription.topic, group)
    source = ShareMessageSource(
        connection,
        subscription,
        listener,
        group=group,
        lock=config.lock_seconds,
        limit=config.delivery_limit,
        partitions=len(partitions),
        on_close=on_close,
    )
    try:
        await source.open(waits=waits)
    except BaseException:
        await source.close()
        raise
    counted = configured_lock(connection.settings)
    if config.lock_seconds < counted:
        text = (
            f"Share group {group!r} locks its messages for {config.lock_seconds:g} s, and delays and retries of this "
            f"connection are measured by {counted:g} s, so that what waits here may be lost to others before its time. "
            f"Connect with share_lock={config.lock_seconds:g}"
        )
        logger.warning(text)
        listener.event(Warned(text=text))
    return source
