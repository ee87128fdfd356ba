"""The Message family over a share group (KIP-932): the brokers lease each message and count its deliveries.

*Members.* A member of librdkafka gets no further batch until its last one is settled, and only messages of the
partitions that the brokers give it. One member fetches; the others help when it gets nothing. Another is added, up
to `share_members`, when these get nothing either while some member waits for its last message. *Leases* last as long
as the group's lock and are not renewed. A message that is not settled in time is reported as lost a little before the
lock ends, since a late ack fails for all acks of its partition that are sent with it. Messages that no fetch returned
within half of the lock are released to other consumers; each delivery counts. A message on its last delivery is
returned first and never released; a warning reports when it ends without an ack. *Settling.* The broker answers each
ack. *Close* leaves the group, which releases unsettled messages at once. *Failure.* Members reconnect by themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from confluent_kafka import AcknowledgeType, KafkaError

from broker import (
    BrokerError,
    Closed,
    LeaseLost,
    Message,
    OperationTimeout,
    Outcome,
    Unsupported,
)
from broker.driver import (
    Ephemeral,
    MessageSubscription,
    Settlement,
    SourceListener,
    TaskSet,
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
from broker_kafka.settings import KafkaSettings
from broker_kafka.share.fetch_scheduling import FetchScheduler
from broker_kafka.share.group_config import (
    configure_group,
    configured_lock,
    delete_group,
    no_share_groups,
    require_group,
)
from broker_kafka.share.member import Acknowledgement, ShareMember, member_config

__all__ = ["SHARE_VIEW", "Batch", "JoinState", "ShareMessageSource", "place_of", "subscribe"]

_CLOSE_SECONDS: Final = 8.0
_MAX_BATCH: Final = 500
_ADD_AFTER: Final = 0.05
"""Seconds without a message after which a member may be added."""

_FIRST_FETCH: Final = 0.5
"""Seconds that the first fetch takes beyond `fetch_wait_max_ms`: the brokers look up the group's coordinator."""

_KINDS: Final = {
    Outcome.ACK: AcknowledgeType.ACCEPT,
    Outcome.REJECT: AcknowledgeType.REJECT,
    Outcome.NACK: AcknowledgeType.RELEASE,
    Outcome.RELEASE: AcknowledgeType.RELEASE,
}


async def subscribe(
    connection: Connection,
    subscription: MessageSubscription,
    listener: SourceListener,
    on_close: Callable[[ShareMessageSource], object],
) -> ShareMessageSource:
    """Create the group if it is missing, and join it; a new one has a member when this returns.

    A cancelled call leaves no member. A `Warned` event reports a group whose lock is shorter than `share_lock`.

    :raises TopicNotFound: there is no such topic.
    :raises SubscriptionNotFound: the group does not exist, and `create` is False.
    :raises InvalidName: a consumer group has the name of the group.
    :raises Unsupported: the brokers have no share groups, or the subscription has retry topics.
    """
    if subscription.retry_topics:
        raise Unsupported("A share group has no retry topics", advice="Leave out retry_topics, or queue=share")
    partitions = await partitions_of(connection, subscription.topic)
    group, ephemeral = group_id(subscription.subscription), isinstance(subscription.subscription, Ephemeral)
    is_new = False
    if subscription.create or ephemeral:
        before, config = await configure_group(connection, group, subscription.start)
        is_new = not before.exists
    else:
        config = await require_group(connection, subscription.topic, group)
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
        await source.open(wait_joined=is_new)
    except BaseException:
        await source.close()
        raise
    counted = configured_lock(connection.settings)
    if config.lock_seconds < counted:
        text = (
            f"Share group {group!r} locks its messages for {config.lock_seconds:g} s, but this connection counts on "
            f"{counted:g} s for delays and retries: a message that waits here may be lost before its delay ends. "
            f"Connect with share_lock={config.lock_seconds:g}"
        )
        logger.warning(text)
        listener.event(Warned(text=text))
    return source


