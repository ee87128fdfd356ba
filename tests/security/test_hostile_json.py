"""Deep, huge and invalid JSON, in payloads and in the input of the command line: an error of its message alone."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pydantic
import pytest

from broker.bus import Bus
from broker.cli.message_input import BadLine, Common, parse_json
from broker.codecs import Json
from broker.errors import DecodeError, InvalidMessage

DEEP = 100_000
BODIES = {
    "lists": b"[" * DEEP,
    "objects": b'{"a":' * DEEP,
    "closed": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "exponent": b'{"a":1e999}',
    "constant": b'{"a":NaN}',
    "not UTF-8": b'{"a":"\xff"}',
    "surrogate": b'{"a":"\\ud800"}',
    "zeros": bytes(1_000_000),
}


class Node(msgspec.Struct):
    a: Node | None = None


class Model(pydantic.BaseModel):
    a: Any = None


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("kind", [Any, dict[str, Any], Node, Model], ids=str)
def test_a_codec_raises_its_own_error(kind: Any, body: bytes) -> None:
    if kind is Model and body in (BODIES["exponent"], BODIES["constant"]):
        assert isinstance(Json(kind).decode(body), Model)  # as pydantic reads them
        return
    with pytest.raises(DecodeError) as raised:
        Json(kind).decode(body)
    assert len(str(raised.value)) < 1000


def test_a_payload_that_nests_too_deeply_is_not_encoded() -> None:
    deep: list[Any] = []
    for _ in range(DEEP):
        deep = [deep]
    with pytest.raises(InvalidMessage):
        Json().encode(deep)


async def test_hostile_payloads_are_dead_letters_and_the_next_message_is_handled(broker_bus: Bus) -> None:
    for name in ("orders", "orders.dead"):
        await broker_bus.admin.ensure_topic(name)
    await broker_bus.topic("orders").publish_batch([*BODIES.values(), b'{"a":1}'])
    async with broker_bus.messages(
        "orders", subscription="billing", codec=Json(), dead_letter="orders.dead", stop_when_idle=0.2
    ) as inbox:
        seen = []
        async for message in inbox:
            seen.append(message.payload)
            await message.ack()
    assert seen == [{"a": 1}]
    assert len(await broker_bus.admin.list_dead("orders.dead")) == len(BODIES)


HUGE = b"9" * 5000
LINES = {
    # The text of long numbers passes through.
    **{name: b'{"payload":' + body + b"}" for name, body in BODIES.items() if name not in ("digits", "exponent")},
    "arrays": b'{"payload":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "bare": b"[" * DEEP,
    "key": b'{"data":"x","key":' + HUGE + b"}",
    "ttl": b'{"data":"x","ttl":' + b"9" * 4000 + b"}",
    "endless": b'{"data":"x","ttl":1e999}',
    "attributes": b'{"data":"x","attributes":{"a":' + b'{"a":' * DEEP + b"1" + b"}" * (DEEP + 2),
    "time": b'{"data":"x","publish_time":"99999-01-01T00:00:00Z"}',
    "reserved": b'{"data":"x","attributes":{"retry-letter-x":"1"}}',
    "name": b'{"data":"x","' + b"a" * 100_000 + b'":1}',
    "id": b'{"data":"x","id":"\\ud800"}',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_a_line_of_input_is_a_bad_line(line: bytes) -> None:
    with pytest.raises(BadLine) as raised:
        parse_json(line, 7, Common())
    assert "Line 7" in str(raised.value)


@pytest.mark.parametrize("depth", range(850, 1050, 7))
def test_no_depth_is_in_between(depth: int) -> None:
    """A value that can just be read, and not be written any more."""
    line = b'{"payload":' + b"[" * depth + b"]" * depth + b"}"
    with suppress(BadLine):
        assert json.loads(parse_json(line, 1, Common()).data or b"") is not None
    with pytest.raises(BadLine):
        parse_json(b'{"data":' + b"[" * depth + b"]" * depth + b"}", 1, Common())
