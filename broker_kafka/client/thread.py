"""Threads that own a client of confluent-kafka: `OwnerThread` for any client, `AdminThread` for the admin client.

*Concurrency.* The event loop submits commands and never touches the client. The thread runs them between two turns, in
the order of submission, and also while it waits for the loop (`_await_on_loop`), so that commits work within a
rebalance callback. Results and batches go to the loop by `_post`, which costs one wake-up each: post a batch, never a
message. *Cancellation.* A cancelled `call` does not run if it had not begun; otherwise it goes on, and its result is
dropped. *Failure.* The caller gets the exception of a command. An exception in a turn ends the thread: every pending
and later call raises it as a BrokerError, and `_crashed` is called on the loop. `stop` is bounded: a client that does
not close in time is left to its daemon thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, Final, Generic

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from typing_extensions import TypeVar

from broker import BackendError, BrokerError, Closed
from broker.driver import logger
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.config.oauth import with_oauth_token
from broker_kafka.errors import configuration_error, translate

__all__ = ["AdminThread", "Command", "OwnerThread"]


C = TypeVar("C")
R = TypeVar("R")


class Command:
    """What the thread takes from its inbox.

    :ivar waiter: gets the result, or the error if the thread ends first; None if nothing waits for it.
    """

    __slots__ = ("waiter",)

    def __init__(self, waiter: asyncio.Future[Any] | None) -> None:
        self.waiter = waiter


class _Function(Command):
    """:ivar resolves_waiter: the function itself completes the waiter, then or later."""

    __slots__ = ("cancelled", "function", "resolves_waiter")

    def __init__(
        self, function: Callable[[Any], Any], waiter: asyncio.Future[Any] | None, *, resolves_waiter: bool = False
    ) -> None:
        super().__init__(waiter)
        self.function = function
        self.resolves_waiter = resolves_waiter
        self.cancelled = False


_WAKE: Final = _Function(lambda client: None, None)


class OwnerThread(ABC, Generic[C]):
    """A subclass opens the client, defines a turn of the thread, and closes the client.

    Create it and call its public methods on the event loop.

    :param name: of the thread, for errors and dumps.
    :param rebootstrapper: of the client. The subclass calls `watch` after it opens a client and `unwatch` before it
        closes one; the end of the thread calls `unwatch` in any case.
    """

    def __init__(self, name: str, rebootstrapper: Rebootstrapper) -> None:
        self._name = name
        self._rebootstrapper = rebootstrapper
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._gate = Lock()
        """Held while a command is submitted, so that none is submitted after the last one was answered."""
        self._over = False
        self._stopping = False
        self._failure: BrokerError | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    # -- called on the loop --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread and wait until its client is open.

        :raises BrokerError: the client could not be opened.
        """
        self._thread.start()
        await asyncio.shield(self._opened)

    async def call(self, function: Callable[[C], R]) -> R:
        """Run `function(client)` in the thread between two turns; return its result, or raise its exception.

        :raises Closed: the thread was stopped.
        :raises BrokerError: the thread has failed.
        """
        waiter: asyncio.Future[R] = self._loop.create_future()
        command = _Function(function, waiter)
        self._put(command)
        try:
            return await waiter
        except asyncio.CancelledError:
            command.cancelled = True
            raise

    async def call_with_future(self, function: Callable[[C, asyncio.Future[R]], object]) -> R:
        """Run `function(client, future)` in the thread and await the future, which `_resolve` completes, then or later.

        The function runs even if the caller is cancelled. :raises BrokerError: as `call`.
        """
        waiter: asyncio.Future[R] = self._loop.create_future()
        self._put(_Function(lambda client: function(client, waiter), waiter, resolves_waiter=True))
        return await waiter

    def submit(self, function: Callable[[C], object]) -> None:
        """Run `function(client)` in the thread without waiting; its exception is logged.

        :raises Closed: the thread was stopped.
        :raises BrokerError: the thread has failed.
        """
        self._put(_Function(function, None))

    async def stop(self, timeout: float) -> bool:
        """Run the commands submitted so far, close the client and end the thread; False if `timeout` seconds passed.

        May be called again, and after a failure.
        """
        self._stopping = True
        if self._thread.ident is None:
            self._end()
            return True
        self._wake()
        if not self._ended.done():
            await asyncio.wait((self._ended,), timeout=timeout)
        if not self._ended.done():
            logger.warning("%s did not close its client within %.1f s", self._name, timeout)
        return self._ended.done()

    @property
    def failure(self) -> BrokerError | None:
        """The error that ended the thread, if one did."""
        return self._failure

    # -- called in the thread, by the subclass ---------------------------------------------------------

    @abstractmethod
    def _open(self) -> C:
        """Open the client. `start` raises its exception: a BrokerError unchanged, any other as a BackendError."""

    @abstractmethod
    def _turn(self, client: C) -> None:
        """Do a short piece of work, at most a tenth of a second; `_serve` follows.

        Wait longer only in `_serve`, which a command ends. An exception ends the thread.
        """

    @abstractmethod
    def _shut(self, client: C) -> None:
        """Close the client. `_serve` and `_await_on_loop` still run commands here."""

    def _crashed(self, error: BrokerError) -> None:
        """The thread has failed. Called once, on the loop."""

    def _serve(self, client: C, wait: float | None = 0.0) -> None:
        """Run the pending commands; wait at most `wait` seconds for the first, without limit if None."""
        inbox = self._inbox
        try:
            command = inbox.get_nowait() if wait == 0.0 else inbox.get(timeout=wait)
            while True:
                self._run_command(command, client)
                command = inbox.get_nowait()
        except Empty:
            return

    def _await_on_loop(
        self, client: C, work: Callable[[], Coroutine[Any, Any, object]], timeout: float
    ) -> BaseException | bool:
        """Run a coroutine on the loop, and commands until it has finished.

        Returns True if it succeeded, its exception if it failed, and False if it was cancelled, did not finish within
        `timeout` seconds, or the loop is closed. A timeout does not cancel it.
        """
        outcome: list[BaseException | bool] = []

        def over(task: asyncio.Task[object]) -> None:
            outcome.append(False if task.cancelled() else task.exception() or True)
            self._wake()

        def begin() -> None:
            self._loop.create_task(work(), name=f"{self._name}-on-loop").add_done_callback(over)

        deadline = monotonic() + timeout
        if not self._post(begin):
            return False
        while not outcome:
            left = deadline - monotonic()
            if left <= 0:
                return False
            self._serve(client, left)
        return outcome[0]

    def _post(self, function: Callable[..., object], *args: Any) -> bool:
        """Call this on the loop; False if the loop is closed. Never raises."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def _resolve(self, waiter: asyncio.Future[R], result: R) -> None:
        """Set the result of a future, from any thread."""
        self._post(_complete, waiter, result, None)

    def _wake(self) -> None:
        """End a wait in `_serve`, from any thread."""
        self._inbox.put(_WAKE)

    def _run_command(self, command: Command, client: C) -> None:
        """Run a function; a subclass runs its own kinds of commands."""
        assert isinstance(command, _Function)
        if command.cancelled:
            return
        try:
            result = command.function(client)
        except Exception as error:
            if command.waiter is None:
                logger.warning("%s: a command failed: %s", self._name, error)
            else:
                logger.debug("%s: a command failed", self._name, exc_info=error)
                _drop_frames(error)
                self._post(_complete, command.waiter, None, error)
            return
        if command.waiter is not None and not command.resolves_waiter:
            self._resolve(command.waiter, result)

    # -- inside --------------------------------------------------------------------------------------------

    def _put(self, command: Command) -> None:
        with self._gate:
            if not self._over:
                self._inbox.put(command)
                return
        raise self._ended_error()

    def _ended_error(self) -> BrokerError:
        return self._failure or Closed(f"{self._name} is closed")

    def _run(self) -> None:
        try:
            client = self._open()
        except BaseException as error:
            self._failure = _as_broker_error(self._name, "could not open its client", error)
            self._end()
            self._post(_complete, self._opened, None, self._failure)
            return
        self._post(_complete, self._opened, None, None)
        try:
            while not self._stopping:
                self._turn(client)
                self._serve(client)
        except BaseException as error:
            logger.error("%s failed", self._name, exc_info=error)
            _drop_frames(error)
            self._failure = _as_broker_error(self._name, "failed", error)
        try:
            self._serve(client)
            self._shut(client)
        except BaseException as error:
            logger.warning("%s did not close its client cleanly: %s", self._name, error)
        finally:
            self._rebootstrapper.unwatch()
            # Some clients close when their last reference goes: here, before `stop` returns.
            del client
            self._end(self._failure)

    def _end(self, crash: BrokerError | None = None) -> None:
        """Fail the commands that did not run; no command can be submitted after this.

        :param crash: the error that ended the thread after its client was open.
        """
        with self._gate:
            self._over = True
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                break
            if command.waiter is not None:
                self._post(_complete, command.waiter, None, self._ended_error())
        if crash is not None:
            self._post(self._crashed, crash)
        self._post(_complete, self._ended, None, None)


def _complete(waiter: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(result)
    else:
        waiter.set_exception(error)


def _drop_frames(error: BaseException) -> None:
    """Remove the frames from an error that goes to the loop: they refer to the client, and would keep it open."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        found.__traceback__ = None
        found = found.__context__ if found.__cause__ is None else found.__cause__


