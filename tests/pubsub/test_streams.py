"""Streaming pull: bounded even if the server ignores the bounds, and reopened after growing pauses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

import broker
from broker.driver.contract import MessageSubscription, Settlement
from broker.hooks import Event, Hooks
from broker.messages import Message, Outcome
from broker.testing.waiting import eventually, let_pass, take
from broker_pubsub import PubSubSettings
from broker_pubsub.connection import Connection
from broker_pubsub.messages import PubSubMessageSource
from broker_pubsub.receiving import Arrived, Failed, StreamPuller
from tests.pubsub.conftest import Connect
from tests.servers.proxy import Proxy
from tests.servers.pstest import shared_pstest
from tests.servers.pubsub import PubSubServer, shared_server

PATIENCE = 60.0
ANSWER = 100
"""Messages that the emulator puts into one answer at most."""


class Listener:
    def lost(self, messages: object) -> None:
        raise AssertionError("an unexpected loss")

    def expired(self, messages: object) -> None: ...

    def event(self, event: Event) -> None:
        pass


async def streamed(bus: broker.Bus, topic: str, bodies: Sequence[bytes], most: int) -> PubSubMessageSource:
    await bus.admin.ensure_subscription(topic, "readers")
    await bus.topic(topic).publish_batch(bodies)
    subscription = MessageSubscription(topic=topic, subscription="readers", max_outstanding=most)
    return await bus.backend.subscribe(subscription, Listener())  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("most", "most_bytes", "buffered"), [(10, 1 << 20, 10), (1000, 20_000, 20)], ids=["count", "bytes"]
)
async def test_the_buffer_is_bounded(connect: Connect, topic: str, most: int, most_bytes: int, buffered: int):
    bus = await connect("pull_mode=stream")
    wanted = {b"%d" % number + bytes(1000) for number in range(500)}
    source = await streamed(bus, topic, sorted(wanted), most)
    seen: list[Message[Any]] = list(await source.fetch(1, most_bytes, PATIENCE))
    await eventually(lambda: len(source._buffer) >= buffered - 1, PATIENCE)
    await let_pass(0.5)
    assert len(source._buffer) <= buffered + ANSWER
    async with asyncio.timeout(PATIENCE):
        while len({message.data for message in seen}) < 500:
            seen += await source.fetch(most, most_bytes, 1.0)
    assert {message.data for message in seen} == wanted
    assert len(seen) == 500
    await source.settle([Settlement(message, Outcome.ACK) for message in seen])
    await source.close()


@pytest.mark.deep
async def test_a_stream_that_was_not_read_for_long_is_reopened(connect: Connect, topic: str):
    bus = await connect("pull_mode=stream&lease_seconds=1")
    wanted = {b"%d" % number for number in range(500)}
    source = await streamed(bus, topic, sorted(wanted), 10)
    seen: list[Message[Any]] = list(await source.fetch(1, 1 << 20, PATIENCE))
    puller: StreamPuller = source._puller  # pyright: ignore[reportAssignmentType]
    await let_pass(6.0)
    assert not puller.pending
    # Messages in flight are redelivered, so each is acked on arrival.
    async with asyncio.timeout(3 * PATIENCE):
        while len({message.data for message in seen}) < 500:
            more = await source.fetch(10, 1 << 20, 1.0)
            seen += more
            assert await source.settle([Settlement(message, Outcome.ACK) for message in more]) == [None] * len(more)
    await source.close()


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(shared_server, id="emulator"),
        pytest.param(shared_pstest, id="pstest", marks=[pytest.mark.deep, pytest.mark.xdist_group("pstest")]),
    ],
)
async def test_messages_in_flight_at_close_are_released(
    connect: Connect, topic: str, start: Callable[[], PubSubServer]
):
    server = start()
    with Proxy(server.port) as proxy:
        bus, other = await connect(url=server.url), await connect(url=server.url)
        behind = await connect("pull_mode=stream", server.url.replace(server.host, f"127.0.0.1:{proxy.port}"))
        await bus.admin.ensure_topic(topic)
        source = await streamed(behind, topic, [b"first"], 100)
        (first,) = await source.fetch(1, 1 << 20, PATIENCE)
        await source.settle([Settlement(first, Outcome.ACK)])
        proxy.hold()
        await bus.topic(topic).publish(b"in flight")
        await eventually(lambda: proxy.answered, PATIENCE)
        closing = asyncio.create_task(source.close())
        await asyncio.sleep(0)
        proxy.hold(False)
        await closing
        async with other.messages(topic, subscription="readers") as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            assert message.data == b"in flight"
            await message.ack()
        # Otherwise its client would reconnect while the proxy ends.
        await behind.close()


class EndsStreams(grpc.GenericRpcHandler):
    """A server that ends each stream at once, and answers other calls with nothing."""

    def __init__(self) -> None:
        self.opened = 0

    def service(self, handler_call_details: Any) -> Any:
        if not handler_call_details.method.endswith("/StreamingPull"):
            return grpc.unary_unary_rpc_method_handler(self._answer)
        return grpc.stream_stream_rpc_method_handler(self._stream)

    async def _answer(self, request: bytes, context: Any) -> bytes:
        return b""

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.opened += 1
        return
        yield b""


@pytest.fixture
async def ended() -> AsyncIterator[tuple[EndsStreams, Connection]]:
    """A server that ends streams, and a connection to it."""
    service = EndsStreams()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = PubSubSettings.from_url(f"pubsub://anybroker-tests?emulator_host=127.0.0.1:{port}&reconnect_wait=0.2")
    connection = Connection(settings, Hooks())
    await connection.open()
    yield service, connection
    await connection.close()
    await server.stop(None)


def puller_on(connection: Connection, arrived: Arrived, failed: Failed) -> StreamPuller:
    where = (connection, "projects/tests/subscriptions/readers", "a subscription")
    return StreamPuller(*where, arrived, failed, lease=10, max_outstanding=10, full=lambda: False)


async def test_a_stream_that_ends_at_once_is_reopened_after_growing_pauses(ended: tuple[EndsStreams, Connection]):
    service, connection = ended

    def arrived(received: Sequence[Any], since: float | None = None) -> None:
        # As a waiting fetch does.
        puller.request(1, 1000)

    def failed(error: Exception) -> None:
        puller.request(1, 1000)

    puller = puller_on(connection, arrived, failed)
    puller.request(1, 1000)
    await let_pass(1.5)
    assert service.opened <= 4
    await eventually(lambda: service.opened >= 2, PATIENCE)
    await puller.close()


async def test_a_stream_that_breaks_is_reported_and_reopened(
    ended: tuple[EndsStreams, Connection], monkeypatch: pytest.MonkeyPatch
):
    _, connection = ended
    failures: list[Exception] = []

    def arrived(received: Sequence[Any], since: float | None = None) -> None: ...

    async def read_on(self: StreamPuller, stream: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(StreamPuller, "_read_on", read_on)
    puller = puller_on(connection, arrived, failures.append)
    for number in (1, 2):
        puller.request(1, 1000)
        await eventually(lambda number=number: len(failures) == number, PATIENCE)
    assert all(isinstance(error, broker.BrokerError) for error in failures)
    await puller.close()
