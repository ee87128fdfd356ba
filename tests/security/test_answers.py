"""JSON of servers that are hostile, broken, or no brokers at all."""

from __future__ import annotations

import json
import reprlib

import pytest

from broker.driver import read_answer, reads_answer
from broker.errors import BackendError, NotFound

DEEPEST = 64
NESTED = "[" * DEEPEST + "]" * DEEPEST


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b'{"a": ', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'"\\ud800"', "not UTF-8"),
        (b"NaN", "not finite"),
        (b'{"expires_in": Infinity}', "not finite"),
        (b"[1e999]", "not finite"),
        (b"9" * 5000, "number"),
        (f"[{NESTED}]".encode(), "deeper than 64"),
        (b"[" * 3_000_000, "deeper than 64"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deeper than 64"),
        (b"[" * 100_000 + b'"' + b"]" * 100_000 + b'"' + b"]" * 100_000, "deeper than 64"),
        (b'"' + b"x" * (32 << 20), "longer than 32 MiB"),
    ],
    ids=reprlib.repr,
)
def test_what_no_server_should_answer_is_a_broker_error(body: bytes, reason: str) -> None:
    with pytest.raises(BackendError, match=reason) as caught:
        read_answer(body, "The server")
    assert str(caught.value).startswith("The server: the answer ")
    assert len(str(caught.value)) < 300, "it quotes the answer"


@pytest.mark.parametrize(
    "body",
    [
        NESTED,
        json.dumps({"text": "[{" * 1000, "escaped": '"[\\"' * 1000, "list": [{}] * 1000}),
        '"\\ud83d\\ude00"',
        '["1e999", -1.5e300, 0]',
    ],
    ids=["deepest", "brackets in texts", "surrogate pair", "numbers"],
)
def test_what_servers_do_answer_is_read(body: str) -> None:
    assert read_answer(body.encode(), "The server") == json.loads(body)


def test_a_missing_field_is_a_broker_error() -> None:
    with pytest.raises(BackendError, match=r"The server: the answer lacks .* \(KeyError\)"), reads_answer("The server"):
        {}["partitions"]
    with pytest.raises(NotFound), reads_answer("The server"):
        raise NotFound("as it is")