def _as_broker_error(name: str, what: str, error: BaseException) -> BrokerError:
    if isinstance(error, BrokerError):
        return error
    return BackendError(f"{name} {what}: {error!r}", native=error)


K = TypeVar("K")

_POLL_SECONDS: Final = 1.0


class AdminThread(OwnerThread[AdminClient]):
    """Owns an admin client and polls it for its callbacks.

    :ivar pending: requests that wait for an answer; the owner counts them.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__("broker-kafka-admin", Rebootstrapper(config))
        self._config = config
        self.pending = 0

    async def outcomes(
        self, start: Callable[[AdminClient], Mapping[K, Future[R]]], what: str
    ) -> dict[K, R | BrokerError]:
        """Start a request and wait for each of its answers; a failed one is a BrokerError in the result.

        :raises BrokerError: the request could not be started.
        """
        try:
            futures = await self.call(start)
        except (KafkaException, ValueError, TypeError) as error:
            raise translate(error, what) from error
        waiting = {key: asyncio.wrap_future(future) for key, future in futures.items()}
        results = await asyncio.gather(*waiting.values(), return_exceptions=True)
        return {
            key: translate(result, what) if isinstance(result, BaseException) else result
            for key, result in zip(waiting, results, strict=True)
        }

    def _open(self) -> AdminClient:
        try:
            client = AdminClient(with_oauth_token(self._config))
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error, "Making a client", self._config) from error
        self._rebootstrapper.watch(client)
        return client

    def _turn(self, client: AdminClient) -> None:
        client.poll(0)
        self._serve(client, _POLL_SECONDS)

    def _shut(self, client: AdminClient) -> None:
        client.poll(0)
