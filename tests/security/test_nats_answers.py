"""What a hostile NATS server says: errors of this library, and no connection that is lost for good."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import nats
import pytest
from nats.aio.client import Client

import broker
from broker.errors import BackendError, BrokerError, TopicNotFound
from broker.hooks import Hooks
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.connection import Connection
from broker_jetstream.names import release_counts_subject, stream_name
from broker_jetstream.release_counts import counts_from_runs
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import until
from tests.security.hostile_nats import HostileNats
from tests.servers.nats import NatsServer, shared_server

GREETINGS = {
    "nothing": b"\r\n",
    "no content": b"INFO\r\n",
    "no object": b"INFO []\r\n",
    "no JSON": b"INFO {\xff}\r\n",
    "deep JSON": b'INFO {"x": ' + b"[" * 15_000 + b"\r\n",
    "too long": b"INFO {" + b" " * 200_000 + b"}\r\n",
    "a number as version": b'INFO {"version": 5}\r\n',
    "text as size": b'INFO {"max_payload": "big"}\r\n',
    "a huge size": b'INFO {"max_payload": 1' + b"0" * 400 + b"}\r\n",
    "a number as nonce": b'INFO {"nonce": 5, "auth_required": true}\r\n',
    "a number as server": b'INFO {"connect_urls": [5]}\r\n',
    "no list of servers": b'INFO {"connect_urls": 5}\r\n',
    "an error": b"-ERR\r\n",
    "an answer too many": b"INFO {}\r\n-ERR\r\n",
    "garbage after it": b"INFO {}\r\n-ERR \xff\r\n",
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS.keys())
async def test_a_greeting_is_refused_with_an_error_of_this_library(greeting: bytes) -> None:
    async with HostileNats(greeting=greeting) as server:
        with pytest.raises(BrokerError):
            async with broker.connect(f"nats://127.0.0.1:{server.port}?connect_timeout=5&request_timeout=0.1"):
                pass


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "public"])
@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS.keys())
async def test_a_connection_survives_a_greeting_at_a_reconnect(greeting: bytes, fast: bool) -> None:
    async with HostileNats() as server:
        settings = JetStreamSettings(
            servers=(f"nats://ann:x@127.0.0.1:{server.port}",), reconnect_wait=0.01, fast_path=fast
        )
        connection = Connection(settings, Hooks())
        await connection.open()
        try:
            server.greeting = greeting
            greeted = server.greeted
            server.cut()
            await until(lambda: server.greeted > greeted + 1)
            server.greeting = None
            await connection.wait_connected(10)
        finally:
            await connection.close()


@pytest.mark.parametrize("name", ["host:99999", "host:port", "[", "", "host", "[::1", "\x00:4222"])
async def test_a_server_named_by_a_server_may_be_unusable(name: str) -> None:
    async with HostileNats(connect_urls=[name], version="no version") as server:
        settings = JetStreamSettings(servers=(f"nats://127.0.0.1:{server.port}",), reconnect_wait=0.01)
        connection = Connection(settings, Hooks())
        await connection.open()
        try:
            for epoch in (2, 3, 4):
                server.cut()
                await until(partial(_has_come_up, connection, epoch))
        finally:
            await connection.close()


def _has_come_up(connection: Connection, epoch: int) -> bool:
    return connection.epoch == epoch


LINES = {
    "no JSON": b"INFO {\r\n",
    "no server": b'INFO {"connect_urls": ["["]}\r\n',
    "no text": b"-ERR \xff\r\n",
    "no message": b"MSG a\r\n",
    "a huge message": b"MSG a 1 99999999999\r\n",
    "a huge message with headers": b"HMSG a 1 12 99999999999\r\n",
    "a huge message of no subscription": b"MSG a 77 99999999999\r\n",
    "a huge number as size": b"MSG a 1 " + b"9" * 5000 + b"\r\n",
    "a negative size": b"MSG a 1 -19\r\n",
    "no end": b"INFO " + b"x" * (2 << 20),
}


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "public"])
@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
async def test_a_connection_survives_a_line(line: bytes, fast: bool) -> None:
    async with HostileNats() as server:
        # No ping ends the connection.
        settings = JetStreamSettings(
            servers=(f"nats://127.0.0.1:{server.port}",), reconnect_wait=0.01, ping_interval=1000, fast_path=fast
        )
        connection = Connection(settings, Hooks())
        await connection.open()
        try:
            server.say(line)
            await until(lambda: connection.epoch > 1)
            await connection.wait_connected(10)
        finally:
            await connection.close()


DEEP = b'{"x": ' + b"[" * 100_000
ANSWERS = {
    "no JSON": b"{\xff",
    "deep JSON": DEEP,
    "no object": b"[]",
    "no number as code": b'{"error": {"code": [], "err_code": "x"}}',
    "no object as error": b'{"error": "x"}',
}


@pytest.fixture
def server() -> NatsServer:
    return shared_server()


@pytest.fixture
def topic() -> str:
    return f"topic.{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def neighbour(server: NatsServer) -> AsyncIterator[Client]:
    """Another client of the account."""
    client = await nats.connect(server.url)
    yield client
    await client.close()


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_answer_of_the_api_is_refused_with_an_error_of_this_library(answer: bytes) -> None:
    async with HostileNats() as hostile:
        hostile.answer = answer
        with pytest.raises(BrokerError):
            async with broker.connect(f"nats://127.0.0.1:{hostile.port}"):
                pass


@pytest.mark.parametrize("answer", [*ANSWERS.values(), b"{}"], ids=[*ANSWERS.keys(), "an empty object"])
async def test_a_forged_answer_to_a_publish_is_an_error_of_that_message(
    server: NatsServer, neighbour: Client, topic: str, answer: bytes
) -> None:
    async with broker.connect(server.url) as bus:
        await bus.admin.ensure_topic(topic)
        await bus.topic(topic).publish(b"first", key="a")
        # Whoever may subscribe to the subjects of a topic may answer, here alone.
        await neighbour.jetstream().delete_stream(stream_name(topic))

        async def forge(message: Any) -> None:
            await message.respond(answer)

        await neighbour.subscribe(f"{stream_name(topic)}.>", cb=forge)
        await neighbour.flush()
        # The server may answer that there are no responders before it registers the neighbour.
        with pytest.raises((BackendError, TopicNotFound)):
            await bus.topic(topic).publish(b"second", key="a")


@pytest.mark.parametrize(
    "announcement",
    [DEEP, b"{\xff", b"[]", b'{"id": 5}', b""],
    ids=["deep JSON", "no JSON", "no object", "a number as id", "nothing"],
)
async def test_a_forged_announcement_does_not_end_the_connection(
    server: NatsServer, neighbour: Client, topic: str, announcement: bytes
) -> None:
    hooks = Hooks()
    backend = JetStreamBackend(JetStreamSettings(servers=(server.url,)), hooks)
    async with broker.Bus(backend, hooks) as bus:
        await bus.admin.ensure_topic(topic)
        async with bus.records(topic, group="audit") as log:
            await bus.topic(topic).publish(b"first")
            assert (await anext(aiter(log))).data == b"first"
            await neighbour.publish(f"anybroker.group.{stream_name(topic)}.audit", announcement)
            await neighbour.flush()
            await bus.topic(topic).publish(b"second")
            assert (await anext(aiter(log))).data == b"second"
        assert backend._connection.epoch == 1


async def test_forged_answers_about_releases_keep_no_message_from_being_released(
    server: NatsServer, neighbour: Client, topic: str
) -> None:
    async def forge(message: Any) -> None:
        await message.respond(b"{}")

    async with broker.connect(server.url) as bus:
        await bus.admin.ensure_topic(topic)
        await bus.topic(topic).publish_batch([b"%d" % number for number in range(20)])
        # Either the neighbour or the stream answers first.
        await neighbour.subscribe(release_counts_subject("*", "*"), cb=forge)
        await neighbour.flush()
        for _ in range(3):
            # The close releases all 20.
            async with bus.messages(topic, subscription="billing") as inbox:
                await inbox.next_message(timeout=10)
        async with bus.messages(topic, subscription="billing") as inbox:
            found = [message for _ in range(20) if (message := await inbox.next_message(timeout=10))]
        assert len({message.data for message in found}) == 20


def test_forged_release_counts_take_bounded_work() -> None:
    half = 1 << 17
    counts = counts_from_runs([(0, half, 1), (0, half, 2), (0, half, 3), (0, -5, 4), (1 << 60, 1 << 62, 5)])
    # The runs share one budget, so that one stored message cannot occupy the event loop for hours.
    assert counts[0] == 2 and len(counts) == half
