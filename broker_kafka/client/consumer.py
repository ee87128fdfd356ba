"""`ConsumerThread`: the thread that polls one consumer of confluent-kafka, and hands over whole batches.

*Concurrency.* Everything that concerns the client runs in the one thread, also within the client's callbacks:
confluent-kafka admits one thread at a time and lets another spin until a poll is over, and during a callback only the
thread that is in it. So commits, seeks and look-ups are commands, served between polls and within callbacks. For a
moment after a record or a command the thread waits for commands and polls the client ever more seldom, from
`_LEAST_WAIT` to `_BUSY_WAIT`; after that, and for the answer to a commit, it waits in the client. The host is called on
the loop.

*Flow.* At most `in_flight` batches are handed over and not taken; then the thread polls for one record now and then,
which serves rebalances and keeps `max.poll.interval.ms`. After `_LONG_STALL` seconds partitions are paused as well,
which frees librdkafka's prefetch queue. *Rebalances* wait in their callback until the host has dealt with them,
`revoke_seconds` at most. *Failure.* Errors go to `host.failed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import Message as NativeRecord
from confluent_kafka import TopicPartition as NativePartition

from broker import BackendError, BrokerError, LeaseLost, TopicPartition
from broker.driver import logger
from broker_kafka.client.consumer_workarounds import SuspensionWatch, prepare_to_leave
from broker_kafka.client.offset_commits import Answer, CommitQueue
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import Command, OwnerThread
from broker_kafka.codec.record_run import NativeRun, runs_of
from broker_kafka.config.oauth import with_oauth_token
from broker_kafka.errors import configuration_error, not_assigned, translate

__all__ = [
    "IN_FLIGHT",
    "LARGEST_BATCH",
    "ClientAssignment",
    "ConsumerHost",
    "ConsumerThread",
    "Pausing",
    "PollBefore",
    "fetch_metadata",
    "guarded",
    "open_consumer",
]

_OnPartitions = Callable[[Consumer, list[NativePartition]], None]
"""A callback of the client in a rebalance."""

_OF_POSITIONS: Final = frozenset({KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET})

LARGEST_BATCH: Final = 5000
IN_FLIGHT: Final = 2
_IDLE_POLL: Final = 0.1
_COMMIT_POLL: Final = 0.001  # returns at once with the answer; a command waits as long
_LEAST_WAIT: Final = 0.0002
_GROWTH: Final = 1.25
_BUSY_WAIT: Final = 0.002
_BUSY_SECONDS: Final = 0.5  # after a record or a command another is likely, and must not wait for an idle poll
_STALL_POLL: Final = 0.25
_LONG_STALL: Final = 10.0
_ASSIGN_SECONDS: Final = 60.0
_LOST_SECONDS: Final = 5.0
_BATCH_BYTES: Final = 8 * 1024 * 1024
_REJOIN_PAUSE: Final = 1.0
_METADATA_SECONDS: Final = 1.0


class ConsumerHost(Protocol):
    """The member that a thread works for. Everything is called on the loop, in the order of events."""

    def arrived(self, runs: Sequence[NativeRun]) -> None:
        """A batch came; answer with `ConsumerThread.taken` when it has left the host."""
        ...

    async def assigning(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the position to begin at for each of these, before they are assigned.

        Errors go to `failed`; after a retriable error the member joins again.
        """
        ...

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """These are assigned, and their records may follow."""
        ...

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        """These are released when this returns, or at the loop time `deadline`; until then they can be committed."""
        ...

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """These went to another member without a release."""
        ...

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        """The log does not hold this position; nothing more comes of the partition until a seek."""
        ...

    def failed(self, error: BrokerError) -> None:
        """The client reports an error; after a retriable error it continues by itself."""
        ...


