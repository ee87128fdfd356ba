"""Two ways to receive: unary pulls for as many messages as there is room, or a stream that the server fills.

`request` may be called at any time and returns at once. `arrived` gets messages; `failed` gets an error, once. `cancel`
withdraws a request; an answer that the server has already sent is still delivered. An emulator does not notice a
cancelled call and would lose its messages, so calls to an emulator are short and are not cancelled. One loop, no
threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final, Protocol

import grpc

from broker import BrokerError
from broker.driver import Backoff, TaskSet
from broker_pubsub.connection import Connection
from broker_pubsub.errors import is_status, translate
from broker_pubsub.protocol import Methods, PullRequest, StreamingPullRequest

__all__ = ["Puller", "StreamPuller", "UnaryPuller"]

_MAX_PULL: Final = 1000
_QUICK: Final = 0.02
"""Seconds; an empty answer that comes sooner is followed by a pause."""
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.25

_EOF: Final[Any] = vars(grpc.aio)["EOF"]

EMULATOR_TIMEOUT: Final = 1.15
"""Seconds; the emulator sends an empty answer one second before the deadline of a call."""

SHORTEST_STREAM_LEASE: Final = 10
"""Seconds; the service's minimum for a stream."""
_LASTING: Final = 5.0
"""Seconds after which the end of a stream does not count as a failure to open it."""
_WAITED: Final = 0.02
"""A read that took longer, in seconds, had to wait for the server."""
_LAST_SECONDS: Final = 1.0
"""How long a stream is read after its end was requested, for messages in flight."""


class Arrived(Protocol):
    def __call__(self, received: Sequence[Any], since: float | None = None) -> None:
        """Receive messages.

        :param since: earliest time at which they may have been sent, if not just now.
        """
        ...


Failed = Callable[[BrokerError], None]


class Puller(Protocol):
    """The interface of both."""

    @property
    def pending(self) -> bool:
        """Whether messages may arrive."""
        ...

    def request(self, number: int, max_bytes: int) -> None: ...

    def made_room(self) -> None:
        """The source's buffer has room."""
        ...

    def cancel(self) -> None: ...
    async def cancelled(self) -> None:
        """Wait for cancelled calls to end."""
        ...

    async def close(self) -> None: ...


class UnaryPuller:
    """One call at a time, for as many messages as there is room."""

    def __init__(self, connection: Connection, path: str, name: str, arrived: Arrived, failed: Failed) -> None:
        self._connection = connection
        self._path = path
        self._name = name
        self._arrived = arrived
        self._failed = failed
        self._task: asyncio.Task[None] | None = None
        emulated = connection.settings.emulator is not None
        self._cancels = not emulated
        self._timeout = EMULATOR_TIMEOUT if emulated else connection.settings.pull_timeout
        self._call: Any = None
        self._tasks = TaskSet("broker-pubsub-pull", lambda error: failed(translate(error, name)))
        """The running pull and cancelled ones."""

    @property
    def pending(self) -> bool:
        return self._task is not None

    def request(self, number: int, max_bytes: int) -> None:
        if self._task is None or self._task.done():
            self._task = self._tasks.spawn(self._pull(min(number, _MAX_PULL)))

    def made_room(self) -> None:
        pass

    def cancel(self) -> None:
        task, self._task = self._task, None
        call, self._call = self._call, None
        if task is None:
            return
        # Cancel the call, not the task that awaits it, so the task ends when gRPC has ended the call.
        if call is None:
            task.cancel()
        elif self._cancels:
            call.cancel()

    async def cancelled(self) -> None:
        for task in self._tasks:
            await asyncio.wait((task,))

    async def close(self) -> None:
        self.cancel()
        await self.cancelled()

    async def _pull(self, number: int) -> None:
        request = PullRequest(subscription=self._path, max_messages=number)
        me, backoff = asyncio.current_task(), Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        messages: Sequence[Any] = ()
        error: BrokerError | None = None
        while not messages and error is None:
            begin = monotonic()
            try:
                call = self._connection.start(Methods.PULL, request, self._timeout)
                self._call = call
                response = await call
                messages = response.received_messages
            except (BrokerError, grpc.aio.AioRpcError, grpc.aio.UsageError) as failure:
                if not is_status(failure, grpc.StatusCode.DEADLINE_EXCEEDED):
                    error = translate(failure, self._name, "subscription")
            finally:
                call = None
            if self._task is not me:
                break
            self._call = None
            if not messages and error is None and monotonic() - begin < _QUICK:
                await asyncio.sleep(backoff.next())
        if self._task is me:
            self._task = None
        elif error is not None:
            return
        if error is not None:
            self._failed(error)
        else:
            self._arrived(messages)


