"""A reader after a seek: the broker does not know it until it has reconnected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_pulsar.client import has_more, pulsar


class SeekingReader:
    """A reader that the broker does not know at the first `unknown` requests, which no server does on demand."""

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown
        self._reader = self

    def has_message_available_async(self, answer: Callable[..., object]) -> None:
        self.unknown -= 1
        answer(pulsar.Result.BrokerMetadataError if self.unknown >= 0 else pulsar.Result.Ok, True)


def is_open() -> bool:
    return True


def test_the_request_is_repeated_until_the_broker_knows_the_reader() -> None:
    reader: Any = SeekingReader(2)
    assert has_more(reader, 30.0, is_open)


def test_the_error_is_raised_after_the_patience() -> None:
    reader: Any = SeekingReader(1_000_000)
    with pytest.raises(pulsar.BrokerMetadataError):
        has_more(reader, 0.0, is_open)
