"""`Debezium`: changes of rows, with the schema of the message and without."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
import pytest

from broker.codecs import Change, Debezium
from broker.errors import DecodeError, InvalidMessage


@dataclass
class Customer:
    id: int
    name: str


class Checked(pydantic.BaseModel):
    id: Annotated[int, pydantic.Field(ge=1)]


ANN = {"id": 1, "name": "Ann"}
UPDATE: dict[str, Any] = {
    "before": ANN,
    "after": {"id": 1, "name": "Anna"},
    "source": {"connector": "postgresql", "lsn": 5},
    "op": "u",
    "ts_ms": 1796000000000,
    "transaction": None,
}


@pytest.mark.parametrize("wrap", ["bare", "with its schema", "schema last"])
def test_a_change_is_read_in_every_form(wrap: str) -> None:
    message = {
        "bare": UPDATE,
        "with its schema": {"schema": {"type": "struct", "fields": []}, "payload": UPDATE},
        "schema last": {"payload": UPDATE, "schema": None},
    }[wrap]
    found = Debezium(Customer).decode(json.dumps(message, separators=(",", ":")).encode())
    assert isinstance(found, Change)
    assert (found.op, found.ts_ms) == ("u", 1796000000000)
    assert found.before == Customer(1, "Ann")
    assert found.after == Customer(1, "Anna")


@pytest.mark.parametrize(
    ("op", "before", "after"), [("c", None, ANN), ("r", None, ANN), ("d", ANN, None), ("t", None, None)]
)
def test_every_operation(op: str, before: Any, after: Any) -> None:
    found = Debezium(Customer).decode(json.dumps({"op": op, "before": before, "after": after}).encode())
    assert found.op == op
    assert (found.before is None, found.after is None) == (before is None, after is None)


def test_the_empty_message_after_a_delete_is_a_tombstone() -> None:
    codec = Debezium(Customer)
    found = codec.decode(None)
    assert (found.op, found.before, found.after) == ("tombstone", None, None)
    assert codec.encode(found) is None


def test_changes_round_trip() -> None:
    codec = Debezium(Customer)
    change = codec.decode(json.dumps(UPDATE).encode())
    written = codec.encode(change)
    assert written is not None
    assert codec.decode(written) == change
    assert pickle.loads(pickle.dumps(codec)) == codec  # noqa: S301


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{}", "missing required field `op`"),
        (b'{"op": "x"}', r"Invalid enum value 'x' - at `\$.op`"),
        (b'{"op": "c", "after": {"id": "1", "name": "Ann"}}', r"Expected `int`, got `str` - at `\$.after.id`"),
        (b'{"schema": {}, "payload": {"op": "c", "after": {"id": 1}}}', r"missing required field `name` - at `\$.pay"),
        (b'{"schema": {}, "payload": null}', r"Expected `object`, got `null` - at `\$.payload`"),
        (b'{"op"', "truncated"),
    ],
)
def test_other_messages_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=rf"Debezium\(Customer\) cannot decode the payload: .*{reason}"):
        Debezium(Customer).decode(data)


def test_validators_of_rows_run() -> None:
    codec = Debezium(Checked)
    assert codec.decode(b'{"op": "c", "after": {"id": 1}}').after == Checked(id=1)
    with pytest.raises(DecodeError, match="greater than or equal to 1"):
        codec.decode(b'{"op": "c", "after": {"id": 0}}')


def test_what_is_no_change_is_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"Debezium\(Customer\) cannot encode a payload of type Customer"):
        Debezium(Customer).encode(Customer(1, "Ann"))  # pyright: ignore[reportArgumentType]
