"""A message topic, one marker partition, workers that lease and one tracker, all in memory and without threads.

The broker's clock is `now`; markers get it as their timestamp. Writes of the tracker are atomic where it is
transactional. `naive_open` reads the whole log by the plain rules of the protocol: what the tracker must agree with.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.redelivery import (
    Replacement,
    attempts_of,
    dead_letter,
    is_exhausted,
    origin_of,
    redelivery,
)
from broker_kafka.queue.markers.start_writer import StartWriter
from broker_kafka.queue.markers.wire import (
    TIME_MARKER,
    Content,
    Kind,
    Marker,
    MessageId,
    pack_markers,
    read_content,
    read_markers,
    write_marker,
)
from broker_kafka.queue.markers_pb2 import Header, HeaderList
from broker_kafka.queue.tracker.partition_state import PartitionOptions, PartitionState

__all__ = ["FAR", "TOPIC", "Held", "Record", "Simulation", "expire", "leased_queue", "markers_of", "naive_open"]

TOPIC = "orders"
FAR = PartitionOptions(renew_distance=10**9)
"""Nothing is renewed."""


class Record(NamedTuple):
    offset: int
    timestamp: int
    data: bytes


@dataclass
class Held:
    """What a worker has in hand."""

    id: MessageId
    attempt: int
    sending: Replacement


@dataclass
class Simulation:
    """:ivar transactional: whether a redelivery and its END are on the brokers together or not at all."""

    transactional: bool = True
    period: int = 1000
    max_attempts: int = 0
    options: PartitionOptions = field(default_factory=lambda: PartitionOptions(renew_distance=2, stall_ms=5000))
    now: int = 1_000_000
    messages: list[Replacement] = field(default_factory=list)
    """The message topic; its positions are offsets."""
    position: int = 0
    """The group's committed position."""
    log: list[Record] = field(default_factory=list)
    log_start: int = 0
    held: list[Held] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)
    dead: list[Replacement] = field(default_factory=list)
    committed: int = 0
    renewals: list[tuple[Lease, bytes]] = field(default_factory=list)
    """Under way: sent, and not in the log yet."""
    redelivered: dict[MessageId, int] = field(default_factory=dict)
    """How often each message was, since its last START."""

    def __post_init__(self) -> None:
        self.tracker = self.assign()

    # -- applications and workers --------------------------------------------------------------------------

    def send(self, name: str) -> None:
        self.messages.append(Replacement(TOPIC, b"key", name.encode(), (("anybroker-id", name.encode()),)))

    def take(self, *, commits: bool = True, delay: int | None = None) -> Held | None:
        """Read the next message, write its START, commit, hand over; without the commit another reads it too.

        :param delay: the START defers the message, and no consumer gets it.
        """
        if self.position == len(self.messages):
            return None
        sending = self.messages[self.position]
        attempt = attempts_of(sending.headers) + 1
        held = Held(MessageId(TOPIC, 0, self.position, "q"), attempt, sending)
        content = Content(
            key=sending.key,
            value=sending.value,
            headers=sending.headers,
            origin=origin_of(sending.headers, TOPIC),
            max_attempts=self.max_attempts,
            dead_letter="dead" if self.max_attempts else "",
        )
        start = Marker(
            kind=Kind.START,
            id=held.id,
            after_ms=self.period if delay is None else delay,
            attempt=attempt if delay is None else attempt - 1,
            released=delay is not None,
        )
        self.write(start, content)
        self.redelivered.pop(held.id, None)
        if commits:
            self.position += 1
        if delay is None:
            self.held.append(held)
        return held

    def take_together(self, count: int, *, commits: bool = True) -> list[Held]:
        """The same of several; those that were not sent again have one START."""
        first, together = self.position, list[tuple[int, Replacement]]()
        found: list[Held] = []
        for offset, sending in enumerate(self.messages[first : first + count], first):
            if attempts_of(sending.headers) or origin_of(sending.headers, TOPIC) is not None:
                self.position = offset
                found += [held for held in [self.take(commits=False)] if held is not None]
            else:
                together.append((offset, sending))
        self.position = first
        if len(together) > 1:
            self.append(self._started(together))
        for offset, sending in together:
            if len(together) == 1:
                self.position = offset
                found += [held for held in [self.take(commits=False)] if held is not None]
                self.position = first
            else:
                held = Held(MessageId(TOPIC, 0, offset, "q"), 1, sending)
                self.redelivered.pop(held.id, None)
                self.held.append(held)
                found.append(held)
        if commits:
            self.position += len(found)
        return found

    def _started(self, messages: list[tuple[int, Replacement]]) -> bytes:
        writer = StartWriter(
            TOPIC,
            0,
            "q",
            lease_ms=self.period,
            holder="",
            max_attempts=self.max_attempts,
            dead_letter="dead" if self.max_attempts else "",
        )
        sendings = [sending for _, sending in messages]
        return writer.together(
            [offset for offset, _ in messages],
            [each.key or b"" for each in sendings],
            [each.value or b"" for each in sendings],
            [0] * len(messages),
            [HeaderList(headers=[Header(name=name, value=value) for name, value in each.headers]) for each in sendings],
        )

    def ack(self, held: Held, *, lost: bool = False, twice: bool = False) -> None:
        """:param lost: the END does not reach the brokers, and the worker dies."""
        self.held.remove(held)
        self.acked.append((held.sending.value or b"").decode())
        for _ in range(0 if lost else 2 if twice else 1):
            self.write(Marker(kind=Kind.END, id=held.id))

    def ack_together(self, helds: list[Held]) -> None:
        for held in helds:
            self.held.remove(held)
            self.acked.append((held.sending.value or b"").decode())
        self.write(Marker(kind=Kind.END, id=helds[0].id, more=tuple(held.id.offset for held in helds[1:])))

    def keep(self, held: Held, *others: Held) -> None:
        more = tuple(each.id.offset for each in others)
        self.write(Marker(kind=Kind.KEEPALIVE, id=held.id, after_ms=self.period, more=more))

    def try_again(self, held: Held, delay: int) -> None:
        """It failed, and waits with its worker, which has it once more after this."""
        self.write(Marker(kind=Kind.KEEPALIVE, id=held.id, after_ms=max(self.period, delay), attempt=held.attempt))
        held.attempt += 1
        self.write(Marker(kind=Kind.KEEPALIVE, id=held.id, after_ms=max(self.period, delay), attempt=held.attempt))

    def release(self, held: Held, delay: int, *, counts: bool = True) -> None:
        self.held.remove(held)
        attempt = held.attempt if counts else held.attempt - 1
        self.write(Marker(kind=Kind.KEEPALIVE, id=held.id, after_ms=delay, attempt=attempt, released=True))

    def crash(self, held: Held) -> None:
        self.held.remove(held)

    # -- the log -------------------------------------------------------------------------------------------

    def write(self, marker: Marker, content: Content | None = None, *, timestamp: int | None = None) -> int:
        return self.append(write_marker(marker, content), timestamp=timestamp)

    @contextmanager
    def packing(self) -> Generator[None]:
        """What is written in this block lies in one record."""
        begun = len(self.log)
        yield
        parts = [record.data for record in self.log[begun:]]
        del self.log[begun:]
        if parts:
            self.append(pack_markers(parts))

    def append(self, data: bytes, *, timestamp: int | None = None) -> int:
        offset = len(self.log)
        self.log.append(Record(offset, self.now if timestamp is None else timestamp, data))
        return offset

    # -- the tracker ---------------------------------------------------------------------------------------

    def assign(self) -> PartitionState:
        return PartitionState(self.committed, len(self.log), self.now, self.options)

    def restart(self) -> None:
        """The tracker dies, and the next fences what it left under way."""
        self.renewals.clear()
        self.tracker = self.assign()

    def read(self, count: int | None = None) -> None:
        """Read so many markers, or all that there are, and then that there are no more."""
        start = self.tracker.position
        for record in self.log[start : len(self.log) if count is None else start + count]:
            self.tracker.read(record.offset, record.timestamp, record.data, self.now)
        self.tracker.log_end_known(len(self.log), self.now)

    def redeliver(self, limit: int = 100, *, fails: bool = False, dies: bool = False) -> list[Lease]:
        """:param fails: the brokers take nothing of it. :param dies: the tracker dies before its END, if it can."""
        due = list(self.tracker.due(limit))
        for lease in due:
            if fails:
                self.tracker.failed(lease, 100)
                continue
            content = read_content(lease.data)
            if is_exhausted(lease, content):
                self.dead.append(dead_letter(lease, content, "delivered too often"))
            else:
                self.messages.append(redelivery(lease, content))
            self.redelivered[lease.id] = self.redelivered.get(lease.id, 0) + 1
            if dies and not self.transactional:
                self.restart()
                return due
            self.write(Marker(kind=Kind.END, id=lease.id))
        if self.tracker.wants_time(self.now):
            self.write(TIME_MARKER)
        for message in self.tracker.markers.to_end():
            self.write(Marker(kind=Kind.END, id=message))
        return due

    def renew(self) -> None:
        for lease in self.tracker.to_renew(3):
            self.renewals.append((lease, write_marker(self.tracker.renewal(lease), read_content(lease.data))))

    def renewals_arrive(self, *, fail: bool = False) -> None:
        for lease, data in self.renewals:
            if fail:
                self.tracker.markers.renewal_failed(lease)
            else:
                self.append(data)
        self.renewals.clear()

    def commit(self) -> None:
        offset = self.tracker.to_commit()
        if offset is not None:
            self.committed = offset
            self.tracker.committed(offset)

    def settle_all(self) -> None:
        """Workers die, and new ones ack all that comes, until nothing is left."""
        self.held.clear()
        self.renewals_arrive()
        idle = 0
        while idle < 3:
            while (held := self.take()) is not None:
                self.ack(held)
            self.now += self.options.stall_ms
            self.read()
            idle = 0 if self.redeliver() else idle + 1


