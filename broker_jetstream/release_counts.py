"""How often each message of a subscription was given back unhandled, counted where every process sees it.

The server counts a give-back as a delivery like any other. So one message per subscription, in a stream of ours,
says how many of a message's deliveries met no handler. It is replaced on the condition that nobody else replaced it
meanwhile, and written before the messages are given back, so that whoever gets them next finds the count. What
cannot be written in time is not waited for: a count that is missing makes attempts look higher, and loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
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
from broker.driver import SourceListener, Warned
from broker_jetstream import subscriptions
from broker_jetstream.codec import NativeMessage, deliveries_of, sequence_of, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.errors import api_error
from broker_jetstream.names import GIVEN_BACK, given_back_subject
from broker_jetstream.streams import stored_message
from broker_jetstream.subscriptions import NANOSECONDS
from broker_jetstream.transport import Outgoing

__all__ = ["GivenBack", "Run", "counts_of", "forget", "runs_of"]

logger = logging.getLogger("broker")

Run = tuple[int, int, int]
"""First sequence, how many in a row, and how often each of them was given back."""
PATIENCE: Final = 0.5
"""Seconds that a give-back or a fetch waits for the counts."""
_MAX_RUNS: Final = 8192
_MAX_COUNTED: Final = 1 << 18
_RUN_BYTES: Final = 64
_KEEP_SECONDS: Final = 90 * 86_400
_WRONG_SEQUENCE: Final = 10071
_IN_USE: Final = 10058


class _Stored(msgspec.Struct):
    """What is kept of one subscription."""

    of: str
    """When its consumer was made: another one of this name counts anew."""
    runs: list[Run]


class GivenBack:
    """The counts of one subscription, as far as they are known here. Calls may run at once."""

    def __init__(
        self, connection: Connection, stream: str, consumer: str, what: str, listener: SourceListener, *, alone: bool
    ) -> None:
        """:param alone: nobody else ever uses the subscription, so that nothing is kept on the server."""
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._what = what
        self._listener = listener
        self._subject = given_back_subject(stream, consumer)
        self._shared = not alone
        self._lock = asyncio.Lock()
        self._counts: dict[int, int] = {}
        self._unwritten: dict[int, int] = {}
        self._revision = 0
        self._of = ""

    def count(self, sequence: int) -> int:
        """How often the message at this place in the stream was given back."""
        return self._counts.get(sequence, 0) + self._unwritten.get(sequence, 0)

    async def add(self, sequences: Iterable[int]) -> None:
        """Count a give-back of each; returns when the server has it, or after `PATIENCE` seconds."""
        for sequence in sequences:
            self._unwritten[sequence] = self._unwritten.get(sequence, 0) + 1
        if self._unwritten:
            await self._try(self._write)

    async def mark(self, messages: Sequence[Message[Any]]) -> None:
        """Have those that were delivered before tell how many of these deliveries were given back.

        What others counted is asked for, at most `PATIENCE` seconds.
        """
        again: list[tuple[NativeMessage, int, int]] = []
        for message in messages:
            raw: NativeMessage = message.raw
            if not raw.first and (before := deliveries_of(raw.reply) - 1) > 0:
                again.append((raw, sequence_of(raw.reply), before))
        if any(self.count(sequence) < before for _, sequence, before in again):
            await self._try(self._learn)
        for raw, sequence, before in again:
            raw.given_back = min(self.count(sequence), before)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        if not self._shared or not self._connection.connected:
            self._unwritten = _bounded(self._unwritten)
            return
        try:
            async with asyncio.timeout(PATIENCE), self._lock:
                await work()
        except (ConnectionFailed, OperationTimeout, NotFound, TimeoutError) as error:
            logger.debug("Counting what %s gave back: %r", self._what, error)
        except BrokerError as error:
            self._shared = False
            self._listener.event(
                Warned(text=f"{self._what}: other consumers count what is given back as delivered: {error}")
            )

    async def _write(self) -> None:
        if not self._unwritten:
            # Whoever had the lock before wrote it along.
            return
        floor = await self._identify()
        while self._unwritten:
            before, batch = self._counts, self._unwritten
            # If no answer comes they stay counted here, and the next write carries them or finds them there.
            self._counts, self._unwritten = self._merged(floor), {}
            if not await self._put():
                self._counts, self._unwritten = before, _sum(batch, self._unwritten)
                await self._read(anew=True)

    async def _learn(self) -> None:
        if not self._of:
            await self._identify()
        await self._read()

    async def _identify(self) -> int:
        """Find out which consumer has the name; everything up to the sequence that is returned is done."""
        info = await subscriptions.info(self._connection, self._stream, self._consumer, self._what)
        # Only this answer tells the same time always; that of an update may not.
        self._of = str(info.get("created"))
        floor: dict[str, Any] = info.get("ack_floor") or {}
        return int(floor.get("stream_seq") or 0)

    async def _read(self, *, anew: bool = False) -> None:
        """Take over what is newer on the server than here; `anew`: whatever it has."""
        wanted: dict[str, Any] = {"seq": self._revision + 1, "next_by_subj": self._subject}
        if anew:
            wanted = {"last_by_subj": self._subject}
            self._revision, self._counts = 0, {}
        try:
            message = await stored_message(self._connection, GIVEN_BACK, wanted, what=self._what)
        except TopicNotFound:
            return
        if message is None:
            return
        self._revision = int(message["seq"])
        try:
            stored = msgspec.json.decode(b64decode(message.get("data") or ""), type=_Stored)
        except ValueError:
            logger.debug("What %s gave back cannot be read", self._what)
        else:
            self._counts = counts_of(stored.runs) if stored.of == self._of else {}

    async def _put(self) -> bool:
        """Store the counts; False if others did meanwhile."""
        runs = runs_of(self._counts, min(_MAX_RUNS, self._connection.max_payload // _RUN_BYTES))
        data = msgspec.json.encode(_Stored(self._of, runs))
        block = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: %d\r\n\r\n" % self._revision
        subject = self._subject.encode()
        while True:
            replies = self._connection.inbox.expect(1, frozenset((subject,)))
            try:
                await self._connection.send((Outgoing(subject, replies.subject(0), block, data),))
                await replies.wait(PATIENCE)
            finally:
                replies.close()
            if (answer := replies.answers[0]) is None:
                raise OperationTimeout(f"The server did not store what {self._what} gave back")
            code, _ = status_of(answer[0])
            if code == 403:
                raise NotAuthorized(f"The server refused {self._subject!r} to this user")
            if code == 503:
                await self._make_stream()
                continue
            told: dict[str, Any] = msgspec.json.decode(answer[1])
            error: dict[str, Any] | None = told.get("error")
            if error is None:
                self._revision = int(told["seq"])
                return True
            if error.get("err_code") == _WRONG_SEQUENCE:
                return False
            raise api_error(error, self._what)

    async def _make_stream(self) -> None:
        settings = self._connection.settings
        config: dict[str, Any] = {
            "name": GIVEN_BACK,
            "subjects": [given_back_subject("*", "*")],
            "retention": "limits",
            "discard": "old",
            "storage": settings.storage,
            "num_replicas": settings.replicas,
            "max_msgs_per_subject": 1,
            # What deleted subscriptions left goes by itself.
            "max_age": _KEEP_SECONDS * NANOSECONDS,
        }
        try:
            await self._connection.api(f"STREAM.CREATE.{GIVEN_BACK}", config, what=f"Stream {GIVEN_BACK!r}")
        except BackendError as error:
            if f"err_code {_IN_USE}" not in error.message:
                raise

    def _merged(self, floor: int) -> dict[int, int]:
        return _bounded({s: n for s, n in _sum(self._counts, self._unwritten).items() if s > floor})


async def forget(connection: Connection, stream: str, consumer: str = "*") -> None:
    """Remove the counts of a subscription, or of all of a stream; what is not there or not allowed is left."""
    try:
        wanted = {"filter": given_back_subject(stream, consumer)}
        await connection.api(f"STREAM.PURGE.{GIVEN_BACK}", wanted, what=f"Stream {GIVEN_BACK!r}")
    except (NotFound, NotAuthorized) as error:
        logger.debug("Removing what was counted of %s: %s", stream, error)


def runs_of(counts: Mapping[int, int], most: int) -> list[Run]:
    """The counts in short, at most so many runs; those that were given back least are left out first."""
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


def counts_of(runs: Sequence[Run]) -> dict[int, int]:
    """The count of each sequence."""
    counts: dict[int, int] = {}
    for first, length, number in runs:
        for sequence in range(first, first + min(length, _MAX_COUNTED - len(counts))):
            counts[sequence] = number
    return counts


def _bounded(counts: dict[int, int]) -> dict[int, int]:
    """The newer half, if it is too many."""
    return counts if len(counts) <= _MAX_COUNTED else dict(islice(counts.items(), len(counts) // 2, None))


def _sum(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    total = dict(one)
    for sequence, number in other.items():
        total[sequence] = total.get(sequence, 0) + number
    return total
