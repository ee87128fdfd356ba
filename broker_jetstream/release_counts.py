"""How often each message of a subscription was released unhandled, stored where every process reads it.

The server counts a release as a delivery. One message per subscription, in a stream of our own, stores how many
deliveries reached no handler. A write is conditional on the last revision, and precedes the release, so the next
receiver finds the count. A write that takes too long is skipped: attempts then look higher, and nothing is lost. After
a refusal or a wrong answer the counts stay in this process. Messages are settled whether or not they could be counted.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from broker import (
    BackendError,
    BrokerError,
    ConnectionFailed,
    Message,
    NotAuthorized,
    NotFound,
    OperationTimeout,
    TopicNotFound,
)
from broker.driver import SourceListener, Warned, logger, reads_answer
from broker_jetstream import subscriptions
from broker_jetstream.codec import NativeMessage, deliveries_of, sequence_of, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.errors import STREAM_IN_USE, api_error, read_answer
from broker_jetstream.names import RELEASE_COUNTS_STREAM, release_counts_subject
from broker_jetstream.streams import stored_message
from broker_jetstream.times import NANOSECONDS

__all__ = ["ReleaseCounts", "Run", "counts_from_runs", "forget", "runs_from_counts"]

Run = tuple[int, int, int]
"""First sequence, number of consecutive sequences, releases of each."""
PATIENCE: Final = 0.5
"""Seconds that a release or a fetch waits for the counts."""
_MAX_RUNS: Final = 8192
_MAX_COUNTED: Final = 1 << 18
_RUN_BYTES: Final = 64
_KEEP_SECONDS: Final = 90 * 86_400
_WRONG_SEQUENCE: Final = 10071


class _Stored(msgspec.Struct):
    """The stored counts of one subscription. The field names are the wire format."""

    of: str
    """Creation time of the consumer: a recreated one starts at zero."""
    runs: list[Run]


class ReleaseCounts:
    """The counts of one subscription, as far as they are known here. Calls may run at once.

    :param alone: no other process uses the subscription, so nothing is stored on the server.
    """

    def __init__(
        self, connection: Connection, stream: str, consumer: str, what: str, listener: SourceListener, *, alone: bool
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._what = what
        self._listener = listener
        self._subject = release_counts_subject(stream, consumer)
        self._shared = not alone
        self._lock = asyncio.Lock()
        self._counts: dict[int, int] = {}
        self._unwritten: dict[int, int] = {}
        self._revision = 0
        self._created = ""

    def count(self, sequence: int) -> int:
        """How often the message with this sequence was released."""
        return self._counts.get(sequence, 0) + self._unwritten.get(sequence, 0)

    async def add(self, messages: Iterable[Message[Any]]) -> None:
        """Count one release of each; returns when the server has stored it, or after `PATIENCE` seconds."""
        for message in messages:
            sequence = sequence_of(message.raw.reply)
            self._unwritten[sequence] = self._unwritten.get(sequence, 0) + 1
        if self._unwritten:
            await self._try(self._write)

    async def mark(self, messages: Sequence[Message[Any]]) -> None:
        """Set `releases` on redelivered messages; reads the counts of other processes, at most `PATIENCE` seconds."""
        redelivered: list[tuple[NativeMessage, int, int]] = []
        for message in messages:
            raw: NativeMessage = message.raw
            if not raw.first and (before := deliveries_of(raw.reply) - 1) > 0:
                redelivered.append((raw, sequence_of(raw.reply), before))
        if any(self.count(sequence) < before for _, sequence, before in redelivered):
            await self._try(self._refresh)
        for raw, sequence, before in redelivered:
            raw.releases = min(self.count(sequence), before)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        if not self._shared or not self._connection.connected:
            self._unwritten = _bounded(self._unwritten)
            return
        try:
            async with asyncio.timeout(PATIENCE), self._lock:
                # Anyone who may subscribe to the subject of the counts may answer.
                with reads_answer(f"The release counts of {self._what}"):
                    await work()
        except (ConnectionFailed, OperationTimeout, NotFound, TimeoutError) as error:
            logger.debug("Counting the releases of %s failed: %r", self._what, error)
        except BrokerError as error:
            self._shared = False
            self._listener.event(
                Warned(text=f"{self._what}: other consumers count released messages as delivered: {error}")
            )

    async def _write(self) -> None:
        if not self._unwritten:
            # The previous holder of the lock wrote these as well.
            return
        floor = await self._read_consumer()
        while self._unwritten:
            before, batch = self._counts, self._unwritten
            # Without an answer they stay counted here, and the next write repeats them or finds them stored.
            self._counts, self._unwritten = self._merged(floor), {}
            if not await self._put():
                self._counts, self._unwritten = before, _sum(batch, self._unwritten)
                await self._read(from_start=True)

    async def _refresh(self) -> None:
        if not self._created:
            await self._read_consumer()
        await self._read()

    async def _read_consumer(self) -> int:
        """Read which consumer has the name; returns its ack floor, below which no counts are needed."""
        info = await subscriptions.info(self._connection, self._stream, self._consumer, self._what)
        # Only this answer is stable; the time in the answer of an update may differ.
        self._created = str(info.get("created"))
        floor: dict[str, Any] = info.get("ack_floor") or {}
        return int(floor.get("stream_seq") or 0)

    async def _read(self, *, from_start: bool = False) -> None:
        """Read counts that are newer than ours; `from_start`: replace ours."""
        wanted: dict[str, Any] = {"seq": self._revision + 1, "next_by_subj": self._subject}
        if from_start:
            wanted = {"last_by_subj": self._subject}
            self._revision, self._counts = 0, {}
        try:
            message = await stored_message(self._connection, RELEASE_COUNTS_STREAM, wanted, what=self._what)
        except TopicNotFound:
            return
        if message is None:
            return
        self._revision = int(message["seq"])
        try:
            stored = msgspec.json.decode(b64decode(message.get("data") or ""), type=_Stored)
        except (ValueError, RecursionError):
            logger.debug("The release counts of %s cannot be read", self._what)
        else:
            self._counts = counts_from_runs(stored.runs) if stored.of == self._created else {}

    async def _put(self) -> bool:
        """Store the counts; returns False if another process stored newer ones."""
        runs = runs_from_counts(self._counts, min(_MAX_RUNS, self._connection.max_payload // _RUN_BYTES))
        data = msgspec.json.encode(_Stored(self._created, runs))
        block = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: %d\r\n\r\n" % self._revision
        subject = self._subject.encode()
        while True:
            if (answer := await self._connection.request_once(subject, block, data, PATIENCE)) is None:
                raise OperationTimeout(f"The server did not store the release counts of {self._what}")
            code, _ = status_of(answer[0])
            if code == 403:
                raise NotAuthorized(f"The server refused {self._subject!r} to this user")
            if code == 503:
                await self._make_stream()
                continue
            ack = read_answer(answer[1], self._what)
            error: dict[str, Any] | None = ack.get("error")
            if error is None:
                self._revision = int(ack["seq"])
                return True
            if error.get("err_code") == _WRONG_SEQUENCE:
                return False
            raise api_error(error, self._what)

    async def _make_stream(self) -> None:
        settings = self._connection.settings
        config: dict[str, Any] = {
            "name": RELEASE_COUNTS_STREAM,
            "subjects": [release_counts_subject("*", "*")],
            "retention": "limits",
            "discard": "old",
            "storage": settings.storage,
            "num_replicas": settings.replicas,
            "max_msgs_per_subject": 1,
            # Counts of deleted subscriptions expire.
            "max_age": _KEEP_SECONDS * NANOSECONDS,
        }
        try:
            await self._connection.api(
                f"STREAM.CREATE.{RELEASE_COUNTS_STREAM}", config, what=f"Stream {RELEASE_COUNTS_STREAM!r}"
            )
        except BackendError as error:
            if f"err_code {STREAM_IN_USE}" not in error.message:
                raise

    def _merged(self, floor: int) -> dict[int, int]:
        return _bounded({s: n for s, n in _sum(self._counts, self._unwritten).items() if s > floor})


async def forget(connection: Connection, stream: str, consumer: str = "*") -> None:
    """Remove the counts of a subscription, or of all of a stream, if they exist and this user may."""
    try:
        wanted = {"filter": release_counts_subject(stream, consumer)}
        await connection.api(f"STREAM.PURGE.{RELEASE_COUNTS_STREAM}", wanted, what=f"Stream {RELEASE_COUNTS_STREAM!r}")
    except (NotFound, NotAuthorized) as error:
        logger.debug("Removing the release counts of %s: %s", stream, error)


def runs_from_counts(counts: Mapping[int, int], most: int) -> list[Run]:
    """Counts as at most `most` runs; the lowest counts are left out first."""
    runs: list[Run] = []
    for sequence in sorted(counts):
        number = counts[sequence]
        if runs:
            first, length, last = runs[-1]
            if last == number and first + length == sequence:
                runs[-1] = (first, length + 1, number)
                continue
        runs.append((sequence, 1, number))
    if len(runs) > most:
        runs = sorted(sorted(runs, key=lambda run: run[2], reverse=True)[:most])
    return runs


def counts_from_runs(runs: Sequence[Run]) -> dict[int, int]:
    """The count of each sequence, of `_MAX_COUNTED` at most: overlapping runs would take any time."""
    counts: dict[int, int] = {}
    left = _MAX_COUNTED
    for first, length, number in runs:
        length = max(0, min(length, left))
        left -= length
        for sequence in range(first, first + length):
            counts[sequence] = number
    return counts


def _bounded(counts: dict[int, int]) -> dict[int, int]:
    """The newer half if there are too many."""
    return counts if len(counts) <= _MAX_COUNTED else dict(islice(counts.items(), len(counts) // 2, None))


def _sum(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    total = dict(one)
    for sequence, number in other.items():
        total[sequence] = total.get(sequence, 0) + number
    return total
