"""A member of a group: what it holds, and how partitions come and go. Implements `ConsumerHost` for its thread.

*Concurrency.* One loop. *Coming.* Positions are claimed from the offset store, then `on_assigned` runs, then records
flow. *Going.* Nothing more is handed over; `on_revoked` runs and readers finish what they have in hand, both until the
flush deadline at most; what is marked is committed; then the partition is released. What is not in flight costs no
time. *Lost* partitions end at once, nothing is committed, and `on_lost` is told. *Failure.* What the client repairs by
itself is an event; all else ends the reading.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from broker import BrokerError, LeaseLost, TopicNotFound, TopicPartition
from broker.driver import (
    FetchFailed,
    Hooks,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    PositionReset,
    TaskSet,
    Warned,
    logger,
    not_assigned,
)
from broker_kafka.client.consumer import ConsumerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.errors import translate
from broker_kafka.group.claims import Claim, Claims
from broker_kafka.group.commits import Commits
from broker_kafka.group.delivery import Delivery
from broker_kafka.group.held import Held
from broker_kafka.group.intake import Intake
from broker_kafka.group.log_end import Tails
from broker_kafka.group.offset_reset import reset_of
from broker_kafka.group.options import GroupOptions
from broker_kafka.group.rebalance import OnRebalance, Rebalance, Teller
from broker_kafka.group.start_offsets import told_if_slow
from broker_kafka.group.streams import Streams
from broker_kafka.group.topic_ids import TopicIdentities
from broker_kafka.offsets.protocol import OffsetStore

__all__ = ["Member"]

_GENERATIONS: Final = count(1)
"""Of all members of this process, so that a stash knows which of two assignments is the later one."""
_GRACE: Final = 1.0
"""Seconds for the brokers' answers where the deadline of a close has been used up, once to commit and once to leave."""
_PATIENCE: Final = 30.0
"""Seconds after which it is told that partitions wait for `on_assigned`; then after twice as long, and so on."""