class ShareMessageSource:
    """Implements `MessageSource`, `ReportsIdle`, `ExpiresLeases` and `ReportsLeaseLeft`.

    :param lock: seconds for which a message is leased.
    :param limit: deliveries after which the brokers drop a message; None if unknown.
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
        most = max(1, min(_MAX_BATCH, subscription.max_outstanding))
        self._config = member_config(connection.client_config("consumer"), group, most)
        self._loop = asyncio.get_running_loop()
        self._members: dict[ShareMember, Batch | None] = {}
        self._scheduler: FetchScheduler[ShareMember] = FetchScheduler(connection.settings.share_members, partitions)
        self._adding: asyncio.Task[None] | None = None
        self._leaving = TaskSet("broker-kafka-share-leaving", lambda error: logger.debug("%s: %s", self._what, error))
        self._buffer: deque[Message[Any]] = deque()
        self._failures: deque[BrokerError] = deque()
        self._join = JoinState(self._what, connection.settings)
        self._waker = Waker()
        self._interrupted = self._fetching = self._closed = False

    async def open(self, *, wait_joined: bool) -> None:
        """Start the first member.

        :param wait_joined: whether to wait for its partitions, which proves that the brokers have share groups.
        :raises OperationTimeout: it got none in time.
        """
        await self._add(reports_joined=True)
        if not wait_joined:
            return
        self._fetch_next(self._loop.time())
        await self._join.wait()

    # -- fetching ------------------------------------------------------------------------------------------

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        self._fetching = True
        until = self._loop.time() + wait
        add_at = self._loop.time() + _ADD_AFTER
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
                self._fetch_next(now)
                if now >= add_at and self._scheduler.needs_another(self._members, now):
                    self._add_soon()
                left = until - now
                if left <= 0:
                    if self._connection.down:
                        raise self._connection.unreachable()
                    self._stop_idle(now)
                    return []
                recheck = self._scheduler.recheck_after(self._members)
                await self._waker.wait(
                    left if recheck is None else min(left, add_at - now if now < add_at else recheck)
                )
                if self._closed:
                    return []
        finally:
            self._fetching = self._interrupted = False

    async def is_idle(self, seconds: float) -> bool:
        """The brokers do not report it: whether this consumer has been in the group for a whole fetch."""
        return self._join.is_idle()

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def _fetch_next(self, now: float) -> None:
        if (member := self._scheduler.next_member(self._members, now)) is not None:
            member.fetch()

    # -- settling ------------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        results: list[BrokerError | None] = [None] * len(settlements)
        now = lease_time()
        by_batch: dict[Batch, list[int]] = {}
        for index, settlement in enumerate(settlements):
            batch: Batch = settlement.message.lease
            if now >= batch.deadline or place_of(settlement.message) not in batch.open:
                results[index] = LeaseLost(f"{self._what}: the lock of message {settlement.message.id!r} has ended")
                continue
            by_batch.setdefault(batch, []).append(index)
            if settlement.outcome in (Outcome.NACK, Outcome.RELEASE):
                self._warn_if_last(settlement.message, "released")

        async def acknowledge(batch: Batch, indices: list[int]) -> None:
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

        await asyncio.gather(*(acknowledge(batch, indices) for batch, indices in by_batch.items()))
        return results

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Not possible: the Kafka client cannot renew a lock."""
        return [Unsupported("The lock of a share group's message cannot be renewed")] * len(messages)

    def expire_leases(self, messages: Sequence[Message[Any]]) -> None:
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

    def _warn_if_last(self, message: Message[Any], what: str) -> None:
        if self._is_last(message):
            delivery = f"delivery {message.raw.delivery_count()} of {self._limit}"
            text = f"{self._what}: message {message.id!r} was {what} after {delivery}, and the brokers drop it"
            logger.warning(text)
            self._listener.event(Warned(text=text))

    # -- locks ---------------------------------------------------------------------------------------------

    def _expire(self, batch: Batch) -> None:
        """The lock is about to end: the messages of the batch are lost."""
        if self._closed or not batch.open:
            return
        places = list(batch.open)
        self._lose(batch)
        self._release(batch, places)

    def _expire_late(self) -> None:
        """Expire batches whose timer is late, after a suspension: other consumers may have their messages."""
        now = lease_time()
        for batch in list(self._members.values()):
            if batch is not None and now >= batch.deadline:
                self._expire(batch)

    def _lose(self, batch: Batch) -> None:
        lost = list(batch.open.values())
        self._buffer = deque(message for message in self._buffer if message.lease is not batch)
        batch.open.clear()
        self._listener.lost(lost)
        for message in lost:
            self._warn_if_last(message, "lost")

    def _release_waiting(self, batch: Batch) -> None:
        """Release messages that no fetch returned within half of the lock."""
        if self._closed:
            return
        waiting = [each for each in self._buffer if each.lease is batch and not self._is_last(each)]
        if waiting:
            self._buffer = deque(each for each in self._buffer if each.lease is not batch or self._is_last(each))
            places = [place_of(message) for message in waiting]
            for place in places:
                del batch.open[place]
            self._release(batch, places)

    def _release(self, batch: Batch, places: Sequence[tuple[int, int]]) -> None:
        try:
            batch.member.release(places)
        except BrokerError as error:
            logger.debug("%s: %s", self._what, error)
        self._finish(batch)

    # -- MemberHost ----------------------------------------------------------------------------------------

    def arrived(self, member: ShareMember, records: Sequence[NativeRecord], since: float) -> None:
        if self._closed or member not in self._members:
            return  # leaving the group releases them
        self._scheduler.received(member, self._loop.time())
        batch = Batch(member, since + self._lock - min(1.0, self._lock / 10))
        for raw in records:
            message: Message[Any] = Message(self._topic, raw.value(), raw, SHARE_VIEW, lease=batch, size=len(raw))
            batch.open[place_of(message)] = message
            (self._buffer.appendleft if self._is_last(message) else self._buffer.append)(message)
        self._members[member] = batch
        now = lease_time()
        batch.timers = [
            self._loop.call_later(since + self._lock / 2 - now, self._release_waiting, batch),
            self._loop.call_later(batch.deadline - now, self._expire, batch),
        ]
        self._join.succeeded()
        self._waker.wake()

    def joined(self, member: ShareMember) -> None:
        self._join.succeeded()

    def failed(self, member: ShareMember, error: BrokerError) -> None:
        if self._closed:
            return
        if member.failure is not None:
            self._forget(member)
        found = kafka_error(error.native) if error.native is not None else None
        if found is not None and found.code() == KafkaError.UNSUPPORTED_VERSION:
            error = no_share_groups(self._connection, error.native)
        self._join.failed(error)
        self._fail(error)

    def _fail(self, error: BrokerError) -> None:
        """Have the next fetch raise the error, unless one of the same kind waits already.

        Members report the same error ten times a second, and the next fetch may be far.
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
            await self._add(reports_joined=False)
        except BrokerError as error:
            self._fail(error)
        finally:
            self._adding = None
            self._waker.wake()

    async def _add(self, *, reports_joined: bool) -> None:
        member = ShareMember(
            self._config,
            self,
            topic=self._topic,
            name=f"broker-kafka-share-{self.group}",
            reports_joined=reports_joined,
            timeout=self._connection.settings.request_timeout,
        )
        try:
            await member.start()
        except BaseException:
            self._leaving.spawn(member.stop(_CLOSE_SECONDS))
            raise
        if self._closed:
            await member.stop(_CLOSE_SECONDS)
            return
        self._members[member] = None
        self._scheduler.add(member, self._loop.time())

    def _stop_idle(self, now: float) -> None:
        """Stop a member that was not needed for long."""
        if (member := self._scheduler.idle_member(self._members, now)) is not None:
            del self._members[member]
            self._scheduler.remove(member)
            self._leaving.spawn(member.stop(_CLOSE_SECONDS))

    def _forget(self, member: ShareMember) -> None:
        """A member ended by itself: the brokers redeliver its messages when its session ends."""
        batch = self._members.pop(member, None)
        self._scheduler.remove(member)
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
                    self._warn_if_last(message, "released")
        if self._adding is not None:
            await asyncio.wait({self._adding})
        left = await asyncio.gather(*(member.stop(_CLOSE_SECONDS) for member in self._members), *self._leaving)
        if not all(left):
            logger.warning(
                "%s: leaving took too long; unsettled messages are redelivered when their lock ends", self._what
            )
        self._members.clear()
        self._buffer.clear()
        if self._ephemeral:
            try:
                await delete_group(self._connection, self.group)
            except BrokerError as error:
                logger.debug("%s was not deleted: %s", self._what, error)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._what} is closed")


class JoinState:
    """Whether and since when a consumer has partitions of its share group: it is idle only after a fetch since then.

    :param what: the consumer, for errors.
    """

    def __init__(self, what: str, settings: KafkaSettings) -> None:
        self._what = what
        self._timeout: Final = settings.request_timeout
        self._first_answer: Final = settings.fetch_wait_max_ms / 1000 + _FIRST_FETCH
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._joined_at: float | None = None
        self._decided = asyncio.Event()
        self._failure: BrokerError | None = None

    def succeeded(self) -> None:
        """A member has partitions, or messages."""
        if self._joined_at is None:
            self._joined_at = self._loop.time()
            self._decided.set()

    def failed(self, error: BrokerError) -> None:
        """A member cannot join; retriable errors are ignored."""
        if self._joined_at is None and not error.retriable:
            self._failure = error
            self._decided.set()

    async def wait(self) -> None:
        """Wait until a member has joined.

        :raises BrokerError: none can. :raises OperationTimeout: none did within `request_timeout`.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._decided.wait()
        except TimeoutError as error:
            raise OperationTimeout(
                f"{self._what}: no partition was assigned in {self._timeout:g} s",
                advice="A new group waits for the brokers' group.share.heartbeat.interval.ms; raise request_timeout",
            ) from error
        if self._joined_at is None and self._failure is not None:
            raise self._failure

    def is_idle(self) -> bool:
        """Whether no message means that there is none: a fetch was answered since, or no member ever joins."""
        now = self._loop.time()
        if self._joined_at is None:
            return now - self._opened_at >= self._timeout
        return now - self._joined_at >= self._first_answer


class Batch:
    """The unsettled messages of one member, and the `lease` of each of them. Used on the loop."""

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


class _ShareView(RecordView):
    __slots__ = ()

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return raw.delivery_count()


SHARE_VIEW: Final = _ShareView()
"""A record with its delivery count. Safe from any thread."""
