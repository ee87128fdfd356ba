"""Answers of JetStream that lack fields, or have others in their place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import pytest

from broker.errors import BackendError, BrokerError
from broker.hooks import Hooks, Warned
from broker.messages import Message
from broker_jetstream.admin import JetStreamAdmin
from broker_jetstream.codec import MessageView, NativeMessage, status_of
from broker_jetstream.connection import Connection, Listener
from broker_jetstream.log_reader import JetStreamLogReader
from broker_jetstream.release_counts import ReleaseCounts
from broker_jetstream.settings import JetStreamSettings
from broker_jetstream.streams import Layout, Layouts
from broker_jetstream.subscriptions import CommittedPosition, ensure_group, ensure_message_consumer
from broker_jetstream.transport import Outgoing, RawHandler
from tests.jetstream.support import Listener as SourceListener
from tests.security.admin_calls import admin_calls

WRONG: tuple[object, ...] = (
    {},
    {"config": 5, "state": 5, "streams": 5, "consumers": 5, "total": "x", "purged": "y", "message": 5},
    {"config": {}, "state": {"messages": "x"}, "streams": [5], "consumers": [5], "total": 1, "purged": []},
    {"config": {"name": 5, "metadata": 5, "subjects": 5}, "message": {"seq": "x", "data": 5, "time": 5}},
    {"config": {"name": "s"}, "consumers": ["billing"], "name": 5, "num_pending": "x", "total": 1},
    {"config": {"name": "s"}, "consumers": ["billing"], "name": "+a+b", "num_pending": 10**400, "total": 1},
    {"config": {"name": "s", "ack_wait": "x", "max_deliver": []}, "state": [], "created": 5, "delivered": 5},
    {"config": {"name": "s", "metadata": {"anybroker-partitions": "9" * 5000}}, "state": {"first_seq": "x"}},
    {"config": {"metadata": [1]}, "ack_floor": [1], "seq": "x"},
    {"config": {"metadata": {"anybroker-position": "9" * 5000}}, "ack_floor": {"stream_seq": "x"}},
    {"config": {}, "message": {"seq": 1, "data": 5}, "seq": []},
    {"config": {}, "message": {"seq": 1, "data": "AA=="}, "seq": None},
    {"error": {"err_code": []}},
)
LAYOUT = Layout("orders", "orders", 1, True, ("orders.*",), False)


class Answering(Connection):
    """A connection whose server answers every request alike."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(JetStreamSettings(request_timeout=0.2), Hooks())
        self._answer = answer
        self.connected = True

    async def request(self, subject: str, data: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        await asyncio.sleep(0)
        return b"", self._answer

    async def request_once(self, subject: bytes, block: bytes, data: bytes, timeout: float) -> tuple[bytes, bytes]:
        return await self.request("")


class AnsweringReads(Answering):
    """Answers every direct get with one message that has this header block."""

    def __init__(self, block: bytes) -> None:
        state = {"first_seq": 1, "last_seq": 9}
        super().__init__(json.dumps({"config": {"name": "orders", "allow_direct": True}, "state": state}).encode())
        self._block = block
        self._handler: RawHandler | None = None

    async def listen(self, subject: str, handler: RawHandler) -> Listener:
        self._handler = handler
        return Listener(subject, handler)

    async def unlisten(self, listener: Listener) -> None: ...

    async def send(self, messages: Sequence[Outgoing]) -> None:
        assert self._handler is not None
        self._handler(b"", b"", b"first", self._block)
        self._handler(b"", b"", b"", b"NATS/1.0 204 EOB\r\n\r\n")


def calls(connection: Connection) -> list[Callable[[], Awaitable[object]]]:
    layouts = Layouts(connection)
    admin, log = JetStreamAdmin(connection, layouts), JetStreamLogReader(connection, layouts)
    position = CommittedPosition(connection, LAYOUT, 0, "audit+0", "Partition 0 of topic 'orders'")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        *admin_calls(admin, start),
        lambda: admin.ensure_subscription("orders", "billing", start="latest", options={}),
        lambda: log.partitions("orders"),
        lambda: log.bounds("orders"),
        lambda: log.position_at("orders", start),
        lambda: ensure_group(connection, log, LAYOUT, "audit", start, ephemeral=False),
        lambda: ensure_message_consumer(connection, LAYOUT, "billing", "billing", start="latest"),
        lambda: position.reset(None),
        lambda: position.reset(7),
        lambda: position.seek(None, b""),
        lambda: position.seek(7, b""),
        lambda: position.commit(3, 4, by_ack=False),
        lambda: position.check_bounds(3),
    ]


@pytest.mark.parametrize("body", WRONG, ids=lambda body: repr(body)[:60])
async def test_a_wrong_answer_is_a_broker_error(body: object) -> None:
    connection = Answering(json.dumps(body).encode())
    wrong: list[str] = []
    for number, call in enumerate(calls(connection)):
        try:
            await call()
        except BrokerError:
            continue
        except Exception as error:
            wrong.append(f"call {number}: {error!r}")
    assert not wrong


def released(sequence: int, deliveries: int) -> Message[bytes]:
    reply = f"$JS.ACK.orders.billing.{deliveries}.{sequence}.{sequence}.1700000000000000000.0".encode()
    return Message("orders", b"x", NativeMessage(b"orders.0", reply, b"x", b""), MessageView(), None, 1)


@pytest.mark.parametrize("body", [*WRONG, [], 5, {"error": 5}, "x"], ids=lambda body: repr(body)[:60])
async def test_a_wrong_answer_about_releases_keeps_no_message_from_being_settled(body: object) -> None:
    connection, listener = Answering(json.dumps(body).encode()), SourceListener()
    writing, reading = (
        ReleaseCounts(connection, "orders", "billing", "Subscription 'billing'", listener, alone=False)
        for _ in range(2)
    )
    await writing.add([released(5, 1)])
    await reading.mark([released(5, 9)])
    # What this process knows itself is counted.
    await writing.mark([message := released(5, 9)])
    assert message.raw.releases == writing.count(5) == 1
    (text, *_) = [event.text for event in listener.events if isinstance(event, Warned)]
    assert "other consumers count released messages" in text


async def test_a_wrong_message_of_a_log_is_a_broker_error() -> None:
    connection = AnsweringReads(b"NATS/1.0\r\nNats-Sequence: x\r\nNats-Num-Pending: x\r\n\r\n")
    log = JetStreamLogReader(connection, Layouts(connection))
    with pytest.raises(BackendError):
        await anext(log.read("orders", 0, 1, 9, 10))
    with pytest.raises(BackendError):
        await log.behind(LAYOUT, 0, 1)


def test_a_status_has_three_digits() -> None:
    assert status_of(b"NATS/1.0 503 No Responders\r\n\r\n") == (503, "No Responders")
    assert status_of(b"NATS/1.0 " + b"9" * 5000 + b"\r\n\r\n") == (0, "")
