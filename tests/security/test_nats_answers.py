"""What a hostile NATS server says: errors of this library, and no connection that is lost for good."""

from __future__ import annotations

from functools import partial

import pytest

import broker
from broker.errors import BrokerError
from broker.hooks import Hooks
from broker_jetstream.connection import Connection
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import until
from tests.security.hostile_nats import HostileNats

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


@pytest.mark.parametrize("line", [b"INFO {\r\n", b'INFO {"connect_urls": ["["]}\r\n', b"-ERR \xff\r\n", b"MSG a\r\n"])
async def test_a_connection_survives_a_line(line: bytes) -> None:
    async with HostileNats() as server:
        settings = JetStreamSettings(servers=(f"nats://127.0.0.1:{server.port}",), reconnect_wait=0.01)
        connection = Connection(settings, Hooks())
        await connection.open()
        try:
            server.say(line)
            await until(lambda: connection.epoch > 1)
            await connection.wait_connected(10)
        finally:
            await connection.close()