class Member:
    """Made first, and connected to the parts that need it before the group is joined.

    :ivar held: all assignments, those that are about to go included.
    """

    _thread: ConsumerThread
    _claims: Claims
    _commits: Commits
    _look_at_topics: Callable[[], None]
    _identities: TopicIdentities

    def __init__(
        self,
        connection: Connection,
        options: GroupOptions,
        held: dict[TopicPartition, Held],
        intake: Intake,
        delivery: Delivery,
        streams: Streams,
        hooks: Hooks,
    ) -> None:
        self.held: Final = held
        self._connection = connection
        self._options = options
        self._intake = intake
        self._delivery = delivery
        self._streams = streams
        self._hooks = hooks
        self._group = options.group
        self._loop = asyncio.get_running_loop()
        self._teller = Teller()
        self._claimed: dict[TopicPartition, Claim] = {}
        self._tasks = TaskSet(
            f"broker-kafka-group-{self._group}", lambda error: self.failed(translate(error, f"Group {self._group!r}"))
        )
        self._tails = Tails()
        self._clocks: set[asyncio.Timeout] = set()
        """Of the releases that run."""
        self._until: float | None = None
        self._closer: asyncio.Task[Any] | None = None
        self.finishes = False
        """Whether the application finishes records one by one, so that a release waits for them."""
        self.resets: Counter[TopicPartition] = Counter()
        """How often the position of a partition was out of range and reset."""

    def connect(
        self,
        thread: ConsumerThread,
        claims: Claims,
        commits: Commits,
        store: OffsetStore,
        look_at_topics: Callable[[], None],
    ) -> None:
        """These work for it."""
        self._identities = TopicIdentities(
            self._connection, store, self._tasks, held=self.current, owner=lambda: claims.owner, gone=self._made_anew
        )
        self._thread = thread
        self._claims = claims
        self._commits = commits
        self._look_at_topics = look_at_topics

    def current(self) -> tuple[TopicPartition, ...]:
        """What is held and stays."""
        return tuple(sorted(partition for partition, held in self.held.items() if not held.revoking))

    def own(self, topic: str, partition: int) -> Held | None:
        """The present assignment of a partition."""
        return self.held.get(TopicPartition(topic, partition))

    def has_seen(self, partition: TopicPartition, position: int) -> bool:
        """Whether reading has come as far as this."""
        return self._tails.holds(partition, position)

    def is_callback(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether it is a call of the application's callbacks."""
        return self._teller.calls_from(task)

    # -- ConsumerHost --------------------------------------------------------------------------------------

    def arrived(self, runs: Sequence[NativeRun]) -> None:
        self._delivery.active()
        self._identities.read([run.topic for run in runs])
        self._tails.read(runs)
        self._intake.arrived(runs)

    async def assigning(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        await self._identities.coming(partitions)
        with told_if_slow(self._options.group, partitions, self.warn):
            claimed = await self._claims.claim(partitions)
        self._claimed |= claimed
        return {partition: claim.begin for partition, claim in claimed.items()}

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        new: list[Held] = []
        for partition in partitions:
            claim = self._claimed.pop(partition)
            held = Held(partition, next(_GENERATIONS), claim.stored, claim.begin)
            self.held[partition] = held
            self._tails.begin({partition: claim.begin})
            new.append(held)
        # A pause ends with the assignment that it was for; the client keeps it.
        self._thread.resume(partitions)
        self._delivery.joined()
        current = self.current()
        if self._hooks.listening:
            self._hooks.emit(PartitionsAssigned(partitions=tuple(partitions), current=current))
        self._tasks.spawn(self._open(new, Rebalance(assigned=tuple(sorted(partitions)), current=current)))

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        await self._identities.look()
        await self._release([held for each in partitions if (held := self.held.get(each)) is not None])
        self._look_for_deleted(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        gone = [held for each in partitions if (held := self.held.get(each)) is not None]
        if not gone:
            return
        self._let_go(gone)
        lost, current = tuple(sorted(held.partition for held in gone)), self.current()
        if self._hooks.listening:
            self._hooks.emit(PartitionsLost(partitions=lost, current=current))
        self._tell(self._options.on_lost, Rebalance(lost=lost, current=current))
        self._look_for_deleted(partitions)

    def identity(self, topic: str) -> str:
        """The id of a topic that it reads, as far as known."""
        return self._identities.of(topic)

    async def moved(self, partition: TopicPartition, position: int) -> int:
        """Where a partition begins whose stored position is of a topic that is gone.

        :raises OffsetOutOfRange: `offset_reset` is "error".
        """
        reset = await self._reset_of(partition, position, lambda: True, "is of a topic that was deleted since")
        assert reset is not None  # it is being claimed, and whoever loses it meanwhile is told by the claim
        self._tell_reset(reset)
        return reset.to

    def _made_anew(self, partitions: Collection[TopicPartition], error: BrokerError) -> None:
        self.lost(list(partitions))
        self._delivery.fail(error)

    def ended(self, partition: TopicPartition, end: int) -> None:
        """All of a partition below `end` came, where it ends for now."""
        tail, held = self._tails.ended(partition, end), self.held.get(partition)
        if tail is not None and held is not None and (grown := held.marks.end(*tail)):
            self._commits.grew(grown)

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        if partition in self.held:
            self._tasks.spawn(self._reset(partition, position))

    def failed(self, error: BrokerError) -> None:
        if isinstance(error, TopicNotFound):
            self._look_at_topics()
        elif not error.retriable:
            self._delivery.fail(error)
        else:
            logger.info("Group %r: %s", self._group, error)
            if self._hooks.listening:
                self._hooks.emit(FetchFailed(topic=self._group, error=error, pause=0.0))

    # -- coming and going ----------------------------------------------------------------------------------

    async def leave(self, timeout: float, caller: asyncio.Task[Any] | None) -> None:
        """Release everything, which takes so many seconds at most, and end the thread.

        :param caller: a task that waits for this, and cannot come back for more meanwhile.
        """
        self._until = self._loop.time() + timeout
        self._closer = caller
        self._delivery.end()
        for clock in self._clocks:
            if not clock.expired():
                clock.reschedule(min(clock.when() or self._until, self._until))
        self._identities.close()
        try:
            await self._identities.look()
            # No rebalance waits here, so that the commit may take the whole time, for instance of a broker's restart.
            await self._release([held for held in self.held.values() if not held.revoking], self._until)
        finally:
            # Whatever happened, the group must not keep a member that nobody reads.
            self._commits.close()
            self._tasks.cancel()
            await self._thread.stop(max(_GRACE, self._until - self._loop.time()))
            self._teller.cancel()
            self._let_go(list(self.held.values()))

    async def _open(self, new: list[Held], event: Rebalance) -> None:
        call = self._tell(self._options.on_assigned, event)
        patience = _PATIENCE
        while call is not None and not (await asyncio.wait((call,), timeout=patience))[0]:
            # It may fetch the state of partitions, which takes as long as it takes.
            patience *= 2
            self.warn(f"on_assigned is not over yet, and {list(event.assigned)} wait for it to be read")
        opened = [held for held in new if not (held.revoking or held.gone)]
        self._intake.open(opened)
        for held in opened:
            self._streams.add(held)

    async def _release(self, going: list[Held], commit_until: float = 0.0) -> None:
        if not going:
            return
        for held in going:
            held.revoking = True
        try:
            await self._wind_up(going, commit_until)
        finally:
            self._let_go(going)

    async def _wind_up(self, going: list[Held], commit_until: float) -> None:
        """Have the application finish what it has in hand of these, and commit what it marks."""
        self._intake.drop(going)
        self._delivery.changed()
        deadline = self._loop.time() + self._options.flush_seconds
        if self._until is not None:
            deadline = min(deadline, self._until)
        revoked, current = tuple(sorted(held.partition for held in going)), self.current()
        if self._hooks.listening:
            self._hooks.emit(PartitionsRevoked(partitions=revoked, current=current))
        call = self._tell(self._options.on_revoked, Rebalance(revoked=revoked, current=current, deadline=deadline))
        clock = asyncio.timeout_at(deadline)
        self._clocks.add(clock)
        try:
            async with clock:
                await self._delivery.settled(going, lambda: self._finished(going), self._closer)
                if call is not None:
                    await asyncio.wait((call,))
        except TimeoutError:
            self.warn(f"The work on {list(revoked)} was not over when they had to be given up")
            if call is not None:
                call.cancel()
        finally:
            self._clocks.discard(clock)
        now = self._loop.time()
        await self._commits.flush(
            going, max(commit_until, now + _GRACE) if commit_until else now + self._options.commit_seconds
        )

    def _finished(self, going: list[Held]) -> bool:
        return not self.finishes or not any(held.marks.runs.unfinished for held in going)

    def _let_go(self, going: list[Held]) -> None:
        for held in going:
            held.revoking = held.gone = True
            if self.held.get(held.partition) is held:
                del self.held[held.partition]
        self._intake.drop(going)
        self._delivery.changed()

    def _tell(self, callback: OnRebalance | None, event: Rebalance) -> asyncio.Task[None] | None:
        return None if callback is None else self._teller.begin(callback, event)

    # -- positions that the log does not hold, topics that are gone ---------------------------------------

    async def _reset(self, partition: TopicPartition, position: int) -> None:
        held = self.held.get(partition)
        reset = await self._reset_of(
            partition,
            position,
            lambda: held is not None and self.held.get(partition) is held and not held.revoking,
        )
        if held is None or reset is None:
            return
        self._tell_reset(reset)
        held.marks.rebase()
        try:
            await self.seek({partition: reset.to})
        except BrokerError:
            if self.held.get(partition) is held and not held.revoking:
                raise

    async def _reset_of(
        self, partition: TopicPartition, position: int, ours: Callable[[], bool], reason: str = ""
    ) -> PositionReset | None:
        committed = self._options.isolation == "read_committed"
        return await reset_of(
            partition,
            position,
            group=self._group,
            policy=self._options.settings.offset_reset,
            bounds=lambda: bounds_of(self._connection, [partition], committed=committed),
            ours=ours,
            reason=reason,
        )

    def _tell_reset(self, reset: PositionReset) -> None:
        self.resets[TopicPartition(*reset.partition)] += 1
        if self._hooks.listening:
            self._hooks.emit(reset)

    async def seek(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read on from there; what waits of the partitions is dropped.

        :raises LeaseLost: one is not assigned.
        """
        moving = self.moving(positions)

        def sought(moved: Sequence[TopicPartition]) -> None:
            there = [held for held in moving if held.partition in moved and not held.gone]
            for held in there:
                held.marks.moved()
            self._intake.drop(there)
            self._tails.begin({each: positions[each] for each in moved})

        await self._thread.seek(positions, sought)

    def moving(self, partitions: Iterable[TopicPartition]) -> list[Held]:
        """The assignments of partitions that are to be read from elsewhere.

        :raises LeaseLost: one is not assigned.
        """
        found: list[Held] = []
        for partition in partitions:
            held = self.held.get(partition)
            if held is None or held.revoking:
                raise self.not_ours(partition)
            found.append(held)
        return found

    def not_ours(self, partition: TopicPartition) -> LeaseLost:
        """The error of what is asked of a partition that this member has not."""
        return not_assigned(partition, self._group, self.current())

    def _look_for_deleted(self, gone: Sequence[TopicPartition]) -> None:
        """A topic of which nothing is left here may have been deleted: with KIP-848 nobody tells."""
        if {each.topic for each in gone} - {each.topic for each in self.held} and not self._delivery.ended:
            self._look_at_topics()

    # -- inside --------------------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        """Tell an operator."""
        text = f"Group {self._group!r}: {text}"
        logger.warning(text)
        if self._hooks.listening:
            self._hooks.emit(Warned(text=text))
