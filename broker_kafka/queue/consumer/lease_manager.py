"""`HeldMessage` and `LeaseManager`: the leases of messages that this process holds, and the markers that change them.

*Concurrency.* One event loop; calls may overlap. *Cancellation.* A write that has begun continues. *Failure.* A marker
that is not on the brokers in time leaves its messages held, so that the call can be repeated. A message whose lease is
over gets no marker; the error depends on what the log may hold:

| state of the message | error |
|---|---|
| no END was ever given to the producer | `LeaseLost`: the message is redelivered |
| an END was, and was answered too late or not at all | `SettleError`: the message may be redelivered, or be done |

*ENDs in a transaction.* A tracker reads committed markers in the order of the log, and its clock stops while an open
transaction hides part of the log. An END that reached the brokers within its lease is therefore read before that
lease can be due, whenever its transaction commits. A lease is not renewed once its END is written; a KEEPALIVE that was
already on its way follows the END, and counts only if the transaction is aborted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from broker import BrokerError, LeaseLost, Message, OperationTimeout, OutboundMessage, Outcome, SettleError
from broker.driver import Settlement, TaskSet, lease_time, logger
from broker_kafka.queue.markers.marker_producer import MarkerProducer, PlacedMarker, explain_marker_error
from broker_kafka.queue.markers.wire import Kind, Marker, MarkerFormat, MessageId, write_marker

__all__ = ["HeldMessage", "LeaseManager", "expired_messages"]

# Attributes of an enum class cost a slow look-up each; these are read per message.
_ACK: Final = Outcome.ACK
_REJECT: Final = Outcome.REJECT

_REASON_CHARACTERS: Final = 1000
"""A marker carries no more of a reason."""
_MAX_COUNT: Final = 2**32 - 1
"""The largest attempt count that a marker can carry."""

Produce = Callable[[str, Sequence[OutboundMessage]], Awaitable[Sequence[object]]]
"""Produces into an open transaction, each message to the partition it names; returns an error for each that failed."""


class HeldMessage(msgspec.Struct, eq=False, gc=False):
    """A message that this process holds: its id, the partition of its markers, and its lease.

    :ivar partition: of the marker topic, chosen once: all markers of a message lie in one, however the topic grows.
    :ivar attempt: how many deliveries count, this one included; above the count of its START once `kept`.
    :ivar until: the `lease_time` at which the lease ends, as far as is known here: one lease after the last START or
        KEEPALIVE on the brokers was begun. A tracker counts from the write itself, which is later.
    :ivar due: the `lease_time` before which the message is not to be delivered again; 0 without a delay.
    :ivar kept: whether it was delivered again from memory, or waits for that: its KEEPALIVEs carry the attempt count.
    :ivar ended: whether an END or a release was written, after which nothing more may be.
    :ivar end_sent: whether an END was ever given to the producer, and so may be on the brokers.
    """

    id: MessageId
    partition: int
    attempt: int
    until: float = 0.0
    due: float = 0.0
    kept: bool = False
    ended: bool = False
    end_sent: bool = False


class LeaseManager:
    """:param lease_seconds: a message is redelivered after so long without a KEEPALIVE.
    :param format: of the markers.
    """

    def __init__(self, producer: MarkerProducer, *, lease_seconds: float, format: MarkerFormat) -> None:
        self._producer = producer
        self._max_markers: Final = format.markers_per_record
        self._v1: Final = format.v1
        self.lease_seconds: Final = lease_seconds
        self.lease_ms: Final = max(1, int(1000 * lease_seconds))
        # The producer was closed: the leases end by themselves.
        self._tasks = TaskSet("broker-kafka-leases", lambda error: logger.debug("Markers were not written: %s", error))

    # -- settling ------------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> list[BrokerError | None]:
        """As `MessageSource.settle`."""
        results: list[BrokerError | None] = [None] * len(settlements)
        index_of: dict[HeldMessage, int] = {}
        markers: list[tuple[PlacedMarker, list[HeldMessage]]] = []
        ended: list[HeldMessage] = []
        now = lease_time()
        for index, settlement in enumerate(settlements):
            held: HeldMessage = settlement.message.lease
            if now >= held.until:
                # A tracker may have sent the message again.
                results[index] = _expired_error(held)
            elif not held.ended:
                held.ended = True
                index_of[held] = index
                if settlement.outcome is _ACK or settlement.outcome is _REJECT:
                    held.end_sent = True
                    ended.append(held)
                else:
                    markers.append((self._release(held, settlement), [held]))
        markers += self._ends(ended)
        if not markers:
            return results
        outcomes = await self._producer.write([marker for marker, _ in markers])
        failed: list[BrokerError] = []
        now = lease_time()
        for (_, group), error in zip(markers, outcomes, strict=True):
            for held in group:
                if error is not None:
                    failed.append(error)
                    held.ended = False
                    results[index_of[held]] = error
                elif now >= held.until:
                    # A release that is late is redelivered all the same; an END may have been in time.
                    results[index_of[held]] = _expired_error(held)
        if len(failed) == len(results) and all(error.retriable for error in failed):
            raise failed[0]
        return results

    def release_now(self, messages: Iterable[HeldMessage]) -> None:
        """Have these redelivered at once, without a delivery counted; returns before that is written."""
        markers: list[PlacedMarker] = []
        for held in messages:
            held.ended = True
            markers.append(self._released(held, 0, held.attempt - 1, ""))
        if markers:
            self._tasks.spawn(self._producer.write(markers))

    # -- acks in a transaction -----------------------------------------------------------------------------

    async def write_ends(self, messages: Sequence[Message[Any]], produce: Produce) -> Sequence[BrokerError | None]:
        """As `TransactionalAcks.add_acks`; nothing is retried here."""
        held: list[HeldMessage] = [message.lease for message in messages]
        lost = _lost_among(held, ended=False)
        if any(lost):
            return lost
        for each in held:
            each.ended = True
        topic, records = self._producer.records([marker for marker, _ in self._ends(held)])
        outcomes = await produce(topic, records)
        for outcome, record in zip(outcomes, records, strict=True):
            if isinstance(outcome, BrokerError):
                return [explain_marker_error(outcome, topic, len(record.data or b""))] * len(held)
        return _lost_among(held, ended=True)

    def discard_ends(self, messages: Sequence[Message[Any]]) -> None:
        """As `TransactionalAcks.acks_aborted`."""
        for message in messages:
            message.lease.ended = False

    # -- renewing ------------------------------------------------------------------------------------------

    async def keep(self, held: HeldMessage, attempt: int | None, delay: float) -> BrokerError | None:
        """As `StoresAttempts.store_attempt`.

        :param attempt: how many deliveries count; None leaves the count as it is.
        """
        begun = lease_time()
        if held.ended:
            return None
        if begun >= held.until:
            return _lost(held)
        held.kept, held.due = True, begun + delay if delay else 0.0
        held.attempt = held.attempt if attempt is None else min(attempt, _MAX_COUNT)
        (error,) = await self._producer.write([self._keepalive([held])])
        if error is None and lease_time() < held.until:
            held.until = max(held.until, begun + self.lease_seconds, held.due)
        return error

    async def extend(self, messages: Sequence[HeldMessage]) -> list[BrokerError | None]:
        """Renew the leases of these; returns within a third of a lease. A message that is being settled needs none."""
        begun = lease_time()
        renewed = [held for held in dict.fromkeys(messages) if not held.ended and begun < held.until]
        failed: dict[HeldMessage, BrokerError] = {}
        if renewed:
            work = self._tasks.spawn(self._write_keepalives(renewed))
            await asyncio.wait({work}, timeout=self.lease_seconds / 3)
            answered = lease_time()
            if work.done():
                for held, error in work.result().items():
                    if error is not None:
                        failed[held] = error
                    elif answered < held.until:
                        held.until = max(held.until, begun + self.lease_seconds)
                    # Else the KEEPALIVE may have come after the lease, and trackers ignore it.
            else:
                failed = dict.fromkeys(renewed, OperationTimeout("The brokers did not take the KEEPALIVEs in time"))
        now = lease_time()
        return [_expired_error(held) if now >= held.until else failed.get(held) for held in messages]

    async def _write_keepalives(self, messages: Iterable[HeldMessage]) -> dict[HeldMessage, BrokerError | None]:
        # A task runs after everything that was ready before it: a message that is being settled by now is left out.
        present = [held for held in messages if not held.ended]
        groups = self._groups([held for held in present if not held.kept])
        groups += [[held] for held in present if held.kept]
        if not groups:
            return {}
        outcomes = await self._producer.write([self._keepalive(group) for group in groups])
        return {held: error for group, error in zip(groups, outcomes, strict=True) for held in group}

    # -- markers -------------------------------------------------------------------------------------------

    def _groups(self, messages: Sequence[HeldMessage]) -> list[list[HeldMessage]]:
        """Messages that share one KEEPALIVE or END."""
        groups: dict[tuple[int, str, int], list[HeldMessage]] = {}
        last: tuple[int, str, int] | None = None
        group: list[HeldMessage] = []
        for held in messages:
            topic, partition, _, _ = held.id
            place = (held.partition, topic, partition)
            if place != last:
                last, group = place, groups.setdefault(place, [])
            group.append(held)
        most = self._max_markers
        return [group[at : at + most] for group in groups.values() for at in range(0, len(group), most)]

    def _ends(self, messages: Sequence[HeldMessage]) -> list[tuple[PlacedMarker, list[HeldMessage]]]:
        """ENDs of these, each with the messages that it ends."""
        ends: list[tuple[PlacedMarker, list[HeldMessage]]] = []
        for group in self._groups(messages):
            first, *more = group
            marker = Marker(kind=Kind.END, id=first.id, more=tuple([held.id.offset for held in more]))
            ends.append((PlacedMarker(first.partition, write_marker(marker, v1=self._v1)), group))
        return ends

    def _keepalive(self, group: Sequence[HeldMessage]) -> PlacedMarker:
        first, *more = group
        marker = Marker(
            kind=Kind.KEEPALIVE,
            id=first.id,
            after_ms=max(self.lease_ms, _remaining_ms(first)),
            attempt=first.attempt if first.kept else None,
            more=tuple([held.id.offset for held in more]),
        )
        return PlacedMarker(first.partition, write_marker(marker, v1=self._v1))

    def _release(self, held: HeldMessage, settlement: Settlement) -> PlacedMarker:
        # An untried message counts as not delivered; one that waits for its next try was tried.
        untried = settlement.outcome is Outcome.RELEASE and not held.due
        after_ms = max(round(1000 * (settlement.delay or 0.0)), _remaining_ms(held))
        return self._released(held, after_ms, held.attempt - untried, settlement.error or settlement.reason)

    def _released(self, held: HeldMessage, after_ms: int, attempts: int, reason: str) -> PlacedMarker:
        marker = Marker(
            kind=Kind.KEEPALIVE,
            id=held.id,
            after_ms=after_ms,
            attempt=attempts,
            released=True,
            reason=reason[:_REASON_CHARACTERS],
        )
        return PlacedMarker(held.partition, write_marker(marker, v1=self._v1))


def expired_messages(messages: Sequence[Message[Any]]) -> list[Message[Any]]:
    """The messages whose leases have ended."""
    now = lease_time()
    for message in messages:
        if message.lease.until <= now:
            return [each for each in messages if each.lease.until <= now]
    return []


def _remaining_ms(held: HeldMessage) -> int:
    """Milliseconds until the message may be delivered again."""
    return max(0, math.ceil(1000 * (held.due - lease_time()))) if held.due else 0


def _lost_among(messages: Iterable[HeldMessage], *, ended: bool) -> list[BrokerError | None]:
    """LeaseLost for each whose lease is over, or whose `ended` is another than the caller left it."""
    now = lease_time()
    return [_lost(held) if now >= held.until or held.ended != ended else None for held in messages]


def _expired_error(held: HeldMessage) -> BrokerError:
    """The error of a message whose lease is over."""
    if not held.end_sent:
        return _lost(held)
    topic, partition, offset, queue = held.id
    return SettleError(
        f"The lease of {topic}[{partition}]@{offset} in queue {queue!r} ended before its END was known to be written",
        advice="The message may be redelivered, or be done: this process or the brokers were too slow; raise "
        "lease_seconds",
    )


def _lost(held: HeldMessage) -> LeaseLost:
    topic, partition, offset, queue = held.id
    return LeaseLost(
        f"The lease of {topic}[{partition}]@{offset} in queue {queue!r} is over",
        advice="The message is redelivered; raise lease_seconds if this process was only slow, and do not block the "
        "event loop, which renews leases",
    )