def markers_of(log: Iterable[Record]) -> Iterator[tuple[Record, Marker]]:
    """All markers of some records, each with its record."""
    for record in log:
        for marker, _ in read_markers(record.data):
            if marker is not None:
                yield record, marker


def naive_open(log: list[Record]) -> dict[MessageId, int]:
    """The open messages of a whole log, and how many deliveries of each count."""
    found: dict[MessageId, int] = {}
    released: set[MessageId] = set()
    for marker, message in ((said, each) for _, said in markers_of(log) for each in said.ids()):
        if marker.renews is not None:
            continue
        if marker.kind == Kind.START:
            found[message] = marker.attempt or 0
            (released.add if marker.released else released.discard)(message)
        elif marker.kind == Kind.END:
            found.pop(message, None)
            released.discard(message)
        elif message in found and message not in released:
            if marker.attempt is not None:
                found[message] = max(marker.attempt, found[message] - marker.released)
            if marker.released:
                released.add(message)
    return found


def leased_queue(count: int = 1, *, period: int = 1000, max_attempts: int = 0) -> Simulation:
    """A queue whose tracker has read so many STARTs."""
    queue = Simulation(options=FAR, period=period, max_attempts=max_attempts)
    for number in range(count):
        queue.send(f"m{number}")
        queue.take()
    queue.read()
    return queue


def expire(queue: Simulation) -> None:
    """The lease period passes, and the log is read."""
    queue.now += queue.period
    queue.read()
