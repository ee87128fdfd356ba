"""`ReaderThread`: a client that reads ranges of partitions, one after the other.

After a range was read whole, the client fetches ahead for a second, and keeps the records for a read that begins where
the range ended. *Concurrency.* As `OwnerThread`; one read at a time. *Failure.* A position that the log does not hold
raises OffsetOutOfRange; a position behind the range only if the records that came do not reach the end of the range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum, auto
from threading import Event
from time import monotonic
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import Message as NativeRecord
from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, Closed, OffsetOutOfRange, OperationTimeout, Record, TopicPartition
from broker.driver import RecordsOfRuns
from broker_kafka.client.consumer import fetch_metadata, open_consumer
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import OwnerThread
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.errors import translate

__all__ = ["Chunk", "ReaderThread", "Use"]

_POLL: Final = 0.2
_AHEAD: Final = 1.0
"""Seconds for which a client fetches ahead after a range."""
_KNOWN_SECONDS: Final = 30.0
"""How long a client certainly remembers the metadata of a topic, of which it has nothing assigned."""
_SOME: Final = 1000
_MOST: Final = 1_000_000
"""The most records of one call; the client library refuses more."""

_NOT_OURS: Final = frozenset(
    {KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._MAX_POLL_EXCEEDED, KafkaError._ALL_BROKERS_DOWN}
)


class Chunk:
    """The records of one step of a read. `done`: the range has ended."""

    __slots__ = ("done", "records")

    def __init__(self, records: Sequence[Record[Any]], done: bool) -> None:
        self.records = records
        self.done = done


class Use(IntEnum):
    """How useful an idle client is to a read; higher is better."""

    OF_ANOTHER = auto()
    """It fetches ahead in another partition."""
    OF_ITS_PARTITION = auto()
    FREE = auto()
    HAS_IT = auto()
    """It fetches ahead from where the read begins."""


class _Ahead(NamedTuple):
    """What an idle client fetches ahead.

    :ivar start: the first position.
    :ivar since: when fetching began there or below, in `time.monotonic`.
    :ivar until: when fetching ends.
    """

    place: TopicPartition
    start: int
    since: float
    until: float


class ReaderThread(OwnerThread[Consumer]):
    """A client that reads one range at a time.

    :param patience: seconds that a broker may take to send the first record of a range.
    """

    def __init__(self, config: Mapping[str, Any], patience: float) -> None:
        super().__init__("broker-kafka-log-reader", Rebootstrapper(config))
        self._config = config
        self._patience = patience
        self._place = TopicPartition("", -1)
        self._known = "", 0.0
        """The topic whose metadata were fetched last, and when."""
        self._stop_at = 0
        self._left = self._reading = Event()
        """Set when the newest read was abandoned, and the read that runs in the thread."""
        self._planned: _Ahead | None = None
        """As the loop knows it; the thread follows."""
        self._since = 0.0
        """When fetching of what is read began, without a new assignment since."""
        self._ahead: _Ahead | None = None
        self._behind: deque[NativeRecord] = deque()
        """What came after the range: records, ends of the partition, and errors of positions."""

    def _open(self) -> Consumer:
        return open_consumer(self._config, self._rebootstrapper)

    def _turn(self, client: Consumer) -> None:
        if self._ahead is None:
            self._serve(client, None)
            return
        left = self._ahead.until - monotonic()
        if left > 0:
            self._serve(client, left)
        else:
            self._unassign(client)

    def _shut(self, client: Consumer) -> None:
        self._rebootstrapper.unwatch()
        client.close()

    async def begin(self, place: TopicPartition, start: int, stop: int, most: int) -> Chunk:
        """Begin to read this range; its first records, as of `take`."""
        left = self._left = Event()
        if not _is_at(self._planned, place, start):
            self._since = monotonic()
        self._planned = None

        def begin(client: Consumer) -> Chunk:
            self._place, self._stop_at, self._reading = place, stop, left
            if _is_at(self._ahead, place, start):
                self._ahead = None
            else:
                if self._ahead is not None:
                    self._unassign(client)
                self._look_up(client, place.topic)
                client.assign([NativePartition(*place, start)])
            return self._take(client, most)

        try:
            return await self.call(begin)
        except KafkaException as error:
            raise translate(error, f"Reading {place.topic!r}") from error

    async def take(self, most: int) -> Chunk:
        """The next records of the range; waits for the first."""
        return await self.call(lambda client: self._take(client, most))

    def abandon(self) -> None:
        """End the running read: its records are not wanted any more."""
        self._left.set()

    def end(self) -> None:
        """Stop fetching, before the next range begins."""
        self._planned = None
        self.submit(self._unassign)

    def fetch_ahead(self, place: TopicPartition, stop: int) -> None:
        """Fetch ahead for a while, after this range was read."""
        ahead = self._planned = _Ahead(place, stop, self._since, monotonic() + _AHEAD)

        def fetch_ahead(_: Consumer) -> None:
            self._ahead = ahead

        self.submit(fetch_ahead)

    def forget(self, topic: str, changed: float) -> None:
        """Stop fetching ahead in this topic, if fetching began before the topic was created or changed.

        :param changed: when that was, in `time.monotonic`.
        """
        ahead = self._planned
        if ahead is not None and ahead.place.topic == topic and ahead.since <= changed:
            self.end()

    def use(self, place: TopicPartition, start: int) -> Use:
        """How useful this idle client is to a read that begins there."""
        ahead = self._planned
        if _is_at(ahead, place, start):
            return Use.HAS_IT
        if ahead is None or ahead.until <= monotonic():
            return Use.FREE
        return Use.OF_ITS_PARTITION if ahead.place == place else Use.OF_ANOTHER

    def _look_up(self, client: Consumer, topic: str) -> None:
        """Fetch the metadata of a topic that the client does not know, or may have forgotten."""
        known, since = self._known
        if topic != known or monotonic() - since > _KNOWN_SECONDS:
            fetch_metadata(client, topic)
            self._known = topic, monotonic()

    def _unassign(self, client: Consumer) -> None:
        self._ahead = None
        self._behind.clear()
        client.unassign()
        # Fetched records stay in memory until the next call, and an error would go to the next read.
        client.consume(_SOME, 0.0)

    def _take(self, client: Consumer, most: int) -> Chunk:
        most = min(most, _MOST)
        # First take what is buffered: with a timeout the library waits until the batch is full.
        messages = self._from_behind(most) or client.consume(most, 0.0)
        deadline = monotonic() + self._patience
        last: BrokerError | None = None
        while True:
            records, done, last = self._sort(messages, last)
            if records or done:
                return Chunk(records, done)
            if self._stopping or self._reading.is_set():
                raise Closed("The log reader was closed")
            if monotonic() >= deadline:
                raise last or OperationTimeout(f"No broker sent the records of {self._where} for {self._patience:g} s")
            messages = self._from_behind(most)
            if not messages and (message := client.poll(_POLL)) is not None:
                messages = [message, *client.consume(max(0, most - 1), 0.0)]

    def _from_behind(self, most: int) -> Sequence[NativeRecord]:
        """What came after the last range, up to the end of this one."""
        found: list[NativeRecord] = []
        while self._behind and len(found) < most:
            found.append(self._behind.popleft())
            if (found[-1].offset() or 0) >= self._stop_at:
                break
        return found

    def _sort(
        self, messages: Sequence[NativeRecord], last: BrokerError | None
    ) -> tuple[Sequence[Record[Any]], bool, BrokerError | None]:
        """The records of the range, whether the range ended, and the last retriable error."""
        topic, partition = self._place
        found: list[Any] = [message for message in messages if message.error() is None]
        done = False
        behind: list[NativeRecord] = []
        if len(found) < len(messages):
            for message in messages:
                error = message.error()
                if error is None or not _concerns(message, self._place):
                    continue
                is_behind = (message.offset() or 0) >= self._stop_at
                if error.code() == KafkaError._PARTITION_EOF:
                    done = done or is_behind
                elif error.code() == KafkaError._AUTO_OFFSET_RESET and is_behind:
                    behind.append(message)
                else:
                    last = self._explain(message, error) or last
        if found and found[-1].offset() >= self._stop_at - 1:
            done = True
            found = [message for message in found if message.offset() < self._stop_at]
        if done:
            # The end of the partition is reported once, and may be the end of the next range.
            behind = [each for each in messages if (each.offset() or 0) >= self._stop_at and _is_of_log(each)]
        elif behind and not found:
            raise self._lost(behind[0])
        self._behind.extendleft(reversed(behind))
        # Records are made when they are accessed; readers of columns need none.
        return RecordsOfRuns([(NativeRun(topic, partition, found), 0)] if found else [], None), done, last

    def _explain(self, message: NativeRecord, error: KafkaError) -> BrokerError | None:
        """A retriable error, or None; other errors are raised."""
        if error.code() in _NOT_OURS:
            return None
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise self._lost(message)
        found = translate(error, f"Reading {self._where}")
        if not found.retriable:
            raise found
        return found

    def _lost(self, message: NativeRecord) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"The log of {self._where} does not hold position {message.offset()} any more",
            native=KafkaException(message.error()),
        )

    @property
    def _where(self) -> str:
        return f"{self._place.topic!r}[{self._place.partition}]"


def _is_at(ahead: _Ahead | None, place: TopicPartition, start: int) -> bool:
    """Whether this begins where a read begins."""
    return ahead is not None and (ahead.place, ahead.start) == (place, start) and monotonic() < ahead.until


def _concerns(error: NativeRecord, place: TopicPartition) -> bool:
    """Whether an error is about this partition, or about none."""
    return error.topic() is None or (error.topic(), error.partition()) == place


def _is_of_log(message: NativeRecord) -> bool:
    """Whether this is a record, the end of the partition, or an error of the position."""
    error = message.error()
    return error is None or error.code() in {KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET}
