"""The connection: events, repeated requests, a client that gives up, credentials that change."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest
from pydantic import SecretStr

from broker.errors import AuthenticationFailed, BrokerError, Closed, ConnectionFailed
from broker.hooks import Connected, Disconnected, Event, Hooks
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.conftest import Open
from tests.jetstream.support import make_topic, publish, receive, settle_all, subscribe, until
from tests.servers.nats import NatsServer
from tests.servers.proxy import Proxy


async def test_connects_and_disconnects_are_reported(
    open_backend: Open, nats_server: NatsServer, events: list[Event]
) -> None:
    with Proxy(nats_server.port) as proxy:
        backend = await open_backend(servers=(proxy.url,), reconnect_wait=0.05)
        assert events == [Connected(server=proxy.url, again=False)]
        proxy.cut()
        await until(lambda: Connected(server=proxy.url, again=True) in events)
        assert [type(event) for event in events] == [Connected, Disconnected, Connected]
        assert await backend.check_health() < 60
        await backend.close()


@pytest.mark.deep
async def test_attempts_without_a_greeting_leak_no_socket(
    open_backend: Open, nats_server: NatsServer, events: list[Event]
) -> None:
    """Python warns of a leaked socket, and a warning fails the test."""
    with Proxy(nats_server.port) as proxy:
        backend = await open_backend(servers=(proxy.url,), reconnect_wait=0.05, connect_timeout=1.0)
        proxy.hold()
        proxy.cut()
        failures: list[BaseException] = []

        def failed() -> bool:
            error = backend._connection.last_error
            if error is not None and error not in failures:
                failures.append(error)
            return len(failures) > 2

        await until(failed)
        proxy.hold(False)
        await until(lambda: Connected(server=proxy.url, again=True) in events)
        assert [type(event) for event in events] == [Connected, Disconnected, Connected]
        await backend.close()
    gc.collect()


async def test_a_request_lost_with_the_connection_is_repeated(
    open_backend: Open, nats_server: NatsServer, topic: str
) -> None:
    with Proxy(nats_server.port) as proxy:
        backend = await open_backend(servers=(proxy.url,), reconnect_wait=0.05)
        proxy.hold()
        creating = asyncio.create_task(make_topic(backend, topic))
        await until(lambda: bool(backend._connection.inbox.waiting))
        proxy.cut()
        proxy.hold(False)
        await creating
        assert topic in await backend.admin().list_topics()
        await backend.close()


async def test_an_ended_wait_for_the_connection_leaves_no_waiter(backend: JetStreamBackend) -> None:
    connection = backend._connection
    connection.connected = False  # as between a break and the reconnect
    with pytest.raises(ConnectionFailed):
        await connection.wait_connected(0.01)
    assert not connection._waiting
    waiting = asyncio.create_task(connection.wait_connected(60))
    await until(lambda: bool(connection._waiting))
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled() and not connection._waiting
    connection.connected = True


async def test_a_client_that_gave_up_is_replaced(open_backend: Open, topic: str, events: list[Event]) -> None:
    backend = await open_backend(reconnect_wait=0.05)
    await make_topic(backend, topic)
    source = await subscribe(backend, topic)
    transport = backend._connection._transport
    assert transport is not None
    # What nats-py does when the server ends a connection with an error, for instance for expired credentials.
    await transport.client._process_err("'user authentication expired'")
    await until(lambda: sum(isinstance(event, Connected) for event in events) == 2)
    assert backend._connection._transport is not transport
    await publish(backend, topic, OutboundMessage(b"x"))
    found = await receive(source, 1)
    assert await source.settle(settle_all(found, Outcome.ACK)) == [None]


@pytest.mark.deep
async def test_credentials_refused_at_a_reconnect_are_reported(topic: str) -> None:
    with NatsServer.with_token("right") as server:
        settings = JetStreamSettings(servers=(server.url,), token=SecretStr("right"), reconnect_wait=0.05)
        backend = JetStreamBackend(settings, Hooks())
        await backend.open()
        try:
            await make_topic(backend, topic)
            source = await subscribe(backend, topic)
            server._extra = server._extra.replace("right", "changed")
            await asyncio.to_thread(server.restart)
            await until(lambda: isinstance(backend._connection.down_error(), AuthenticationFailed))
            with pytest.raises(AuthenticationFailed):
                await receive(source, 1, 1)
            with pytest.raises(AuthenticationFailed):
                await backend.admin().list_topics()
            server._extra = server._extra.replace("changed", "right")
            await asyncio.to_thread(server.restart)
            await publish(backend, topic, OutboundMessage(b"x"))
            assert len(await receive(source, 1)) == 1
        finally:
            await backend.close()


async def test_every_call_after_close_raises_closed(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    target, source, reader = backend.publish_target(topic), await subscribe(backend, topic), backend.log_reader()
    await backend.close()
    await backend.close()
    with pytest.raises(Closed):
        await target.publish([OutboundMessage(b"x")])
    with pytest.raises(Closed):
        await source.fetch(1, 1, 1)
    with pytest.raises(Closed):
        await source.settle([])
    with pytest.raises(Closed):
        await reader.bounds(topic)
    with pytest.raises(Closed):
        await backend.admin().list_topics()


async def test_close_during_publishes_and_a_fetch(open_backend: Open, topic: str) -> None:
    backend = await open_backend()
    await make_topic(backend, topic)
    source = await subscribe(backend, topic)
    target = backend.publish_target(topic)
    publishing = [asyncio.create_task(target.publish([OutboundMessage(b"x")] * 1000)) for _ in range(5)]
    fetching = asyncio.create_task(source.fetch(10, 1 << 20, 30))
    await until(lambda: bool(target._unconfirmed._batches))  # pyright: ignore[reportAttributeAccessIssue]
    begin = time.monotonic()
    await backend.close()
    assert time.monotonic() - begin < 20  # the fetch may wait for 30 seconds
    for task in (*publishing, fetching):
        done, _ = await asyncio.wait((task,), timeout=60)
        assert done
        error = task.exception()
        assert error is None or isinstance(error, BrokerError)


async def test_a_cancelled_close_leaks_no_socket(open_backend: Open, nats_server: NatsServer) -> None:
    """As at the end of a loop. Python warns of a leaked socket, and a warning fails the test."""
    with Proxy(nats_server.port) as proxy:
        backend = await open_backend(servers=(proxy.url,))
        connection = backend._connection
        client: Any = connection._transport and connection._transport.client
        proxy.hold()
        closing = asyncio.create_task(backend.close())
        # The close waits here, because the server does not answer.
        await until(lambda: connection.closed and bool(client._pongs))
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert client.is_closed
    gc.collect()


async def test_an_idle_consumer_uses_almost_no_cpu(
    open_backend: Open, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await open_backend()
    await make_topic(backend, topic)
    source = await subscribe(backend, topic)
    await source.fetch(100, 1 << 20, 0.1)
    selector: Any = asyncio.get_running_loop()._selector  # pyright: ignore[reportAttributeAccessIssue]
    select = selector.select
    turns = 0

    def counted(timeout: float | None = None) -> Any:
        nonlocal turns
        turns += 1
        return select(timeout)

    monkeypatch.setattr(selector, "select", counted)
    for _ in range(4):
        assert await source.fetch(100, 1 << 20, 0.1) == []
    assert turns < 100, "the loop wakes up without a reason"


async def test_the_native_client_is_available_while_the_backend_is_open(nats_server: NatsServer, topic: str) -> None:
    backend = JetStreamBackend(JetStreamSettings(servers=(nats_server.url,)), Hooks())
    with pytest.raises(Closed):
        _ = backend.client
    await backend.open()
    await make_topic(backend, topic)
    await publish(backend, topic, OutboundMessage(b"x"))
    info = await backend.client.jetstream().stream_info(topic.replace(".", "="))
    assert info.state.messages == 1
    await backend.close()
    with pytest.raises(Closed):
        _ = backend.client
