"""Headers of foreign clients: any message can be read, settled and forwarded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client

import broker
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.codec import (
    LogView,
    MessageView,
    NativeMessage,
    encode_headers,
    encode_id,
    header_lines,
    server_header,
)
from broker_jetstream.names import stream_name
from tests.jetstream.support import make_topic, put
from tests.servers.nats import NatsServer

NAMES = (
    "anybroker-key",
    "anybroker-key-64",
    "anybroker-time",
    "anybroker-null",
    "anybroker-id",
    "anybroker-attributes",
    "Nats-Msg-Id",
    "Nats-Sequence",
    "Nats-Stream",
    "Nats-Subject",
    "Nats-Time-Stamp",
    "Nats-Pin-Id",
    "Status",
    "Content-Type",
    "",
)
VALUES = (
    b"",
    b"!!!notbase64",
    b"anybroker-64:!!!",
    b"%ZZ=%FF&&&==",
    b"anybroker-x=1&=2&%ED%A0%80=3",
    b"9" * 5000,
    b"-1",
)
LINES = st.builds(
    lambda name, separator, value: name + separator + value,
    st.sampled_from([name.encode() for name in NAMES]) | st.binary(max_size=8),
    st.sampled_from([b": ", b":", b""]),
    st.sampled_from(VALUES) | st.binary(max_size=40),
)
BLOCKS = st.binary(max_size=200) | st.builds(
    lambda first, lines, end: first + b"".join(b"\r\n" + line for line in lines) + end,
    st.sampled_from([b"NATS/1.0", b"NATS/1.0 408 Timeout", b""]),
    st.lists(LINES, max_size=5),
    st.sampled_from([b"\r\n\r\n", b"\r\n", b""]),
)
APPENDED = (
    b"Nats-Stream: S\r\nNats-Subject: s.0\r\nNats-Sequence: 7\r\nNats-Time-Stamp: 2026-11-21T11:17:02.8Z\r\n"
    b"Nats-Pin-Id: pin\r\n\r\n"
)
ACK = b"$JS.ACK.orders.billing.3.42.7.1795258770448526345.5"


@given(BLOCKS)
@example(b"NATS/1.0\r\nanybroker-key-64: !!!notbase64\r\n\r\n")
@example(b"NATS/1.0\r\nanybroker-attributes: %ZZ=%FF&&&==\r\n\r\n")
@example(b"NATS/1.0\r\nanybroker-attributes: \xff\r\n\r\n")
@example(b"NATS/1.0\r\nanybroker-key: cut")
def test_any_header_block_can_be_read_and_forwarded(block: bytes) -> None:
    # The server appends to what the publisher wrote, whether that was ended or not.
    stored = block[:-2] + APPENDED
    for view, raw in (
        (MessageView(), NativeMessage(b"s.0", ACK, b"body", block)),
        (LogView(), NativeMessage(b"s.0", b"", b"body", stored)),
    ):
        shown: Any = raw
        attributes = view.attributes(shown)
        message = OutboundMessage(
            b"body",
            view.key(shown),
            attributes,
            id=view.id(shown),
            publish_time=view.publish_time(shown),
            native=view.native(shown),
        )
        assert view.broker_time(shown) is not None
        assert encode_headers(message, encode_id(message.id or ""), 0).endswith(b"\r\n\r\n")
        assert raw.headers is not None
    assert server_header(stored, b"\r\nNats-Sequence: ") == b"7"
    assert server_header(stored, b"\r\nNats-Pin-Id: ") == b"pin"
    assert isinstance(header_lines(block), list)


@pytest.fixture
async def foreign(nats_server: NatsServer) -> AsyncIterator[Client]:
    client = await nats.connect(nats_server.url)
    yield client
    await client.close()


BAD = {
    "key": b"NATS/1.0\r\nanybroker-key-64: !!!notbase64\r\n\r\n",
    "attributes": b"NATS/1.0\r\nanybroker-attributes: %ZZ=%FF&&&==\r\n\r\n",
    "server's own": b"NATS/1.0\r\nNats-Sequence: 99\r\nNats-Time-Stamp: bad\r\nNats-Pin-Id: mine\r\n\r\n",
    "a status": b"NATS/1.0 408 Request Timeout\r\n\r\n",
    "no end": b"NATS/1.0\r\nanybroker-key: ab",
}


@pytest.mark.parametrize("block", BAD.values(), ids=BAD.keys())
async def test_a_message_with_malformed_headers_blocks_no_consumer(
    backend: JetStreamBackend, nats_server: NatsServer, foreign: Client, topic: str, block: bytes
) -> None:
    await make_topic(backend, topic)
    await make_topic(backend, f"{topic}.dead")
    async with broker.connect(f"{nats_server.url}?owner_timeout=1&lease_seconds=2") as bus:
        first = await bus.topic(topic).publish(b"first", key="a")
        await put(foreign, f"{stream_name(topic)}.0", block, b"")
        await bus.topic(topic).publish(b"last", key="a")
        async with bus.records(topic, group="audit", stop_when_idle=0.5) as log:
            assert [record.data async for record in log] == [b"first", b"", b"last"]
        bounds = await bus.log.bounds(topic)
        assert [r.offset async for batch in bus.log.read(topic, 0, *bounds[0]) for r in batch] == [
            (first.offset or 0) + n for n in range(3)
        ]
        seen: list[bytes | None] = []

        async def handle(message: broker.Message[bytes]) -> None:
            seen.append(message.data)
            if not message.data:
                raise ValueError("poison")

        async with bus.messages(
            topic,
            subscription="billing",
            ordered_by_key=True,
            stop_when_idle=0.5,
            dead_letter=f"{topic}.dead",
            retry=broker.Retry(max_attempts=1),
        ) as inbox:
            async with asyncio.timeout(60):
                await inbox.receive(handle)
        assert sorted(seen, key=str) == sorted([b"first", b"", b"last"], key=str)
        assert (await bus.admin.describe_topic(f"{topic}.dead")).messages == 1
        lag = await bus.admin.lag(topic, "billing")
        assert (lag.waiting, lag.unsettled) == (0, 0)
