"""The thread that owns a client: commands in order, results on the loop, an end that every caller is notified of."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from broker.errors import BackendError, BrokerError, Closed, ConnectionFailed
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import OwnerThread


class Client:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.closed = False
        self.thread = threading.get_ident()


class Owner(OwnerThread[Client]):
    """:param blocking: what a turn waits for, if anything."""

    def __init__(self, *, unopened: Exception | None = None) -> None:
        super().__init__("owner of a test", Rebootstrapper({}))
        self.unopened = unopened
        self.breaking: Exception | None = None
        self.at_the_end: list[object] = []
        self.crash: BrokerError | None = None
        self.has_crashed = asyncio.Event()
        self.hold = threading.Event()
        self.hold.set()

    def _open(self) -> Client:
        if self.unopened is not None:
            raise self.unopened
        return Client()

    def _turn(self, client: Client) -> None:
        if self.breaking is not None:
            raise self.breaking
        self._serve(client, 0.1)

    def _shut(self, client: Client) -> None:
        async def look() -> None:
            self.at_the_end.append(await self.call(lambda client: client.thread))

        self.at_the_end.append(self._await_on_loop(client, look, 5))
        self.hold.wait(60)
        client.closed = True

    def _crashed(self, error: BrokerError) -> None:
        self.crash = error
        self.has_crashed.set()


async def test_commands_run_in_the_thread_in_order() -> None:
    owner = Owner()
    await owner.start()
    for number in range(100):
        owner.submit(lambda client, number=number: client.seen.append(number))
    client = await owner.call(lambda client: client)
    assert client.seen == list(range(100))
    assert client.thread != threading.get_ident()
    assert await owner.call(lambda _: threading.get_ident()) == client.thread
    assert await owner.stop(5)
    assert client.closed


async def test_the_caller_gets_the_exception_of_a_command() -> None:
    owner = Owner()
    await owner.start()

    def fail(client: Client) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await owner.call(fail)
    owner.submit(fail)
    assert await owner.call(lambda client: client.closed) is False
    await owner.stop(5)


async def test_a_command_may_be_answered_later() -> None:
    owner = Owner()
    await owner.start()
    waiting: list[asyncio.Future[str]] = []

    def keep(client: Client, waiter: asyncio.Future[str]) -> None:
        waiting.append(waiter)

    pending = asyncio.ensure_future(owner.call_with_future(keep))
    await owner.call(lambda client: client)
    assert not pending.done()
    owner.submit(lambda client: owner._resolve(waiting[0], "now"))
    assert await pending == "now"

    def fail(client: Client, waiter: asyncio.Future[str]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await owner.call_with_future(fail)
    await owner.stop(5)


async def test_pending_calls_fail_when_the_thread_ends() -> None:
    owner = Owner()
    await owner.start()
    owner.hold.clear()
    assert not await owner.stop(0)
    while len(owner.at_the_end) < 2:
        await asyncio.sleep(0.01)
    pending = asyncio.ensure_future(owner.call_with_future(lambda client, waiter: None))
    await asyncio.sleep(0)
    owner.hold.set()
    with pytest.raises(Closed):
        await pending


async def test_a_cancelled_pending_command_does_not_run() -> None:
    owner = Owner()
    await owner.start()
    gate = threading.Event()
    owner.submit(lambda client: gate.wait(5))
    call = asyncio.ensure_future(owner.call(lambda client: client.seen.append(1)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    assert await owner.call(lambda client: client.seen) == []
    await owner.stop(5)


async def test_start_raises_the_error_of_open() -> None:
    owner = Owner(unopened=ConnectionFailed("no broker"))
    with pytest.raises(ConnectionFailed, match="no broker"):
        await owner.start()
    with pytest.raises(ConnectionFailed):
        await owner.call(lambda client: client)
    assert await owner.stop(5)
    assert owner.crash is None


async def test_a_crash_fails_pending_and_later_calls() -> None:
    owner = Owner()
    await owner.start()
    gate = threading.Event()
    owner.submit(lambda client: gate.wait(5))
    owner.submit(lambda client: setattr(owner, "breaking", ValueError("broken")))
    waiting = asyncio.ensure_future(owner.call(lambda client: client.seen))
    await asyncio.sleep(0)
    gate.set()
    # It was given before the crash, so it may have been carried out.
    await asyncio.wait({waiting})
    # One that is stopped before its next turn has not crashed.
    await asyncio.wait_for(owner.has_crashed.wait(), 60)
    assert await owner.stop(5)
    with pytest.raises(BackendError, match="broken") as caught:
        await owner.call(lambda client: client)
    assert isinstance(caught.value.native, ValueError)
    assert owner.crash is caught.value
    assert owner.failure is caught.value


async def test_after_stop_calls_raise_closed_and_stop_may_be_repeated() -> None:
    owner = Owner()
    await owner.start()
    assert await owner.stop(5)
    assert await owner.stop(5)
    with pytest.raises(Closed):
        await owner.call(lambda client: client)
    with pytest.raises(Closed):
        owner.submit(lambda client: client)


async def test_a_thread_that_was_never_started_stops() -> None:
    assert await Owner().stop(1)


async def test_commands_are_served_while_the_thread_waits_for_the_loop() -> None:
    owner = Owner()
    await owner.start()
    client = await owner.call(lambda client: client)
    assert await owner.stop(5)
    assert owner.at_the_end == [client.thread, True]


async def test_stop_does_not_wait_for_a_client_that_hangs() -> None:
    owner = Owner()
    await owner.start()
    owner.hold.clear()
    begun = asyncio.get_running_loop().time()
    assert not await owner.stop(0.2)
    assert asyncio.get_running_loop().time() - begun < 30
    owner.hold.set()
    assert await owner.stop(5)


async def test_an_error_keeps_no_reference_to_the_client() -> None:
    owner = Owner()
    await owner.start()

    def fail(client: Client) -> None:
        try:
            raise ValueError(client.thread)
        except ValueError as error:
            raise ConnectionFailed("gone") from error

    with pytest.raises(ConnectionFailed) as kept:
        await owner.call(fail)
    client = weakref.ref(await owner.call(lambda client: client))
    assert await owner.stop(5)
    # A client that closes with its last reference was closed in the thread, before the caller got the error.
    assert client() is None
    assert isinstance(kept.value.__cause__, ValueError)
