"""Reads of a topic's log without a group, by direct gets: no consumer is created, nothing stays on the server.

An offset is the sequence in the stream: it grows over all partitions, so each of them has gaps. *Concurrency.* Calls
may run at once; a read fetches one chunk ahead. *Cancellation.* A cancelled read leaves nothing behind. *Failure.*
Retention that overtakes a read raises OffsetOutOfRange. Any replica may answer a direct get, even one that is behind,
so only the leader decides that a partition has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from broker import (
    BackendError,
    Bounds,
    ConnectionFailed,
    NotFound,
    OffsetOutOfRange,
    OperationTimeout,
    Record,
    TopicNotFound,
    Unsupported,
)
from broker.driver import Waker, reads_answer
from broker_jetstream.codec import (
    NULL,
    NUM_PENDING,
    SEQUENCE,
    SUBJECT,
    LogView,
    NativeMessage,
    key_of,
    server_header,
    status_of,
)
from broker_jetstream.connection import Connection
from broker_jetstream.streams import Layout, Layouts, layout_of, stored_message
from broker_jetstream.times import server_time
from broker_jetstream.transport import Outgoing

__all__ = ["JetStreamLogReader", "check_start"]

VIEW: Final = LogView()
BATCH_BYTES: Final = 4 * 1024 * 1024
_REPLICA_SECONDS: Final = 0.05
"""Between two reads from replicas that are behind."""


class JetStreamLogReader:
    """Implements `LogReaderSpi`."""

    def __init__(self, connection: Connection, layouts: Layouts) -> None:
        self._connection = connection
        self._layouts = layouts

    async def partitions(self, topic: str) -> Sequence[int]:
        return range((await self._layouts.find(topic, fresh=True)).partitions)

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        layout, first, following = await self._state(topic)
        found: dict[int, Bounds] = {}
        for number in range(layout.partitions):
            subject = layout.partition_filter(number)
            earliest = await self._stored(layout, {"seq": max(first, 1), "next_by_subj": subject})
            if earliest is None:
                # An empty partition begins at the next sequence of the stream.
                found[number] = Bounds(following, following)
                continue
            if layout.compacted:
                # The last record may have been a tombstone that the server removed; the end must not fall.
                found[number] = Bounds(earliest, following)
                continue
            latest = await self._stored(layout, {"last_by_subj": subject})
            found[number] = Bounds(earliest, max(latest or 0, earliest) + 1)
        return found

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        layout, _, following = await self._state(topic)
        moment = server_time(time)
        found: dict[int, int] = {}
        for number in range(layout.partitions):
            subject = layout.partition_filter(number)
            first = await self._stored(layout, {"start_time": moment, "next_by_subj": subject})
            if first is None:
                latest = None if layout.compacted else await self._stored(layout, {"last_by_subj": subject})
                first = following if latest is None else latest + 1
            found[number] = first
        return found

    async def read(
        self, topic: str, partition: int, start: int, stop: int, max_records: int
    ) -> AsyncGenerator[Sequence[Record[Any]]]:
        layout, first, following = await self._state(topic)
        if not 0 <= partition < layout.partitions:
            raise NotFound(
                f"Topic {topic!r} has no partition {partition}",
                advice=f"It has partitions 0 to {layout.partitions - 1}",
            )
        if stop > following:
            raise OffsetOutOfRange(f"Topic {topic!r} ends at {following}; position {stop} is beyond the end")
        position = start
        behind_since: float | None = None
        ahead: asyncio.Task[list[NativeMessage]] | None = None
        try:
            while position < stop:
                check_start(layout, position, first)
                raws = await (ahead or self._next(layout, partition, position, stop, max_records))
                ahead = None
                with reads_answer(f"Topic {topic!r}"):
                    records = [record for raw in raws if (record := _record(layout, partition, raw)).offset < stop]
                following = records[-1].offset + 1 if records else position
                ended = len(records) < len(raws) or not raws
                if not ended and following < stop:
                    # Fetch the next chunk while the caller processes this one.
                    ahead = asyncio.create_task(self._next(layout, partition, following, stop, max_records))
                left = None if raws else await self._stored(layout, _from(layout, partition, position))
                # Retention may have removed records meanwhile.
                _, first, _ = await self._state(topic)
                check_start(layout, position, first)
                if left is not None and left < stop:
                    behind_since = behind_since or time.monotonic()
                    await self._wait_for_replicas(layout, behind_since)
                    continue
                behind_since = None
                if records:
                    position = following
                    yield records
                if ended:
                    return
        finally:
            if ahead is not None:
                await _discard(ahead)

    async def _next(
        self, layout: Layout, partition: int, position: int, stop: int, max_records: int
    ) -> list[NativeMessage]:
        """Messages of a partition from a position on; the last may lie beyond `stop`."""
        # There are at most as many messages as sequences.
        most = min(max_records, stop - max(position, 1))
        if most <= 0:
            return []
        return await self._get(layout, _from(layout, partition, position) | {"batch": most, "max_bytes": BATCH_BYTES})

    async def behind(self, layout: Layout, partition: int, position: int) -> int:
        """The number of records of a partition from a position on."""
        found = await self._get(layout, _from(layout, partition, position) | {"batch": 1})
        with reads_answer(f"Topic {layout.topic!r}"):
            return int(server_header(found[0].block, NUM_PENDING) or 0) + 1 if found else 0

    async def _state(self, topic: str) -> tuple[Layout, int, int]:
        """The layout, the first sequence of the stream, and the one after its last."""
        info = await self._layouts.info(topic)
        # Another process may have added partitions.
        with reads_answer(f"Topic {topic!r}"):
            layout = layout_of(topic, info["config"])
            if not info["config"].get("allow_direct"):
                raise Unsupported(
                    f"Stream {layout.stream!r} does not allow direct reads", advice="Set allow_direct on the stream"
                )
            state = info["state"]
            return layout, int(state.get("first_seq") or 0), int(state.get("last_seq") or 0) + 1

    async def _stored(self, layout: Layout, wanted: dict[str, Any]) -> int | None:
        """The sequence of a message, read from the leader; None if no message matches."""
        found = await stored_message(self._connection, layout.stream, wanted, what=f"Topic {layout.topic!r}")
        return None if found is None else int(found["seq"])

    async def _wait_for_replicas(self, layout: Layout, since: float) -> None:
        """Wait for replicas to catch up.

        :raises OperationTimeout: they did not within `request_timeout`.
        """
        if time.monotonic() - since > self._connection.settings.request_timeout:
            raise OperationTimeout(
                f"A replica of stream {layout.stream!r} stays behind its leader",
                advice="Check the cluster's health and read again",
            )
        await asyncio.sleep(_REPLICA_SECONDS)

    async def _get(self, layout: Layout, request: dict[str, Any]) -> list[NativeMessage]:
        """Fetch messages by a direct get; repeated after a reconnect."""
        deadline = time.monotonic() + self._connection.settings.request_timeout
        while True:
            await self._connection.wait_connected(deadline - time.monotonic())
            answer = _Answer(single="batch" not in request)
            listener = await self._connection.listen(self._connection.pull_inbox(), answer.arrived)
            epoch = self._connection.epoch
            subject = self._connection.api_subject(f"DIRECT.GET.{layout.stream}").encode()
            try:
                await self._connection.send(
                    (Outgoing(subject, listener.subject.encode(), b"", msgspec.json.encode(request)),)
                )
                while not answer.done and epoch == self._connection.epoch and (left := deadline - time.monotonic()) > 0:
                    seen = len(answer.messages)
                    await answer.waker.wait(min(1.0, left))
                    if len(answer.messages) > seen:
                        deadline = time.monotonic() + self._connection.settings.request_timeout
            except ConnectionFailed:
                continue
            finally:
                await self._connection.unlisten(listener)
            if answer.done:
                if answer.error is not None:
                    await self._explain(layout, answer.error)
                return answer.messages
            if time.monotonic() >= deadline:
                raise OperationTimeout(f"No answer to a read of topic {layout.topic!r}")

    async def _explain(self, layout: Layout, error: tuple[int, str]) -> None:
        code, text = error
        if code == 503 and not await self._layouts.exists(layout.topic):
            raise TopicNotFound(f"Topic {layout.topic!r} no longer exists")
        raise BackendError(f"Reading topic {layout.topic!r}: {code} {text}", retriable=code >= 500)


class _Answer:
    """The answer to one direct get."""

    def __init__(self, *, single: bool) -> None:
        self.messages: list[NativeMessage] = []
        self.done = False
        self.waker = Waker()
        self.error: tuple[int, str] | None = None
        self._single = single

    def arrived(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        if not data and block[8:9] == b" " and SEQUENCE not in block:
            code, text = status_of(block)
            # 204 ends a batch, 404 is an empty one.
            if code not in {204, 404}:
                self.error = (code, text)
            self.done = True
        else:
            self.messages.append(NativeMessage(server_header(block, SUBJECT) or b"", b"", data, block))
            self.done = self.done or self._single
        if self.done:
            self.waker.wake()


def _from(layout: Layout, partition: int, position: int) -> dict[str, Any]:
    """Selects the messages of a partition from a position on."""
    return {"seq": max(position, 1), "next_by_subj": layout.partition_filter(partition)}


async def _discard(ahead: asyncio.Task[list[NativeMessage]]) -> None:
    ahead.cancel()
    await asyncio.wait((ahead,))
    if not ahead.cancelled():
        ahead.exception()


def _offset(raw: NativeMessage) -> int:
    return int(server_header(raw.block, SEQUENCE) or 0)


def _record(layout: Layout, partition: int, raw: NativeMessage) -> Record[Any]:
    data = None if not raw.data and NULL in raw.block else raw.data
    size = len(raw.data) + len(raw.block)
    return Record(layout.topic, partition, _offset(raw), key_of(raw.block), data, raw, VIEW, size)


def check_start(layout: Layout, position: int, first: int) -> None:
    """Sequences below the stream's first one were removed, in all partitions: by retention, or by compaction, which
    leaves nothing out that a reader needs.

    :raises OffsetOutOfRange: retention removed the position.
    """
    if position < first and first > 1 and not layout.compacted:
        raise OffsetOutOfRange(
            f"Topic {layout.topic!r} begins at {first}; retention removed the records from position {position} on"
        )
