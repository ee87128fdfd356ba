"""Names, headers and the guard of the fast path, without a server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import ProtocolError

from broker.errors import InvalidName
from broker.names import NativeName, native_name
from broker.outbound import OutboundMessage
from broker_jetstream import names, transport
from broker_jetstream.codec import LogView, MessageView, NativeMessage, encode_headers, header_lines
from broker_jetstream.times import parse_time
from broker_jetstream.transport import FastClient, PublicClient, make_client, supports_fast_path

PORTABLE = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{2,199}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8"))
VIEW = MessageView()
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@given(PORTABLE)
def test_names_are_encoded_one_to_one(name: str) -> None:
    stream = names.stream_name(name)
    assert not set(stream) & set(". *>/\\\t\r\n")
    assert names.topic_of(stream) == name
    assert not isinstance(names.topic_of(stream), NativeName)
    assert names.subscription_of(names.consumer_name(name)) == name
    assert names.subscription_of(names.group_consumer(name, 17)) == name
    assert names.group_of(names.consumer_name(name)) is None


@given(PORTABLE, PORTABLE)
def test_different_names_stay_different(one: str, two: str) -> None:
    assert (one == two) == (names.stream_name(one) == names.stream_name(two))


@pytest.mark.parametrize("name", ["", "a", "ab", "1abc", "a b c", "a/b/c", "ünï", "abc\n", "x" * 201, "$JS.API"])
def test_names_that_are_not_portable_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        names.stream_name(name)


def test_native_names_pass_through() -> None:
    assert names.stream_name(native_name("KV_x=y+3")) == "KV_x=y+3"
    assert isinstance(names.topic_of("KV"), NativeName)
    with pytest.raises(InvalidName):
        names.stream_name(native_name("has.dots"))


@given(
    st.dictionaries(TEXT.filter(bool).filter(lambda name: not name.startswith("anybroker-")), TEXT, max_size=5),
    st.none() | st.binary(),
    st.none() | st.binary(),
)
def test_headers_carry_everything(attributes: dict[str, str], key: bytes | None, data: bytes | None) -> None:
    time = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
    message = OutboundMessage(data, key, attributes, publish_time=time)
    block = encode_headers(message, b"id-1", 0)
    assert block.startswith(b"NATS/1.0\r\n")
    assert block.endswith(b"\r\n\r\n")
    assert b"\r\n\r\n" not in block[:-4]
    raw: Any = NativeMessage(b"s", b"", data or b"", block)
    assert dict(VIEW.attributes(raw)) == attributes
    assert VIEW.key(raw) == key
    assert VIEW.publish_time(raw) == time
    assert VIEW.publish_times([raw]) == [(time - EPOCH) // timedelta(microseconds=1)]
    assert VIEW.id(raw) == "id-1"
    # The public way of nats-py must be able to send every header as it is.
    for name, value in header_lines(block):
        assert value.decode() == value.decode().strip()
        assert name.decode().isprintable()


LINES = [
    "anybroker-key: k", "anybroker-key: ", "anybroker-key:k", "Anybroker-Key: k", "anybroker-key-64: YWI=",
    "anybroker-key-64: !", "Nats-Msg-Id: mine", "Nats-Msg-Id: ", "Nats-Msg-Id: anybroker-64:YWI=",
    "Nats-Msg-Id: über", "anybroker-id: other", "nats-other: x", "anybroker-time: 1795812955566000",
    "anybroker-time: 12.5", "anybroker-time: -1", "anybroker-null: 1", "anybroker-attributes: a%3A=b&c=%20d",
    "anybroker-attributes: x=y", "type: created", "type: other", "type:created", "type:  x ", "empty: ", "empty:",
    ": nameless", "no colon", "a:b: c", "schön: grüß", "broken: \udcff", "broken\udcff: x", "tab: \t", "",
]  # fmt: skip


@given(st.lists(st.sampled_from(LINES), max_size=5), st.sampled_from(["NATS/1.0", "NATS/1.0 408 Timeout"]))
def test_header_columns_equal_the_properties_of_each_message(lines: list[str], first: str) -> None:
    block = "".join(f"{line}\r\n" for line in [first, *lines, ""]).encode(errors="surrogateescape")
    raws = [
        NativeMessage(b"s", b"$JS.ACK.orders.billing.1.42.7.1795258770448526345.5", b"", each) for each in (block, b"")
    ]
    for view in (VIEW, LogView()):
        found = view.header_columns(raws)
        assert found.ids == [view.id(raw) for raw in raws]
        assert found.keys == [view.key(raw) for raw in raws]
        assert list(map(dict, found.attributes)) == [dict(view.attributes(raw)) for raw in raws]
        assert found.publish_times == view.publish_times(raws)
        assert found.keys == view.keys(raws)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2026-11-21T11:17:02.808525531Z", datetime(2026, 11, 21, 11, 17, 2, 808_525, tzinfo=UTC)),
        ("2026-11-21T11:17:02.8Z", datetime(2026, 11, 21, 11, 17, 2, 800_000, tzinfo=UTC)),
        ("2026-11-21T11:17:02Z", datetime(2026, 11, 21, 11, 17, 2, tzinfo=UTC)),
        ("2026-11-21T13:17:02.5+02:00", datetime(2026, 11, 21, 11, 17, 2, 500_000, tzinfo=UTC)),
    ],
)
def test_times_of_the_server(text: str, wanted: datetime) -> None:
    assert parse_time(text) == wanted
    lines = (f"\r\nNats-Time-Stamp: {text}", "")
    raws = [NativeMessage(b"s", b"", b"", f"NATS/1.0{line}\r\n\r\n".encode()) for line in lines]
    assert LogView().broker_times(raws) == [(wanted - EPOCH) // timedelta(microseconds=1), None]
    assert [LogView().broker_time(raw) for raw in raws] == [wanted, None]


@pytest.mark.parametrize("text", ["yesterday", "9" * 30, "-" + "9" * 20, ""])
def test_malformed_times_in_foreign_headers_read_as_none(text: str) -> None:
    raw = NativeMessage(b"s", b"", b"", f"NATS/1.0\r\nanybroker-time: {text}\r\n\r\n".encode())
    assert VIEW.publish_time(raw) is None
    assert VIEW.publish_times([raw]) == [None]


def test_ack_subjects_with_domain_and_account() -> None:
    raw: Any = NativeMessage(b"s", b"$JS.ACK.hub.ACCHASH.orders.billing.3.42.7.1795258770448526345.5.token", b"", b"")
    assert VIEW.delivery_attempt(raw) == 3
    assert VIEW.id(raw) == "orders:42"
    assert VIEW.broker_time(raw) == datetime(2026, 11, 21, 10, 59, 30, 448_526, tzinfo=UTC)


@pytest.mark.parametrize("domains", [(False, False), (True, True), (True, False, False)])
def test_ack_subjects_parsed_together_equal_those_parsed_singly(domains: tuple[bool, ...]) -> None:
    replies = [
        b"$JS.ACK.%borders.billing.1.%d.7.%d.5%b"
        % (b"hub.ACCHASH." if domain else b"", 40 + n, 1795258770448526345 + n, b".token" if domain else b"")
        for n, domain in enumerate(domains)
    ]
    raws: list[Any] = [NativeMessage(b"s", reply, b"", b"") for reply in replies]
    assert VIEW.stamps(raws) == ([40 + n for n in range(len(raws))], VIEW.broker_times(raws))


def test_the_fast_path_is_used_with_this_client() -> None:
    assert supports_fast_path()
    assert isinstance(make_client(True), FastClient)
    assert isinstance(make_client(False), PublicClient)


@pytest.mark.deep
@given(st.data())
async def test_the_fast_path_parses_messages_however_they_are_split(data: st.DataObject) -> None:
    """Messages of raw subscriptions go to their handlers, all others to nats-py."""
    raw: list[tuple[bytes, bytes, bytes, bytes]] = []
    other: list[tuple[bytes, bytes]] = []

    class Watched(transport._RawClient):
        async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
            if handler := self.raw_handlers.get(b"%d" % sid):
                handler(subject, reply, data, headers or b"")
            else:
                other.append((subject, data))

        async def _process_ping(self) -> None:
            other.append((b"PING", b""))

    client = Watched()
    client.raw_handlers[b"7"] = lambda *message: raw.append(message)
    stream, wanted_raw, wanted_other = b"", [], []
    body = st.binary(max_size=40) | st.just(b"HMSG a 7 1 2\r\n\r\n") | st.just(b"x" * 5000)
    for kind in data.draw(st.lists(st.sampled_from(["raw", "headers", "other", "ping"]), max_size=12)):
        payload, reply = data.draw(body), data.draw(st.sampled_from([b"", b"$JS.ACK.s.c.1.2.3.4.5"]))
        begin = b"s.0 %d " % (7 if kind != "other" else 8) + (reply + b" " if reply else b"")
        block = b"NATS/1.0\r\na: b\r\n\r\n" if kind == "headers" else b""
        if kind == "ping":
            stream += b"PING\r\n"
            wanted_other.append((b"PING", b""))
        elif block:
            stream += b"HMSG %b%d %d\r\n%b%b\r\n" % (begin, len(block), len(block) + len(payload), block, payload)
            wanted_raw.append((b"s.0", reply, payload, block))
        else:
            stream += b"MSG %b%d\r\n%b\r\n" % (begin, len(payload), payload)
            wanted_raw.append((b"s.0", reply, payload, b"")) if kind == "raw" else wanted_other.append(
                (b"s.0", payload)
            )
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        await client._ps.parse(stream[:size])
        stream = stream[size:]
    assert raw == wanted_raw
    assert other == wanted_other
    assert not client._ps.buf


async def test_a_failing_handler_makes_the_client_reconnect() -> None:
    client = transport._RawClient()

    def fail(*_message: bytes) -> None:
        raise KeyError("x")

    client.raw_handlers[b"1"] = fail
    with pytest.raises(ProtocolError):
        await client._ps.parse(b"MSG s 1 1\r\nx\r\n")
    client._ps.reset()
    client.raw_handlers[b"1"] = lambda *_message: None
    await client._ps.parse(b"MSG s 1 1\r\nx\r\n")


def test_a_changed_client_does_not_get_the_fast_path() -> None:
    class Renamed(Client):
        async def _process_msg(self, sid: int, subject: bytes, reply: bytes, payload: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            return

    class Synchronous(Client):
        def _flush_pending(self, force_flush: bool = False) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            return

    class Buffered(Client):
        def __init__(self) -> None:
            super().__init__()
            self._pending = bytearray()  # pyright: ignore[reportAttributeAccessIssue]

    class OtherParser(Client):
        def __init__(self) -> None:
            super().__init__()
            self._ps = object()  # pyright: ignore[reportAttributeAccessIssue]

    for changed in (Renamed, Synchronous, Buffered, OtherParser):
        assert not supports_fast_path(changed)
    assert not supports_fast_path(object)  # pyright: ignore[reportArgumentType]
