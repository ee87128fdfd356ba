"""A followed log: an ordered consumer per partition, which pulls without acks and disappears with its connection.

The server numbers the deliveries of a consumer. After a gap in the numbers, a reconnect, a deleted consumer or silence,
a new consumer begins where the last record ended; then the stream must be the same, and must still hold that position.
While records wait on the server, retention may remove some of them, so the stream's bounds are checked again before
such records are returned; a consumer that waits for records gets each at once.

*Concurrency.* One event loop; one fetch at a time, and `add` beside it. *Cancellation.* A cancelled `add` may leave a
consumer, which the server deletes. *Failure.* Retriable errors repeat nothing and skip nothing: the next fetch goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final, NamedTuple

from broker import BrokerError, Closed, OffsetOutOfRange, Record, TopicRecreated
from broker.driver import TaskSet, Waker, logger, reads_answer
from broker_jetstream import subscriptions
from broker_jetstream.codec import NULL, MessageView, NativeMessage, key_of, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.log_reader import JetStreamLogReader, check_start
from broker_jetstream.pull_requests import OrderedPulls
from broker_jetstream.streams import Layout, Layouts, layout_of
from broker_jetstream.times import NANOSECONDS

__all__ = ["FollowingLogReader", "JetStreamLogFollower"]

_VIEW: Final = MessageView()
_IDLE_SECONDS: Final = 300
"""The server deletes the consumer of a dead process after this time."""
_REQUESTED: Final = 2000
"""The most records that are requested at once, over all partitions."""
_REQUESTED_BYTES: Final = 8 * 1024 * 1024
_CLOSE_SECONDS: Final = 1.0
_GAP_SECONDS: Final = 1.0
"""How long a partition may be without a request before its records count as waiting on the server."""
_LOOK_SECONDS: Final = 10.0
"""How often an idle follower notes how far the stream has grown."""


class _Stream(NamedTuple):
    """What STREAM.INFO says.

    :ivar first: the first sequence. :ivar following: the one after the last.
    """

    layout: Layout
    created: str
    first: int
    following: int


class _Partition:
    """One partition.

    :ivar reached: everything below it was returned, or is gone.
    :ivar gap_free_from: the log held everything from here on that was not returned yet, when the stream was last seen.
    """

    def __init__(self, connection: Connection, number: int, position: int, wake: Callable[[], None]) -> None:
        self.number = number
        self.reached = self.gap_free_from = position
        self.opened = False
        self.waiting = False
        """Whether records may have waited on the server since the stream was last seen."""
        self._connection = connection
        self._wake = wake
        self._buffer: deque[tuple[int, NativeMessage]] = deque()
        self._ahead = position
        self._sequence = 0
        self._end = 0
        self._consumer, self._name = "", b""
        self._pulls: OrderedPulls | None = None
        self._epoch = -1

    @property
    def buffered(self) -> bool:
        return bool(self._buffer)

    @property
    def ahead(self) -> int:
        """The position at which a new consumer begins; everything from `gap_free_from` up to it has arrived."""
        return max(self._ahead, self.gap_free_from)

    @property
    def stale(self) -> bool:
        """Whether the consumer must be replaced: the connection broke, or two heartbeats are missing."""
        return self._epoch != self._connection.epoch or (self._pulls is not None and self._pulls.silent)

    async def open(self, stream: _Stream) -> None:
        """Create a consumer that begins behind the records that have arrived."""
        self._epoch = self._connection.epoch
        name = f"+{token_hex(8)}"
        layout = stream.layout
        config: dict[str, Any] = {
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(self._ahead, 1),
            "replay_policy": "instant",
            "filter_subject": layout.partition_filter(self.number),
            "inactive_threshold": _IDLE_SECONDS * NANOSECONDS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        what = f"A follower of topic {layout.topic!r}"
        info = await subscriptions.create(self._connection, layout, name, config, what=what)
        self._pulls = OrderedPulls(self._connection, layout, name, self._arrived)
        self._consumer, self._name, self._sequence = name, name.encode(), 0
        # Records below were in the stream before the consumer: it has them if it has any left.
        self._end = stream.following
        self.opened = True
        with reads_answer(what):
            self.waiting = bool(info.get("num_pending"))
        if not self.waiting and not self._buffer:
            self.reached = max(self.reached, self._end)

    async def discard(self) -> str:
        """Close the consumer's inbox; returns the consumer's name, empty if there is none. Records that came stay."""
        pulls, self._pulls, name = self._pulls, None, self._consumer
        self._consumer, self.opened = "", False
        if pulls is not None:
            await pulls.cancel()
        return name

    async def request(self, number: int, max_bytes: int) -> None:
        """Keep up to `number` records requested or buffered."""
        if self._pulls is None or not self._connection.connected:
            return
        credit = self._pulls.credit
        if not credit and time.monotonic() - self._pulls.last_heard > _GAP_SECONDS:
            self.waiting = True
        wanted = number - len(self._buffer) - credit
        if wanted > 0 and credit * 2 <= number:
            await self._pulls.request(wanted, max_bytes)

    def _arrived(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        pulls = self._pulls
        if pulls is None:
            return
        if not data and block[8:9] == b" " and not reply:
            if pulls.owns(subject):
                self._status(pulls, subject, block)
            return
        fields = reply.split(b".")
        at = 4 if len(fields) == 9 else 6
        if not self.opened or fields[at - 1] != self._name:
            return
        pulls.arrived()
        offset, sequence = int(fields[at + 1]), int(fields[at + 2])
        if sequence != self._sequence + 1:
            # A record was lost: a new consumer begins behind the last one.
            self.opened = False
            self._wake()
            return
        self._sequence = sequence
        self._ahead = offset + 1
        self._buffer.append((offset, NativeMessage(subject, reply, data, block)))
        if len(self._buffer) == 1:
            self._wake()

    def _status(self, pulls: OrderedPulls, subject: bytes, block: bytes) -> None:
        pulls.last_heard = time.monotonic()
        code, text = status_of(block)
        if code == 503 or (code == 409 and "deleted" in text.lower()):
            self.opened = False
        if code != 100:
            pulls.end(subject)
        elif self.opened and not self._buffer:
            # A heartbeat: the server has nothing left for us.
            self.waiting = False
            self.reached = max(self.reached, self._end)
        self._wake()

    def take(self, topic: str, most: int, max_bytes: int, into: list[Record[Any]]) -> int:
        """Append buffered records to `into`, as far as they fit; returns their bytes."""
        buffer, number = self._buffer, self.number
        added = 0
        offset, raw = -1, None
        while buffer and most > 0:
            head = buffer[0][1]
            size = len(head.data) + len(head.block)
            if added + size > max_bytes and into:
                break
            offset, raw = buffer.popleft()
            data = None if not raw.data and NULL in raw.block else raw.data
            into.append(Record(topic, number, offset, key_of(raw.block), data, raw, _VIEW, size))
            added += size
            most -= 1
        if raw is not None:
            self.reached = self.gap_free_from = offset + 1
            if not buffer:
                fields = raw.reply.split(b".")
                self.waiting = bool(int(fields[8 if len(fields) == 9 else 10]))
                if not self.waiting:
                    self.reached = max(self.reached, self._end)
        return added


class JetStreamLogFollower:
    """Implements `LogFollowerSpi`."""

    def __init__(
        self,
        connection: Connection,
        layouts: Layouts,
        topic: str,
        *,
        on_close: Callable[[JetStreamLogFollower], object],
    ) -> None:
        self._connection = connection
        self._layouts = layouts
        self._topic = topic
        self._on_close = on_close
        self._partitions: dict[int, _Partition] = {}
        self._returned: list[int] = []
        """How far the partitions were read when the last fetch returned."""
        self._created = ""
        self._waker = Waker()
        self._opening = asyncio.Lock()
        self._turn = 0
        self._seen_following = 0
        self._look_at = 0.0
        self._fetching = self._interrupted = self._closed = False
        self._tasks = TaskSet("broker-jetstream-follower", lambda error: logger.debug("Following %r: %s", topic, error))
        self._remove_callback = connection.on_connected(self._waker.wake)

    async def open(self, positions: Mapping[int, int]) -> None:
        """Create the consumers.

        :raises OffsetOutOfRange: the stream does not hold a position.
        :raises TopicNotFound: there is no such stream.
        """
        self._created = (await self._look()).created
        await self.add(positions)

    async def add(self, positions: Mapping[int, int]) -> None:
        self._check_open()
        self._partitions |= {
            number: _Partition(self._connection, number, position, self._waker.wake)
            for number, position in positions.items()
        }
        await self._open_consumers()
        self._waker.wake()

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        self._check_open()
        self._fetching = True
        deadline = time.monotonic() + wait
        try:
            while True:
                records = await self._take(max_records, max_bytes)
                left = deadline - time.monotonic()
                before, self._returned = self._returned, [each.reached for each in self._partitions.values()]
                if records or self._interrupted or before != self._returned:
                    return records
                if left <= 0:
                    if not self._connection.connected:
                        raise self._connection.down_error()
                    await self._note_growth()
                    return records
                if not any(each.buffered for each in self._partitions.values()):
                    await self._waker.wait(left)
                self._check_open()
        finally:
            self._fetching = self._interrupted = False

    async def _take(self, max_records: int, max_bytes: int) -> list[Record[Any]]:
        if self._connection.connected:
            await self._open_consumers()
        partitions = list(self._partitions.values())
        for partition in partitions:
            await partition.request(max(1, _REQUESTED // len(partitions)), _REQUESTED_BYTES // len(partitions))
        full = [partition for partition in partitions if partition.buffered]
        if waiting := [partition for partition in full if partition.waiting]:
            stream = await self._look()
            for partition in waiting:
                check_start(stream.layout, partition.gap_free_from, stream.first)
        records: list[Record[Any]] = []
        if not full:
            return records
        self._turn += 1
        first = self._turn % len(full)
        room = max_bytes
        for partition in full[first:] + full[:first]:
            if len(records) >= max_records or (records and room <= 0):
                break
            room -= partition.take(self._topic, max_records - len(records), room, records)
        return records

    async def _open_consumers(self) -> None:
        """Give each partition a consumer that has none, or whose consumer is lost."""
        # Called for every fetch.
        if all(each.opened and not each.stale for each in self._partitions.values()):
            return
        async with self._opening:
            lost = [each for each in self._partitions.values() if not each.opened or each.stale]
            names = [name for each in lost if (name := await each.discard())]
            stream = await self._look()
            if names and self._connection.connected:
                self._tasks.spawn(self._delete(names))
            for partition in lost:
                position = partition.ahead
                if position > stream.following:
                    raise OffsetOutOfRange(
                        f"Topic {self._topic!r} ends at {stream.following}; position {position} is beyond the end"
                    )
                check_start(stream.layout, position, stream.first)
            await asyncio.gather(*(partition.open(stream) for partition in lost))

    async def _look(self) -> _Stream:
        """The current state of the stream.

        :raises TopicRecreated: it is not the stream that was opened.
        """
        info = await self._layouts.info(self._topic)
        with reads_answer(f"Topic {self._topic!r}"):
            state = info["state"]
            found = _Stream(
                layout_of(self._topic, info["config"]),
                str(info.get("created") or ""),
                int(state.get("first_seq") or 0),
                int(state.get("last_seq") or 0) + 1,
            )
        if self._created not in ("", found.created):
            raise TopicRecreated(f"Topic {self._topic!r} was deleted and recreated while it was followed")
        return found

    async def _note_growth(self) -> None:
        """Note how far the stream has grown while nothing came.

        Retention that removes records of other partitions must not look like a loss in an idle one.
        """
        if time.monotonic() < self._look_at or not all(each.opened for each in self._partitions.values()):
            return
        self._look_at = time.monotonic() + _LOOK_SECONDS
        for partition in self._partitions.values():
            # What the last look saw has had the time to arrive.
            if not partition.waiting and not partition.buffered:
                partition.gap_free_from = max(partition.gap_free_from, self._seen_following)
        self._seen_following = (await self._look()).following

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def reached(self, partition: int) -> int:
        return self._partitions[partition].reached

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._remove_callback()
        self._waker.wake()
        try:
            names = [name for each in self._partitions.values() if (name := await each.discard())]
            if self._connection.connected:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._delete(names)
        except (BrokerError, TimeoutError) as error:
            logger.debug("Following %r: closing: %s", self._topic, error)
        finally:
            self._tasks.cancel()
            self._on_close(self)

    async def _delete(self, names: Sequence[str]) -> None:
        layout = await self._layouts.find(self._topic)
        what = f"A follower of topic {self._topic!r}"
        await asyncio.gather(*(subscriptions.delete(self._connection, layout.stream, name, what) for name in names))

    def _check_open(self) -> None:
        if self._closed or self._connection.closed:
            raise Closed(f"The followed log {self._topic!r} was closed")


class FollowingLogReader(JetStreamLogReader):
    """Implements `LogReaderSpi` and `FollowsLogs`.

    :param opened: the open parts of the backend, which closes them.
    """

    def __init__(self, connection: Connection, layouts: Layouts, opened: set[Any]) -> None:
        super().__init__(connection, layouts)
        self._opened = opened

    async def follow(self, topic: str, positions: Mapping[int, int]) -> JetStreamLogFollower:
        follower = JetStreamLogFollower(self._connection, self._layouts, topic, on_close=self._opened.discard)
        self._opened.add(follower)
        try:
            await follower.open(positions)
        except BaseException:
            await follower.close()
            raise
        return follower
