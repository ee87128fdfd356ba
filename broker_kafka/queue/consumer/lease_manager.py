"""A message that this process holds: which one, where its markers lie, and until when it is ours.

MERGED broker_kafka.queue.consumer.lease_manager: What becomes of messages that are held here: ended, given back, kept; it writes their markers and minds their leases.

*Concurrency.* One event loop; calls may run at once. *Cancellation.* What was begun goes on. *Failure.* A marker that
is not on the brokers in time leaves its messages held, so that the call can be repeated. A message whose lease is over
is told as LeaseLost, and nothing is written of it: it comes again. It is told as SettleError if an END of it may be on
the brokers all the same, one that was answered only then, or one that got no answer and was to be repeated: the
message may come again, or be done.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from broker import BrokerError, LeaseLost, Message, OperationTimeout, Outcome, SettleError
from broker.driver import Settlement, lease_time
from broker_kafka.queue.markers.marker_producer import MarkerProducer, Placed
from broker_kafka.queue.markers.wire import Kind, Marker, MarkerFormat, MessageId, write_marker

__all__ = ["Hold", "LeaseBook", "joined", "over_of"]


class Hold(msgspec.Struct, eq=False, gc=False):
    """:ivar id: the message.
    :ivar partition: of the marker topic, chosen once: all markers of a message lie in one, whatever the topic grows to.
    :ivar attempt: how many deliveries count, this one included; more than its START tells once it was `kept`.
    :ivar until: the `lease_time` at which the lease is over as far as is known here: its last START or KEEPALIVE that
        is on the brokers was begun a lease before. A tracker counts from when it was written, which is later.
    :ivar due: the `lease_time` before which it is not to be delivered again; 0 while nobody waits for that.
    :ivar kept: whether it was delivered from memory, or waits for that: its KEEPALIVEs tell how often.
    :ivar ended: whether an END or a release was written, so that nothing more is to be said of it.
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


# Attributes of an enum class cost a slow look-up each; these are read per message.
_ACK: Final = Outcome.ACK
_REJECT: Final = Outcome.REJECT

_REASON: Final = 1000
"""Characters of a reason that a marker carries."""
_MOST: Final = 2**32 - 1
"""The largest count that a marker can tell."""