class StreamPuller:
    """Keeps one stream open, on which the server sends within bounds that it may ignore.

    If it does, the stream is not read while the source is full, and ended if that lasts: messages in flight are then
    redelivered after their deadline. A stream that ends early is reopened after growing pauses. At close our side of
    the stream ends first, so messages in flight still arrive and can be released.

    :param full: whether the source's buffer is full.
    """

    def __init__(
        self,
        connection: Connection,
        path: str,
        name: str,
        arrived: Arrived,
        failed: Failed,
        *,
        lease: int,
        max_outstanding: int,
        full: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._path = path
        self._name = name
        self._arrived = arrived
        self._failed = failed
        self._lease = max(SHORTEST_STREAM_LEASE, lease)
        self._max_outstanding = max_outstanding
        self._max_bytes = 0
        self._full = full
        self._room = asyncio.Event()
        settings = connection.settings
        self._backoff = Backoff(settings.reconnect_wait, settings.longest_reconnect_wait)
        self._pause = 0.0
        """Seconds until the next stream is opened."""
        self._task: asyncio.Task[None] | None = None
        self._tasks = TaskSet("broker-pubsub-stream", lambda error: failed(translate(error, name)))
        self._stream: Any = None
        self._closing = False

    @property
    def pending(self) -> bool:
        return self._task is not None

    def request(self, number: int, max_bytes: int) -> None:
        self._max_bytes = max(self._max_bytes, max_bytes)
        if self._task is None or self._task.done():
            self._task = self._tasks.spawn(self._read())

    def made_room(self) -> None:
        self._room.set()

    def cancel(self) -> None:
        # Messages on the stream are leased already; the stream stays open and the source buffers them.
        pass

    async def cancelled(self) -> None:
        return

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._closing = True
        self._room.set()
        try:
            if self._stream is not None:
                with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                    await self._stream.done_writing()
                    await asyncio.wait((task,), timeout=_LAST_SECONDS)
        finally:
            task.cancel()
        await asyncio.wait((task,))

    async def _read(self) -> None:
        error: BrokerError | None = None
        stream: Any = None
        await asyncio.sleep(self._pause)
        begin, self._pause = monotonic(), self._backoff.next()
        try:
            stream = self._connection.stream(Methods.STREAMING_PULL, self._path)
            await stream.write(
                StreamingPullRequest(
                    subscription=self._path,
                    stream_ack_deadline_seconds=self._lease,
                    max_outstanding_messages=self._max_outstanding,
                    max_outstanding_bytes=self._max_bytes,
                )
            )
            self._stream = stream
            await self._read_on(stream)
        except (BrokerError, grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as failure:
            # The server ends a stream now and then; the next `request` opens another.
            if not is_status(failure, grpc.StatusCode.DEADLINE_EXCEEDED):
                error = translate(failure, self._name, "subscription")
        finally:
            self._stream = None
            if stream is not None:
                stream.cancel()
        if monotonic() - begin > _LASTING:
            self._reset_pause()
        self._task = None
        if error is not None:
            self._failed(error)
        else:
            self._arrived(())

    def _reset_pause(self) -> None:
        self._backoff.reset()
        self._pause = 0.0

    async def _read_on(self, stream: Any) -> None:
        """Read until the server ends the stream, or until a pause makes the leases of messages in flight uncertain."""
        behind: float | None = None
        while True:
            begin = monotonic()
            response = await stream.read()
            if response is _EOF:
                return
            if monotonic() - begin > _WAITED:
                behind = None  # No message was in flight.
            if not response.received_messages:
                continue
            self._reset_pause()
            self._arrived(response.received_messages, behind)
            if self._full() and not self._closing:
                behind = behind or monotonic()
                if not await self._has_room(behind + self._lease / 2):
                    # Then an emulator redelivers messages in flight sooner than after a cancellation.
                    await stream.done_writing()
                    return

    async def _has_room(self, until: float) -> bool:
        while self._full() and not self._closing:
            self._room.clear()
            try:
                async with asyncio.timeout(until - monotonic()):
                    await self._room.wait()
            except TimeoutError:
                return False
        return monotonic() < until
