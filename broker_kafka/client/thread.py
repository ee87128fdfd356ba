"""`OwnerThread`: the one thread that makes, uses and closes one client of the library.

*Concurrency.* The event loop gives commands in and never touches the client; the thread runs them between two turns, in
the order in which they were given, and also while it waits for the loop (`_await_on_loop`), which is how commits work
inside of a rebalance callback. Results and batches go to the loop by `_post`: one wake-up each, so a batch is one of
them, never a message. *Cancellation.* A cancelled `call` is not run if it had not begun; what has begun goes on, and
its result is dropped. *Failure.* An exception of a command is its caller's. One of a turn ends the thread: everybody
who waits gets it as a BrokerError, and so does every later call; `_crashed` tells the subclass, on the loop. `stop`
is bounded: a client that does not close in time is left to its daemon thread.

`AdminThread`: an admin client of the library in a thread of its own, and the answers to what it was asked.

*Concurrency, cancellation, failure.* As `OwnerThread`; a cancelled request goes on at the brokers.
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
from broker_kafka.client.rebootstrap import Lifeline
from broker_kafka.config.oauth import with_token
from broker_kafka.errors import configuration_error, translate

__all__ = ["AdminThread", "Command", "OwnerThread"]


C = TypeVar("C")
R = TypeVar("R")


class Command:
    """What the thread is to run, and who waits for the result; None is nobody."""

    __slots__ = ("dropped", "function", "later", "waiter")

    def __init__(
        self, function: Callable[[Any], Any], waiter: asyncio.Future[Any] | None, *, later: bool = False
    ) -> None:
        self.function = function
        self.waiter = waiter
        self.later = later
        """Whether the function itself sees to the answer."""
        self.dropped = False


_WAKE: Final = Command(lambda client: None, None)


class OwnerThread(ABC, Generic[C]):
    """A subclass says how the client is opened, what a turn is, and how the client is closed.

    Make it, and call all its public methods, on the event loop.

    :param name: of the thread; it appears in errors and in dumps.
    :param lifeline: of the client. Who opens a client has it held, and who closes one has it let go before; at the end
        of the thread it is let go in any case.
    """

    def __init__(self, name: str, lifeline: Lifeline) -> None:
        self._name = name
        self._lifeline = lifeline
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._gate = Lock()
        """Held while a command is put in, so that none is put in after the last was answered."""
        self._over = False
        self._stopping = False
        self._failure: BrokerError | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    # -- for the loop --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread, and wait until its client is open.

        :raises BrokerError: it could not be opened.
        """
        self._thread.start()
        await asyncio.shield(self._opened)

    async def call(self, function: Callable[[C], R]) -> R:
        """Run `function(client)` in the thread between two turns; its result, or its exception.

        :raises Closed: the thread was stopped.
        :raises BrokerError: the thread has failed.
        """
        waiter: asyncio.Future[R] = self._loop.create_future()
        command = Command(function, waiter)
        self._put(command)
        try:
            return await waiter
        except asyncio.CancelledError:
            command.dropped = True
            raise

    async def ask(self, function: Callable[[C, asyncio.Future[R]], object]) -> R:
        """Run `function(client, future)` in the thread; what it has given to the future by `_give`, then or later.

        It is run even if the caller is cancelled. :raises BrokerError: as `call`.
        """
        waiter: asyncio.Future[R] = self._loop.create_future()
        self._put(Command(lambda client: function(client, waiter), waiter, later=True))
        return await waiter

    def tell(self, function: Callable[[C], object]) -> None:
        """Run `function(client)` in the thread and wait for nothing; an exception of it is logged.

        :raises Closed: the thread was stopped.
        :raises BrokerError: the thread has failed.
        """
        self._put(Command(function, None))

    async def stop(self, timeout: float) -> bool:
        """End the thread after the commands that were given, and close its client; False if it took too long.

        It may be called again, and after a failure.
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
        """Why the thread has ended by itself, if it has."""
        return self._failure

    # -- for the subclass; these run in the thread ---------------------------------------------------------

    @abstractmethod
    def _open(self) -> C:
        """Make the client. An exception of it is raised by `start`, a BrokerError as it is."""

    @abstractmethod
    def _turn(self, client: C) -> None:
        """One short piece of work, at most a tenth of a second; then `_serve` is called by the base.

        One that may wait longer waits in `_serve`, which a command ends. An exception ends the thread.
        """

    @abstractmethod
    def _shut(self, client: C) -> None:
        """Close the client. Commands can still be served here by `_serve` and `_await_on_loop`."""

    def _crashed(self, error: BrokerError) -> None:
        """The thread has failed; called once, on the loop."""

    def _serve(self, client: C, wait: float | None = 0.0) -> None:
        """Run the commands that are there; wait at most so many seconds for the first, None being for ever."""
        inbox = self._inbox
        try:
            command = inbox.get_nowait() if wait == 0.0 else inbox.get(timeout=wait)
            while True:
                self._carry_out(command, client)
                command = inbox.get_nowait()
        except Empty:
            return

    def _await_on_loop(
        self, client: C, work: Callable[[], Coroutine[Any, Any, object]], timeout: float
    ) -> BaseException | bool:
        """Run a coroutine on the loop and serve commands until it is done.

        True when it is; False if it was not after `timeout` seconds, was cancelled, or nobody runs the loop any more;
        its exception if it failed. It is not cancelled here: it has to mind the time itself.
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
        """Have the loop call this; False if there is no loop any more. It never raises."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def _give(self, waiter: asyncio.Future[R], result: R) -> None:
        """Answer who waits for this; from any thread."""
        self._post(_answer, waiter, result, None)

    def _wake(self) -> None:
        """End a wait in `_serve`; from any thread."""
        self._inbox.put(_WAKE)

    def _carry_out(self, command: Command, client: C) -> None:
        """Run a command and answer who waits for it."""
        if command.dropped:
            return
        try:
            result = command.function(client)
        except Exception as error:
            if command.waiter is None:
                logger.warning("%s: a command failed: %s", self._name, error)
            else:
                logger.debug("%s: a command failed", self._name, exc_info=error)
                _let_go(error)
                self._post(_answer, command.waiter, None, error)
            return
        if command.waiter is not None and not command.later:
            self._give(command.waiter, result)

    # -- inside --------------------------------------------------------------------------------------------

    def _put(self, command: Command) -> None:
        with self._gate:
            if not self._over:
                self._inbox.put(command)
                return
        raise self._refusal()

    def _refusal(self) -> BrokerError:
        return self._failure or Closed(f"{self._name} is closed")

    def _run(self) -> None:
        try:
            client = self._open()
        except BaseException as error:
            self._failure = _as_broker_error(self._name, "could not open its client", error)
            self._end()
            self._post(_answer, self._opened, None, self._failure)
            return
        self._post(_answer, self._opened, None, None)
        try:
            while not self._stopping:
                self._turn(client)
                self._serve(client)
        except BaseException as error:
            logger.error("%s failed", self._name, exc_info=error)
            _let_go(error)
            self._failure = _as_broker_error(self._name, "failed", error)
        try:
            self._serve(client)
            self._shut(client)
        except BaseException as error:
            logger.warning("%s did not close its client cleanly: %s", self._name, error)
        finally:
            self._lifeline.let_go()
            # Some clients close by being let go of: here, and before anybody is told that it is done.
            del client
            self._end()

    def _end(self) -> None:
        """Answer everybody who still waits; nobody can be added after."""
        with self._gate:
            self._over = True
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                break
            if command.waiter is not None:
                self._post(_answer, command.waiter, None, self._refusal())
        if self._failure is not None and self._opened.done():
            self._post(self._crashed, self._failure)
        self._post(_answer, self._ended, None, None)


def _answer(waiter: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(result)
    else:
        waiter.set_exception(error)


def _let_go(error: BaseException) -> None:
    """Have an error that is going to the loop hold no client: whoever keeps it would keep that open, and close it."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        # Its frames hold their callers, and these the client.
        found.__traceback__ = None
        found = found.__context__ if found.__cause__ is None else found.__cause__


def _as_broker_error(name: str, what: str, error: BaseException) -> BrokerError:
    if isinstance(error, BrokerError):
        return error
    return BackendError(f"{name} {what}: {error!r}", native=error)


K = TypeVar("K")

_IDLE: Final = 1.0


class AdminThread(OwnerThread[AdminClient]):
    """Owns the admin client, and polls it now and then for its callbacks.

    :ivar asking: how many requests wait for an answer by this client.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__("broker-kafka-admin", Lifeline(config))
        self._config = config
        self.asking = 0

    async def outcomes(
        self, start: Callable[[AdminClient], Mapping[K, Future[R]]], what: str
    ) -> dict[K, R | BrokerError]:
        """Start a request and wait for the answer of each item; an error is in its place.

        :raises BrokerError: it could not be started.
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
            client = AdminClient(with_token(self._config))
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error, "Making a client", self._config) from error
        self._lifeline.hold(client)
        return client

    def _turn(self, client: AdminClient) -> None:
        client.poll(0)
        self._serve(client, _IDLE)

    def _shut(self, client: AdminClient) -> None:
        client.poll(0)