class LeaseBook:
    """:param lease_seconds: after so long without a KEEPALIVE a message comes again.
    :param format: of the markers.
    """

    def __init__(self, producer: MarkerProducer, *, lease_seconds: float, format: MarkerFormat) -> None:
        self._producer = producer
        self._together: Final = format.together
        self._v1: Final = format.v1
        self.lease_seconds: Final = lease_seconds
        self.lease_ms: Final = max(1, int(1000 * lease_seconds))
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def settle(self, settlements: Sequence[Settlement]) -> list[BrokerError | None]:
        """As `MessageSource.settle`."""
        results: list[BrokerError | None] = [None] * len(settlements)
        done: dict[Hold, int] = {}
        released: dict[Hold, Placed] = {}
        ended: list[Hold] = []
        now = lease_time()
        for place, settlement in enumerate(settlements):
            hold: Hold = settlement.message.lease
            if now >= hold.until:
                # A tracker may have given the message to somebody else.
                results[place] = _over(hold)
            elif not hold.ended:
                hold.ended = True
                done[hold] = place
                if settlement.outcome is _ACK or settlement.outcome is _REJECT:
                    hold.end_sent = True
                    ended.append(hold)
                else:
                    released[hold] = self._release(hold, settlement)
        markers = [(placed, [hold]) for hold, placed in released.items()]
        markers += self.ends(ended)
        if not markers:
            return results
        outcomes = await self._producer.write([placed for placed, _ in markers])
        failed: list[BrokerError] = []
        now = lease_time()
        for (_, holds), error in zip(markers, outcomes, strict=True):
            for hold in holds:
                if error is not None:
                    failed.append(error)
                    hold.ended = False
                    results[done[hold]] = error
                elif now >= hold.until:
                    # What was given back comes again, written too late or not; an END may have been in time.
                    results[done[hold]] = _over(hold)
        if len(failed) == len(results) and all(error.retriable for error in failed):
            raise failed[0]
        return results

    def give_back(self, holds: Iterable[Hold]) -> None:
        """Have these come again at once; nobody awaits it."""
        placed: list[Placed] = []
        for hold in holds:
            hold.ended = True
            placed.append(self._released(hold, 0, hold.attempt - 1, ""))
        if placed:
            task = self._loop.create_task(self._producer.write(placed), name="broker-kafka-give-back")
            self._tasks.add(task)
            task.add_done_callback(self._over)

    async def keep(self, hold: Hold, attempt: int | None, delay: float) -> BrokerError | None:
        """As `KeepsTries.keep`.

        :param attempt: how many deliveries count; None if nobody counts.
        """
        begun = lease_time()
        if hold.ended:
            return None
        if begun >= hold.until:
            return _lost(hold)
        hold.kept, hold.due = True, begun + delay if delay else 0.0
        hold.attempt = hold.attempt if attempt is None else min(attempt, _MOST)
        (error,) = await self._producer.write([self._keepalive([hold])])
        if error is None and lease_time() < hold.until:
            hold.until = max(hold.until, begun + self.lease_seconds, hold.due)
        return error

    async def extend(self, holds: Sequence[Hold]) -> list[BrokerError | None]:
        """Renew the leases of these; waits no longer than a third of one.

        A message that is being settled needs none, and is told as renewed.
        """
        begun = lease_time()
        renewed = [hold for hold in dict.fromkeys(holds) if not hold.ended and begun < hold.until]
        refused: dict[Hold, BrokerError] = {}
        if renewed:
            work = self._loop.create_task(self._write_keepalives(renewed), name="broker-kafka-extend")
            self._tasks.add(work)
            work.add_done_callback(self._over)
            await asyncio.wait({work}, timeout=self.lease_seconds / 3)
            answered = lease_time()
            if work.done():
                for hold, error in work.result().items():
                    if error is not None:
                        refused[hold] = error
                    elif answered < hold.until:
                        hold.until = max(hold.until, begun + self.lease_seconds)
                    # Else it may have been written when the lease was over, and a tracker heeds it no more.
            else:
                late = OperationTimeout("The brokers did not take the KEEPALIVEs in time")
                refused = dict.fromkeys(renewed, late)
        now = lease_time()
        return [_over(hold) if now >= hold.until else refused.get(hold) for hold in holds]

    async def _write_keepalives(self, holds: Iterable[Hold]) -> dict[Hold, BrokerError | None]:
        # A task begins after all that was ready before it: what is being settled by now is not to be kept behind that.
        present = [hold for hold in holds if not hold.ended]
        parts = joined((hold for hold in present if not hold.kept), self._together)
        parts += [[hold] for hold in present if hold.kept]
        if not parts:
            return {}
        outcomes = await self._producer.write([self._keepalive(part) for part in parts])
        return {hold: error for part, error in zip(parts, outcomes, strict=True) for hold in part}

    # -- markers -------------------------------------------------------------------------------------------

    def ends(self, holds: Iterable[Hold]) -> list[tuple[Placed, list[Hold]]]:
        """ENDs of these, and of which of them each tells."""
        return [(self._end(part), part) for part in joined(holds, self._together)]

    def lost(self, holds: Iterable[Hold], *, ended: bool = False) -> list[BrokerError | None]:
        """LeaseLost for each that is not ours any more.

        :param ended: whether the caller has ended them, and nobody else.
        """
        now = lease_time()
        return [_lost(hold) if now >= hold.until or hold.ended != ended else None for hold in holds]

    def _end(self, holds: Sequence[Hold]) -> Placed:
        first, *more = holds
        marker = Marker(kind=Kind.END, id=first.id, more=tuple([hold.id.offset for hold in more]))
        return Placed(first.partition, write_marker(marker, v1=self._v1))

    def _keepalive(self, holds: Sequence[Hold]) -> Placed:
        first, *more = holds
        others = tuple([hold.id.offset for hold in more])
        after_ms = max(self.lease_ms, self._remaining_ms(first))
        attempt = first.attempt if first.kept else None
        marker = Marker(kind=Kind.KEEPALIVE, id=first.id, after_ms=after_ms, attempt=attempt, more=others)
        return Placed(first.partition, write_marker(marker, v1=self._v1))

    def _release(self, hold: Hold, settlement: Settlement) -> Placed:
        # What was given back untried does not count as a delivery; what waits for its next one was tried.
        untried = settlement.outcome is Outcome.RELEASE and not hold.due
        after_ms = max(round(1000 * (settlement.delay or 0.0)), self._remaining_ms(hold))
        return self._released(hold, after_ms, hold.attempt - untried, settlement.error or settlement.reason)

    def _remaining_ms(self, hold: Hold) -> int:
        """How long it is not to be delivered yet."""
        return max(0, math.ceil(1000 * (hold.due - lease_time()))) if hold.due else 0

    def _released(self, hold: Hold, after_ms: int, attempts: int, reason: str) -> Placed:
        marker = Marker(
            kind=Kind.KEEPALIVE,
            id=hold.id,
            after_ms=after_ms,
            attempt=attempts,
            released=True,
            reason=reason[:_REASON],
        )
        return Placed(hold.partition, write_marker(marker, v1=self._v1))

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the producer was closed, and the leases end by themselves


def joined(holds: Iterable[Hold], together: int) -> list[list[Hold]]:
    """Those of which one KEEPALIVE or END can tell together, at most so many each."""
    groups: dict[tuple[int, str, int], list[Hold]] = {}
    last: tuple[int, str, int] | None = None
    group: list[Hold] = []
    for hold in holds:
        topic, partition, _, _ = hold.id
        place = (hold.partition, topic, partition)
        if place != last:
            last, group = place, groups.setdefault(place, [])
        group.append(hold)
    return [group[at : at + together] for group in groups.values() for at in range(0, len(group), together)]


def over_of(messages: Sequence[Message[Any]]) -> list[Message[Any]]:
    """Those of messages held here whose leases are over."""
    now = lease_time()
    for message in messages:
        if message.lease.until <= now:
            return [each for each in messages if each.lease.until <= now]
    return []


def _over(hold: Hold) -> BrokerError:
    """What is to be said of a message whose lease is over."""
    return _unsure(hold) if hold.end_sent else _lost(hold)


def _lost(hold: Hold) -> LeaseLost:
    topic, partition, offset, queue = hold.id
    return LeaseLost(
        f"The lease of {topic}[{partition}]@{offset} in queue {queue!r} is over",
        advice="It comes again; raise lease_seconds if this process was only slow",
    )


def _unsure(hold: Hold) -> SettleError:
    topic, partition, offset, queue = hold.id
    return SettleError(
        f"The lease of {topic}[{partition}]@{offset} in queue {queue!r} ended before its END was known to be written",
        advice="It may come again, or be done: this process, or the brokers, were too slow; raise lease_seconds",
    )