class ConsumerThread(OwnerThread[Consumer]):
    """One member of a group.

    :param config: of the client, with `group.id`.
    :param warn: called on the loop with warnings for operators.
    :param max_batch: the most records of a batch: few cost many thread switches, many take memory.
    :param in_flight: the most batches that are handed over and not taken.
    :param revoke_seconds: how long a release may take.
    :param busy_seconds: how long after a record or a command the thread polls often.
    :param ended: called on the loop when all of a partition below a position was handed over, where it ends for now.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        host: ConsumerHost,
        *,
        name: str,
        warn: Callable[[str], object],
        max_batch: int = LARGEST_BATCH,
        in_flight: int = IN_FLIGHT,
        revoke_seconds: float = 30.0,
        busy_seconds: float = _BUSY_SECONDS,
        ended: Callable[[TopicPartition, int], object] | None = None,
    ) -> None:
        super().__init__(name, Rebootstrapper(config))
        self._group: str = config["group.id"]
        self._commits = CommitQueue(self._group, self._resolve)
        self._config = {"enable.partition.eof": ended is not None, **config, "on_commit": self._on_commit}
        self._host, self._ended_at = host, ended
        self._moved: set[tuple[str, int]] = set()  # revoked or moved in this turn
        self._suspensions = SuspensionWatch(config, lambda text: self._post(warn, text))
        self._assignment = ClientAssignment(config)
        self._max_batch = self._batch = max_batch
        self._in_flight = in_flight
        self._revoke_seconds = revoke_seconds
        self._topics: list[str] = []
        self._only_topic: str | None = None  # the topic of all that may come, if it is one
        self._posted = self._taken = 0  # each is written by one side only, so that no lock is needed
        self._starving = self._was_assigned = False
        self._stalled_since: float | None = None
        self._owned: set[tuple[str, int]] = set()
        self._pausing = Pausing(self._owned, self._assignment.wake)
        self._single: list[NativeRecord] = []  # polled one by one; callbacks may run before they are handed over
        self._poll_before = PollBefore(self._single.append)
        self._busy_seconds, self._busy_until, self._wait = busy_seconds, 0.0, _LEAST_WAIT
        self._rejoin_at: float | None = None
        self._claiming: asyncio.Task[None] | None = None

    # -- for the loop --------------------------------------------------------------------------------------

    @property
    def calling_back(self) -> bool:
        """Whether the thread is within a callback of the client, which waits for the loop."""
        return self._poll_before.calling_back

    async def subscribe(self, topics: Sequence[str]) -> None:
        """Join the group for these topics, or change the subscription; a topic with a leading ^ is a pattern."""

        def subscribe(client: Consumer) -> None:
            # Records of a former subscription may still come.
            self._only_topic = topics[0] if not self._topics and len(topics) == 1 and topics[0][0] != "^" else None
            self._topics = list(topics)
            try:
                self._subscribe(client)
            except KafkaException as error:
                raise translate(error, "Subscribing", resources=topics) from error

        await self.call(subscribe)

    def taken(self) -> None:
        """A batch was taken: there is room for another."""
        self._taken += 1
        if self._starving:
            self._wake()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Fetch no more records of these; records in flight may still come."""
        wanted = list(partitions)
        self.submit(lambda client: self._pausing.pause(client, wanted))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `pause`."""
        wanted = list(partitions)

        def resume(client: Consumer) -> None:
            self._pausing.resume(client, wanted)
            self._busy()

        self.submit(resume)

    async def seek(
        self, positions: Mapping[TopicPartition, int], sought: Callable[[Sequence[TopicPartition]], object]
    ) -> None:
        """Read these on from other positions.

        :param sought: called on the loop with the moved partitions, between their last old record and first new one.
        :raises BrokerError: one of them is not assigned; the others are moved.
        """

        def seek(client: Consumer) -> None:
            moved, failed = self._assignment.move(client, positions, self._owned)
            self._forget(moved)
            self._post(sought, moved)
            self._busy()
            if failed is not None:
                raise translate(failed, "Seeking", resources=sorted({each.topic for each in positions}))

        await self.call(seek)

    async def commit(self, offsets: list[NativePartition]) -> Answer:
        """Store positions and metadata; an answer for each. :raises BrokerError: as `call`."""

        def send(client: Consumer, waiter: asyncio.Future[Answer]) -> None:
            owned = None if self.calling_back else self._owned

            def commit(client: Consumer) -> None:
                self._commits.send(client, offsets, waiter, owned=owned, wait=self.calling_back)

            self._poll_before.run(client, commit)
            self._busy()

        return await self.call_with_future(send)

    async def group_metadata(self) -> Any:
        """The client's `consumer_group_metadata`, which fences the work of this member."""

        def read(client: Consumer, waiter: asyncio.Future[Any]) -> None:
            self._poll_before.run(client, lambda client: self._resolve(waiter, client.consumer_group_metadata()))
            self._busy()

        return await self.call_with_future(read)

    async def stop(self, timeout: float) -> bool:
        if self._claiming is not None:
            self._claiming.cancel()
        return await super().stop(timeout)

    def _crashed(self, error: BrokerError) -> None:
        self._host.failed(error)

    # -- the thread ----------------------------------------------------------------------------------------

    def _open(self) -> Consumer:
        return open_consumer(self._config, self._rebootstrapper)

    def _shut(self, client: Consumer) -> None:
        self._rebootstrapper.unwatch()
        try:
            if self._topics:
                self._commits.finish(client)
                prepare_to_leave(client, self._config, lambda: self._was_assigned)
            client.close()
        finally:
            self._commits.close()

    def _run_command(self, command: Command, client: Consumer) -> None:
        with self._suspensions.excluded():
            super()._run_command(command, client)

    def _turn(self, client: Consumer) -> None:
        self._suspensions.tick()
        if self._rejoin_at is not None and monotonic() >= self._rejoin_at:
            self._rejoin_at = None
            client.unsubscribe()
            self._subscribe(client)
        if self._commits.due:
            self._poll_before.run(client, self._commits.go_on)
        if self._posted - self._taken >= self._in_flight:
            self._stalled(client)
            return
        self._stalled_since = None
        if self._pausing.parked:
            self._pausing.unpark(client)
        sole = self._sole()
        self._moved.clear()
        messages = [] if self._single else client.consume(self._batch, 0)
        if not messages:
            if not self._single:
                if not self._commits and monotonic() < self._busy_until:
                    self._serve(client, self._next_wait())
                    return
                if (message := client.poll(_COMMIT_POLL if self._commits else _IDLE_POLL)) is None:
                    return
                self._single.append(message)
            # Callbacks of this call may revoke partitions, and drop single records.
            messages = client.consume(self._batch, 0)
            if self._single:
                messages = [*self._single, *messages]
                self._single.clear()
        if messages:
            # Callbacks of these calls may have changed the assignment.
            self._hand_over(messages, sole if sole == self._sole() else None)

    def _sole(self) -> tuple[str, int] | None:
        """The assigned partition, if there is only one."""
        return next(iter(self._owned)) if len(self._owned) == 1 else None

    def _stalled(self, client: Consumer) -> None:
        """Batches are not taken: wait, and poll meanwhile, so that the member stays in the group."""
        self._starving = True
        try:
            if self._posted - self._taken < self._in_flight:
                return
            # Answers to commits need polls too.
            self._serve(client, self._next_wait() if self._commits else _STALL_POLL)
            if self._posted - self._taken < self._in_flight:
                return
        finally:
            self._starving = False
        now = monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        elif not self._pausing.parked and now - self._stalled_since >= _LONG_STALL:
            self._pausing.park(client)
        self._poll_before.poll(client)

    def _hand_over(self, messages: list[NativeRecord], sole: tuple[str, int] | None) -> None:
        runs = runs_of(messages, self._only_topic, sole)
        count = sum(map(len, runs))
        if runs:
            # Bound the bytes of the next batch by the size of these records.
            self._batch = max(1, min(self._max_batch, _BATCH_BYTES * count // (sum([run.size for run in runs]) or 1)))
            self._posted += 1
            self._post(self._host.arrived, runs)
            self._busy()
        if count < len(messages):
            for call in _host_calls(messages, self._group, self._host, self._ended_at, self._moved):
                self._post(*call)

    def _busy(self) -> None:
        self._busy_until = monotonic() + self._busy_seconds
        self._wait = _LEAST_WAIT

    def _next_wait(self) -> float:
        """How long to wait for commands before the next poll; longer each time."""
        wait = self._wait
        self._wait = min(_GROWTH * wait, _BUSY_WAIT)
        return wait

    def _forget(self, partitions: Iterable[tuple[str, int]]) -> None:
        going = set(partitions)
        self._moved |= going
        self._single[:] = [each for each in self._single if (each.topic() or "", each.partition()) not in going]

    # -- the group; in the thread --------------------------------------------------------------------------

    def _subscribe(self, client: Consumer) -> None:
        client.subscribe(
            self._topics,
            on_assign=self._safely(self._assign),
            on_revoke=self._safely(self._revoke),
            on_lost=self._safely(self._lose),
        )
        self._busy()

    def _safely(self, callback: _OnPartitions) -> _OnPartitions:
        return guarded(callback, lambda error: self._post(self._host.failed, error), self._name)

    def _assign(self, client: Consumer, partitions: list[NativePartition]) -> None:
        self._was_assigned = True
        places = [TopicPartition(each.topic, each.partition) for each in partitions]
        found: dict[TopicPartition, int] = {}

        async def claim() -> None:
            if not self._stopping:
                self._claiming = asyncio.current_task()
                found.update(await self._host.assigning(places))

        outcome = self._await_host(client, claim, _ASSIGN_SECONDS) if places and not self._stopping else True
        if self._stopping:
            return  # nothing answers a client that closes; librdkafka assigns the partitions by itself
        if outcome is not True:
            if self._claiming is not None:
                self._post(self._claiming.cancel)
            self._assignment.add(client, [])
            error = (
                BackendError("The positions of assigned partitions were not read in time", retriable=True)
                if outcome is False
                else translate(outcome, "Claiming partitions")
            )
            if error.retriable:
                self._rejoin_at = monotonic() + _REJOIN_PAUSE
            self._post(self._host.failed, error)
            return
        self._assignment.add(client, [NativePartition(*place, found[place]) for place in places])
        self._owned.update(places)
        self._pausing.apply(client)
        if places:
            self._post(self._host.assigned, places)
        self._busy()

    def _revoke(self, client: Consumer, partitions: list[NativePartition]) -> None:
        places = self._going(partitions)
        if places and not self._stopping:
            self._commits.settle(client)
            seconds = self._revoke_seconds
            deadline = self._loop.time() + seconds
            outcome = self._await_host(client, lambda: self._host.revoking(places, deadline), seconds + 1.0)
            if isinstance(outcome, BaseException):
                logger.warning("%s: the release of partitions failed: %s", self._name, outcome)
        self._let_go(client, partitions, places)

    def _lose(self, client: Consumer, partitions: list[NativePartition]) -> None:
        places = self._going(partitions)

        async def lose() -> None:
            self._host.lost(places)

        self._owned.difference_update(places)
        self._commits.drop(places)
        if places and not self._stopping:
            self._suspensions.explain_loss()
            # Awaited, so that nothing is committed for them in the next generation.
            self._await_host(client, lose, _LOST_SECONDS)
        self._let_go(client, partitions, places)

    def _await_host(
        self, client: Consumer, work: Callable[[], Coroutine[Any, Any, object]], timeout: float
    ) -> BaseException | bool:
        with self._suspensions.excluded(), self._poll_before.callback(client):
            return self._await_on_loop(client, work, timeout)

    def _on_commit(self, error: KafkaError | None, partitions: list[NativePartition]) -> None:
        try:
            self._commits.answered(error, partitions)
        except BaseException:
            logger.exception("%s: the answer to a commit failed", self._name)

    def _going(self, partitions: list[NativePartition]) -> list[TopicPartition]:
        places = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._forget(places)
        return [place for place in places if place in self._owned]

    def _let_go(self, client: Consumer, partitions: list[NativePartition], places: list[TopicPartition]) -> None:
        self._forget(places)
        self._pausing.let_go(client, places)
        self._owned.difference_update(places)
        self._commits.drop(places)
        self._assignment.remove(client, partitions)
        self._busy()


def open_consumer(config: Mapping[str, Any], rebootstrapper: Rebootstrapper) -> Consumer:
    """A consumer of the library for the thread that owns it.

    :raises ConfigurationError: librdkafka refuses the settings.
    """
    try:
        consumer = Consumer(with_oauth_token(config))
    except (KafkaException, ValueError, TypeError) as error:
        raise configuration_error(error, "Making a consumer", config) from error
    rebootstrapper.watch(consumer)
    return consumer


def fetch_metadata(client: Consumer, topic: str) -> None:
    """Have the client know the leaders of a topic, before its partitions are assigned without a group.

    librdkafka looks for the leaders of such partitions once a second, so that the first record would come up to a
    second late. Without an answer it goes on by itself.
    """
    try:
        client.list_topics(topic, timeout=_METADATA_SECONDS)
    except KafkaException as error:
        logger.debug("Reading the metadata of %r: %s", topic, error)


class PollBefore:
    """Runs commands after a poll, so that pending rebalance callbacks run first.

    A member may have lost partitions and rejoined before it polls. So a commit, and every command that depends on the
    generation, polls first. That poll may run the callback that revokes partitions, whose release waits for this very
    command: the command then runs at the start of the callback. `run` raises the exception of a command; a callback
    never does.

    :param keep: takes the record that a poll returns: one at most, since callbacks come before records.

    :ivar calling_back: whether the thread is within a callback of the client, where nothing is polled.
    """

    def __init__(self, keep: Callable[[NativeRecord], object]) -> None:
        self._keep = keep
        self._due: Callable[[Consumer], object] | None = None
        self._failure: Exception | None = None
        self.calling_back = False

    def poll(self, client: Consumer) -> None:
        """Let the client call back."""
        message: Any = client.poll(0)
        if message is not None:
            self._keep(message)

    def run(self, client: Consumer, work: Callable[[Consumer], object]) -> None:
        """Run this after a poll."""
        if self.calling_back:
            work(client)
            return
        self._due = work
        try:
            self.poll(client)
        finally:
            self._run_due(client)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def callback(self, client: Consumer) -> Generator[None]:
        """The block is a callback of the client, in which the host releases or claims partitions."""
        self.calling_back = True
        try:
            self._run_due(client)
            yield
        finally:
            self.calling_back = False

    def _run_due(self, client: Consumer) -> None:
        due, self._due = self._due, None
        if due is not None:
            try:
                due(client)
            except Exception as error:
                self._failure = error


class ClientAssignment:
    """Assigns partitions to a client, removes and moves them, whichever way its group rebalances.

    Incremental groups name the changes, others the whole assignment. A refusal of the client is its KafkaException.

    :param config: of the client.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._incremental = _is_incremental(config)
        self._group = str(config["group.id"])
        self._begins: dict[tuple[str, int], int] = {}
        """By partition the position of the last assign or seek."""

    def add(self, client: Consumer, partitions: list[NativePartition]) -> None:
        """Read these from their positions."""
        staying = list(self._begins)
        if self._incremental:
            client.incremental_assign(partitions)
        else:
            client.assign(partitions)
            self._begins.clear()
        self._begins |= {(each.topic, each.partition): each.offset for each in partitions}
        if self._incremental:
            self.wake(client, staying)

    def remove(self, client: Consumer, partitions: list[NativePartition]) -> None:
        """Stop reading these."""
        if self._incremental:
            # Partitions without a position were never assigned, and the client refuses to remove what it does not have.
            there = {(each.topic, each.partition) for each in client.assignment()}
            client.incremental_unassign([each for each in partitions if (each.topic, each.partition) in there])
            for each in partitions:
                self._begins.pop((each.topic, each.partition), None)
            self.wake(client, list(self._begins))
        else:
            client.unassign()
            self._begins.clear()

    def move(
        self, client: Consumer, positions: Mapping[TopicPartition, int], owned: Collection[tuple[str, int]]
    ) -> tuple[list[TopicPartition], KafkaException | LeaseLost | None]:
        """Read partitions from other positions; the moved partitions, and the error of the others."""
        moved: list[TopicPartition] = []
        failed: KafkaException | LeaseLost | None = None
        for partition, position in positions.items():
            try:
                self._move(client, NativePartition(*partition, position), owned)
            except KafkaException as error:
                # A partition that is revoked meanwhile must not hide the error of one that stays.
                failed = error if partition in owned else failed or not_assigned(partition, self._group)
            else:
                self._begins[partition] = position
                moved.append(partition)
        return moved, failed

    def wake(self, client: Consumer, partitions: Iterable[tuple[str, int]]) -> None:
        """Fetch these at once, from where they were read to.

        librdkafka pauses every partition for an incremental rebalance, and drops what it had fetched. After a resume
        its thread for the broker sleeps on, up to a second, until something else wakes it; a seek does.
        """
        known = [each for each in partitions if each in self._begins]
        for found in client.position(_native_partitions(known)) if known else ():
            place = (found.topic, found.partition)
            # The client knows no position before it has handed over a record from there.
            position = found.offset if found.offset >= 0 else self._begins[place]
            if position > 0:
                try:
                    client.seek(NativePartition(*place, position))
                    self._begins[place] = position
                except KafkaException as error:
                    logger.debug("Waking %r[%d] failed: %s", *place, error)

    def _move(self, client: Consumer, to: NativePartition, owned: Collection[tuple[str, int]]) -> None:
        try:
            client.seek(to)
        except KafkaException as error:
            place = (to.topic, to.partition)
            if error.args[0].code() != KafkaError._STATE or place not in owned:
                raise
            # After an error of its position a partition does not move, but it can be assigned again.
            if self._incremental:
                client.incremental_unassign([to])
                client.incremental_assign([to])
            else:
                rest = _native_partitions([each for each in owned if each != place])
                client.assign([to, *client.position(rest)])


class Pausing:
    """The partitions that a client does not fetch.

    The client keeps a pause beyond the assignment: a partition that is revoked while paused, and assigned again, is not
    fetched until a resume. So partitions are resumed before they are released.

    :param owned: what is assigned now; read with each call.
    :param resumed: called with partitions that were resumed when nothing was fetched.

    :ivar parked: whether everything is paused because no batch is taken.
    """

    def __init__(
        self, owned: set[tuple[str, int]], resumed: Callable[[Consumer, Iterable[tuple[str, int]]], object]
    ) -> None:
        self.parked = False
        self._resumed = resumed
        self._owned = owned
        self._requested: set[tuple[str, int]] = set()
        self._stopped: set[tuple[str, int]] = set()
        """Paused in the client."""

    def pause(self, client: Consumer, partitions: Iterable[tuple[str, int]]) -> None:
        """Fetch nothing of these until they are resumed, also when they are assigned later."""
        self._requested.update(partitions)
        self.apply(client)

    def resume(self, client: Consumer, partitions: Iterable[tuple[str, int]]) -> None:
        """Undo `pause`."""
        self._requested.difference_update(partitions)
        self.apply(client)

    def park(self, client: Consumer) -> None:
        """Fetch nothing at all, also of what is assigned later."""
        self.parked = True
        self.apply(client)

    def unpark(self, client: Consumer) -> None:
        """Undo `park`; partitions that were paused stay paused."""
        self.parked = False
        self.apply(client)

    def apply(self, client: Consumer) -> None:
        """Pause and resume in the client; also after an assignment."""
        wanted = self._owned.copy() if self.parked else self._owned & self._requested
        if more := wanted - self._stopped:
            client.pause(_native_partitions(more))
        if over := self._stopped - wanted:
            client.resume(_native_partitions(over))
            if self._stopped >= self._owned:
                self._resumed(client, over)
        self._stopped = wanted

    def let_go(self, client: Consumer, partitions: Iterable[tuple[str, int]]) -> None:
        """These are about to be released; the client still has them."""
        if stopped := self._stopped.intersection(partitions):
            client.resume(_native_partitions(stopped))
            self._stopped -= stopped


def guarded(callback: _OnPartitions, failed: Callable[[BrokerError], object], name: str) -> _OnPartitions:
    """The callback without exceptions: one that reached the client would end the poll, or the process.

    :param failed: called with the exception. :param name: for the log.
    """

    def call(client: Consumer, partitions: list[NativePartition]) -> None:
        try:
            callback(client, partitions)
        except BaseException as error:
            logger.exception("%s failed in a rebalance", name)
            failed(translate(error, "A rebalance"))

    return call


def _host_calls(
    messages: Iterable[NativeRecord],
    group: str,
    host: ConsumerHost,
    ended: Callable[[TopicPartition, int], object] | None,
    moved: Container[tuple[str, int]],
) -> Iterator[tuple[Callable[..., object], *tuple[Any, ...]]]:
    """The calls of the host, with arguments, for messages that are errors or ends of partitions.

    :param group: named in errors that are about no topic.
    :param ended: called with the end of a partition.
    :param moved: partitions that were revoked or moved since; their ends may be outdated.
    """
    for message in messages:
        error = message.error()
        if error is None or error.code() == KafkaError._MAX_POLL_EXCEEDED:
            continue
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if topic is not None and partition is not None and error.code() in _OF_POSITIONS:
            out_of_range = error.code() == KafkaError._AUTO_OFFSET_RESET
            call = host.out_of_range if out_of_range else ended
            if call is not None and (out_of_range or (topic, partition) not in moved):
                yield call, TopicPartition(topic, partition), -1 if offset is None else offset
            continue
        about_topic = topic and error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED
        yield host.failed, translate(error, f"Reading {topic!r}" if about_topic else f"Reading as group {group!r}")


def _native_partitions(partitions: Iterable[tuple[str, int]]) -> list[NativePartition]:
    """As the client library takes them."""
    return [NativePartition(*partition) for partition in partitions]


def _is_incremental(config: Mapping[str, Any]) -> bool:
    """Whether rebalances of a group with this configuration name what changes, and not all there is."""
    return (
        config.get("group.protocol", "classic") == "consumer"
        or "cooperative" in str(config.get("partition.assignment.strategy", "")).lower()
    )
