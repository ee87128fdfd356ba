"""What a queue client is starting and committing: a fetch may leave it behind, and partitions that go wait for it.

*Concurrency.* One event loop. *Cancellation.* What was begun goes on, whoever waited for it.

What was taken and cannot be started, because its START is too large for the marker topic; pure.

It waits, with what came behind it in its partition, and its first message is tried again ever more seldom. Nothing of
it is committed, so that whoever gets the partition next reads it again.


The queue client: takes records of the subscription's group, and hands each over once its START is on the brokers.

*Order of things.* Of what was taken together all STARTs are written and awaited, then the group's positions are
committed once, then it is handed over; `StartTransactions` does both in one transaction. A process that dies before the
commit leaves the records to the next member; one that dies after it leaves them to the tracker. *Concurrency.* One
event loop; `settle` and `extend` may run beside `fetch`. *Partitions* that go wait for what is under way, also if a
fetch was interrupted and left it behind; a close waits for it too, for a second. What was handed over stays ours, since
its markers are nobody else's. *Failure.* What could not be started or committed is kept and tried with the next
`fetch`, and is forgotten when its partition goes: whoever has that reads it from the committed position. A partition
with a message that the marker topic is too small for waits until somebody mends that, and others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from time import time
from typing import Any, Final, TypeVar

from broker import BackendError, BrokerError, Closed, LeaseLost, Message, MessageTooLarge, TopicPartition
from broker.driver import (
    Event,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    RecordListener,
    Settlement,
    SourceListener,
    Warned,
    lease_time,
    logger,
)
from broker_kafka.queue.consumer.lease_manager import LeaseBook, over_of
from broker_kafka.queue.consumer.start_builder import Starting, Taken
from broker_kafka.queue.consumer.start_transactions import StartTransactions
from broker_kafka.queue.consumer.transacted_ends import TransactedEnds
from broker_kafka.queue.consumer.unknown_commits import CommitDoubts
from broker_kafka.queue.markers.commit_text import commit_text
from broker_kafka.queue.markers.marker_producer import MarkerProducer
from broker_kafka.records import KafkaRecordSource

__all__ = ["QueueClient", "SetAside", "UnderWay"]


R = TypeVar("R")

_GRACE: Final = 1.0
"""Seconds that a fetch which is interrupted waits for what is being started."""


class UnderWay:
    """Make it on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.Future[Any]] = set()
        # A future, and no event: waiting for it beside a task takes no task of its own, each time anew.
        self._interrupted: asyncio.Future[None] = self._loop.create_future()

    def interrupt(self) -> None:
        """Have a fetch leave behind what takes long."""
        if not self._interrupted.done():
            self._interrupted.set_result(None)

    def go_on(self) -> None:
        """Have the next fetch wait again."""
        if self._interrupted.done():
            self._interrupted = self._loop.create_future()

    @contextmanager
    def claim(self) -> Generator[None]:
        """While something is claimed, of which the single steps are tasks."""
        claim = self._loop.create_future()
        self._open.add(claim)
        try:
            yield
        finally:
            self._open.discard(claim)
            claim.set_result(None)

    async def unless_interrupted(self, work: Coroutine[Any, Any, R]) -> R | None:
        """Its result; None if the fetch was interrupted and it takes long. It goes on then.

        What was started and not committed is read again by whoever has its partition; of what was committed and not
        handed over the lease ends.
        """
        task = self._loop.create_task(work, name="broker-kafka-claim")
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            return task.result() if await self.is_done(task) else None
        finally:
            if not task.done():
                task.add_done_callback(_look_at)

    async def is_done(self, task: asyncio.Task[Any]) -> bool:
        """Wait for it; False if the fetch was interrupted and it takes long."""
        await asyncio.wait({task, self._interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=_GRACE)
        return task.done()

    async def over(self, by: float) -> None:
        """Wait until nothing is under way, also of what a fetch has left behind; at most until this loop time."""
        while self._open and (left := by - self._loop.time()) > 0:
            await asyncio.wait(self._open, timeout=left)


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class _Waiting:
    __slots__ = ("again_at", "pause", "taken")

    def __init__(self) -> None:
        self.taken: list[Taken] = []
        self.pause = _FIRST_PAUSE
        self.again_at = 0.0


class SetAside:
    """By partition, in the order of its log."""

    def __init__(self) -> None:
        self._waiting: dict[TopicPartition, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, place: object) -> bool:
        return place in self._waiting

    def add(self, place: TopicPartition, taken: list[Taken], now: float) -> bool:
        """These wait, before what waits of the partition already; whether nothing did.

        :param now: a time in seconds, as for `due`.
        """
        new = place not in self._waiting
        waiting = self._waiting.setdefault(place, _Waiting())
        waiting.taken = taken + waiting.taken
        waiting.again_at = now + waiting.pause
        waiting.pause = min(_LONGEST_PAUSE, 2 * waiting.pause)
        return new

    def due(self, now: float) -> list[Taken]:
        """Take the first message of each partition that is to be tried again; it is either added again, or `free`."""
        due = [waiting for waiting in self._waiting.values() if waiting.taken and waiting.again_at <= now]
        return [waiting.taken.pop(0) for waiting in due]

    def free(self, place: TopicPartition) -> list[Taken]:
        """The rest of a partition whose first message was started, which waits no more."""
        waiting = self._waiting.pop(place, None)
        return [] if waiting is None else waiting.taken

    def forget(self, places: Collection[TopicPartition]) -> list[TopicPartition]:
        """These partitions are not ours any more; those of them of which something waited."""
        return [place for place in places if self._waiting.pop(place, None) is not None]


_CLOSE: Final = 1.0
_TRUSTED: Final = 5.0
"""Seconds for which a commit or an assignment says that the group has not given our partitions to others."""


class QueueClient:
    """Implements `MessageSource` with all optional parts, and `RecordListener` for the member of the group.

    :param member: makes the member of the group, which tells this of its partitions.
    :param transactions: in which STARTs are written with the positions; None writes them one after the other.
    :param doubts: about what was committed when partitions went; the same that `transactions` has.
    :param transacted: writes ENDs in transactions of others.
    :param trouble: tells an error with which nothing more is handed over, if there is one.
    :param session_seconds: silence after which the group gives our partitions to others.
    :param ended: awaited when it was closed, however that went.
    """

    def __init__(
        self,
        listener: SourceListener,
        *,
        member: Callable[[RecordListener], KafkaRecordSource],
        producer: MarkerProducer,
        starting: Starting,
        transactions: StartTransactions | None,
        doubts: CommitDoubts,
        book: LeaseBook,
        transacted: TransactedEnds,
        trouble: Callable[[], BrokerError | None],
        session_seconds: float,
        ended: Callable[[QueueClient], Coroutine[Any, Any, None]],
    ) -> None:
        self._listener = listener
        self._producer = producer
        self._starting = starting
        self._transactions = transactions
        self._doubts = doubts
        self._book = book
        self.transacted: Final = transacted
        self._trouble = trouble
        self._trusted = min(_TRUSTED, session_seconds / 2)
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._assignments: dict[TopicPartition, int] = {}
        """What is assigned, and the number of the assignment."""
        self._assigned = self._named = 0
        self._text = ""
        """Stored with the group's positions; it was made for the assignment `_named`."""
        self._taken: list[Taken] = []
        """What is not committed, in the order of each partition."""
        self._aside = SetAside()
        self._known_at = -inf
        """The `lease_time` at which the group was last heard to leave our partitions to us."""
        self._under_way = UnderWay()
        self._fetching = self._closed = False
        self._member = member(self)

    async def open(self) -> None:
        """Connect the producer, and join the group.

        :raises BrokerError: one of both cannot be.
        """
        if self._transactions is not None:
            await self._transactions.open()
        await asyncio.gather(self._producer.open(), self._member.open())

    # -- MessageSource -------------------------------------------------------------------------------------

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        if (trouble := self._trouble()) is not None:
            raise trouble
        self._fetching = True
        try:
            self._taken += self._aside.due(self._loop.time())
            if not self._taken:
                await self._take(max_messages, max_bytes, wait)
            if not self._taken:
                return []
            with self._under_way.claim():
                if self._transactions is None:
                    await self._settle_doubts()
                    return await self._claim()
                if not self._transactions.is_open:
                    await self._settle_doubts()
                return await self._claim_at_once(self._transactions)
        finally:
            self._fetching = False
            if not self._closed:
                self._under_way.go_on()

    def interrupt(self) -> None:
        if self._fetching:
            self._under_way.interrupt()
        self._member.interrupt()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._book.settle(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._book.extend([message.lease for message in messages])

    async def keep(self, message: Message[Any], delay: float) -> BrokerError | None:
        return await self._book.keep(message.lease, message.delivery_attempt, delay)

    async def is_idle(self, seconds: float) -> bool:
        """As of the group's member; what waits for its time, or is held elsewhere, is not there to be taken."""
        return not self._taken and not self._aside and await self._member.is_idle(seconds)

    def lose_over(self, messages: Sequence[Message[Any]]) -> None:
        if over := over_of(messages):
            self._listener.lost(over)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._under_way.interrupt()
        try:
            # Else a START could follow those of who has its partition next, and even the END of its message.
            await self._under_way.over(self._loop.time() + _CLOSE)
            await asyncio.gather(self._member.close(), self._producer.close(_CLOSE))
        finally:
            try:
                if self._transactions is not None:
                    await self._transactions.close()
            finally:
                await self._ended(self)

    # -- starting and committing ---------------------------------------------------------------------------

    async def _take(self, max_messages: int, max_bytes: int, wait: float) -> None:
        """Take what is there, up to so much, and wait for the first of it: each START and commit costs a round trip."""
        while (
            max_messages > 0
            and max_bytes > 0
            and (runs := await self._member.fetch_runs(max_messages, max_bytes, wait))
        ):
            for run in runs:
                # A run of a partition that went is not let out, so that this assignment is the one it came in.
                assignment = self._assignments.get(TopicPartition(run.topic, run.partition), 0)
                self._taken += self._starting.taken(run, assignment)
                max_messages -= len(run)
                max_bytes -= run.size
            wait = 0.0

    async def _settle_doubts(self) -> None:
        """Tell of what was ours when its partition went, and follows in the log on what is taken of that now.

        :raises BrokerError: the group's positions cannot be read.
        """
        found = await self._doubts.settled(self._member, self._assignments)
        self._pass_over([self._starting.message(each) for each in found if each.hold is not None and not each.waits])

    def _pass_over(self, messages: Sequence[Message[Any]]) -> None:
        """Have these come again at once, and what follows of their keys wait for them."""
        if messages:
            self._book.give_back([message.lease for message in messages])
            self._listener.passed_over(messages)

    async def _claim(self) -> list[Message[Any]]:
        """START what was taken, commit, and hand over what is ours by then.

        :raises BrokerError: nothing of it could be; it is tried again with the next fetch.
        """
        if lease_time() - self._known_at > self._trusted and not await self._are_ours():
            return []
        begun = lease_time()
        failed = await self._start([taken for taken in self._taken if taken.hold is not None])
        if failed is None:
            return []
        positions: dict[TopicPartition, int] = {}
        stopped: dict[TopicPartition, BrokerError] = {}
        for taken in self._present():
            error = failed.get(taken) if failed else None
            if error is not None:
                # What comes after it in its partition waits for it too.
                stopped.setdefault(taken.place, error)
            if not stopped or taken.place not in stopped:
                positions[taken.place] = taken.offset + 1
        errors = [error for error in stopped.values() if not isinstance(error, MessageTooLarge)]
        results = await self._commit(positions)
        if results is None:
            return []
        errors += [error for error in results.values() if error is not None]
        committed = {place: positions[place] for place, error in results.items() if error is None}
        messages = self._hand_over(committed, begun + self._book.lease_seconds)
        self._set_aside({each: error for each, error in stopped.items() if isinstance(error, MessageTooLarge)})
        self._free(set(committed).difference(stopped))
        if not messages and errors:
            raise next((error for error in errors if not error.retriable), errors[0])
        return messages

    async def _claim_at_once(self, transactions: StartTransactions) -> list[Message[Any]]:
        """The same in one transaction. One that takes long is not left behind: the next fetch goes on with it.

        :raises BrokerError: as `_claim`.
        """
        claim = transactions.claim(self._member, self._present)
        if not await self._under_way.is_done(claim):
            return []
        claimed = transactions.take_outcome(claim)
        messages = self._hand_over(claimed.positions, claimed.begun + self._book.lease_seconds)
        self._set_aside(claimed.too_large)
        self._free(claimed.positions)
        return messages

    def _set_aside(self, too_large: Mapping[TopicPartition, BrokerError]) -> None:
        """Have partitions wait, so that nothing of others has to, and tell how that is mended."""
        for place, error in too_large.items():
            waiting = [taken for taken in self._present() if taken.place == place]
            if waiting and self._aside.add(place, waiting, self._loop.time()):
                text = f"{place.topic}[{place.partition}] waits from {waiting[0].offset} on: {error}"
                logger.warning(text)
                self.event(Warned(text=text))
                self._member.pause([place])
            self._forget([place])

    def _free(self, places: Collection[TopicPartition]) -> None:
        """The first of what waited in these is handed over, and the rest goes on."""
        for place in places:
            if place in self._aside:
                self._taken += self._aside.free(place)
                self._member.resume([place])

    async def _are_ours(self) -> bool:
        """Whether something of what was taken is still ours, by what the group's coordinator says.

        A process that stood still would else START what others have done meanwhile.

        :raises BrokerError: the coordinator does not tell.
        """
        firsts: dict[TopicPartition, int] = {}
        for taken in self._present():
            firsts.setdefault(taken.place, taken.offset)
        results = await self._commit(firsts)
        if results is None:
            return False
        for error in results.values():
            if error is not None:
                raise error
        return bool(self._present())

    async def _commit(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, BrokerError | None] | None:
        """Commit positions; the answers but for partitions that are not ours any more, or None as `_start`."""
        if not positions:
            return {}
        asked_at = lease_time()
        answers = await self._under_way.unless_interrupted(self._commit_named(positions))
        if answers is None:
            return None
        if any(error is None for error in answers.values()):
            self._known_at = asked_at
        # While a group changes it takes nothing, also of a partition that stays ours and is not read again.
        return {
            place: _is_changing(error) if isinstance(error, LeaseLost) else error
            for place, error in answers.items()
            if place in self._assignments
        }

    async def _commit_named(
        self, positions: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        if self._named != self._assigned:
            # A member that was forgotten and comes back has another id, and is assigned anew.
            member = await self._member.member_id()
            self._named, self._text = self._assigned, commit_text(member, keys=self._starting.keys)
        text = self._text
        self._doubts.asked(positions, text)
        answers = await self._member.commit_noted({place: (at, text) for place, at in positions.items()})
        self._doubts.answered({place: at for place, at in positions.items() if answers[place] is None}, text)
        return answers

    async def _start(self, taken: Sequence[Taken]) -> dict[Taken, BrokerError] | None:
        """Write the START of each; those that failed, or None if the fetch was interrupted meanwhile."""
        if not taken:
            return {}
        started = self._starting.starts(taken, int(1000 * time()))
        outcomes = await self._under_way.unless_interrupted(
            self._producer.write([each.placed for each in started], by=self._known_at + 2 * self._trusted)
        )
        if outcomes is None:
            return None
        told = zip(started, outcomes, strict=True)
        return {each: error for start, error in told if error is not None for each in start.taken}

    def _hand_over(self, committed: Mapping[TopicPartition, int], until: float) -> list[Message[Any]]:
        """What lies below the committed positions, as messages; what is left is kept."""
        messages: list[Message[Any]] = []
        late: list[Message[Any]] = []
        kept: list[Taken] = []
        # All that was started together has one lease; if it is over, this process stood still.
        is_over = lease_time() >= until
        place: TopicPartition | None = None
        below = 0
        for taken in self._taken:
            if taken.place is not place:
                place = taken.place
                below = committed.get(place, 0)
            if taken.offset >= below:
                kept.append(taken)
            elif (hold := taken.hold) is not None and not taken.waits:
                hold.until = until
                # A tracker may have sent it again.
                (late if is_over else messages).append(self._starting.message(taken))
        self._taken = kept
        self._pass_over(late)
        return messages

    def _present(self) -> list[Taken]:
        """What was taken and is still of the present assignment; the rest is forgotten."""
        self._taken = [each for each in self._taken if self._assignments.get(each.place) == each.assignment]
        return self._taken

    def _forget(self, partitions: Collection[TopicPartition]) -> None:
        self._taken = [each for each in self._taken if each.place not in partitions]

    # -- RecordListener ------------------------------------------------------------------------------------

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._known_at = lease_time()
        for partition in partitions:
            self._assigned += 1
            self._assignments[partition] = self._assigned
        self.event(PartitionsAssigned(partitions=tuple(partitions), current=tuple(self._assignments)))

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        current = tuple(each for each in self._assignments if each not in partitions)
        self.event(PartitionsRevoked(partitions=tuple(partitions), current=current))
        try:
            await self._under_way.over(deadline)
        finally:
            # Also if it takes too long: what is not committed is somebody else's then.
            self._gone(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._gone(partitions)
        self.event(PartitionsLost(partitions=tuple(partitions), current=tuple(self._assignments)))

    def event(self, event: Event) -> None:
        self._listener.event(event)

    def _gone(self, partitions: Sequence[TopicPartition]) -> None:
        """Forget all that is not committed of these, which are not ours."""
        for partition in partitions:
            self._assignments.pop(partition, None)
            self._doubts.gone(partition, [each for each in self._taken if each.place == partition])
        self._forget(set(partitions))
        if waited := self._aside.forget(partitions):
            self._member.resume(waited)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("The source is closed")


def _is_changing(error: BrokerError) -> BackendError:
    return BackendError(
        f"The group is changing, and took no position: {error.message}", native=error.native, retriable=True
    )
