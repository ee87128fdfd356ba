"""A reader after a seek: the broker does not know it until it has reconnected."""

from __future__ import annotations

from typing import Any

import pytest

from broker_pulsar.client import has_more, pulsar


class SeekingReader:
    """A reader that the broker does not know at the first `unknown` requests, which no server does on demand."""

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown

    def has_message_available(self) -> bool:
        self.unknown -= 1
        if self.unknown >= 0:
            raise pulsar.BrokerMetadataError
        return True


def test_the_request_is_repeated_until_the_broker_knows_the_reader() -> None:
    reader: Any = SeekingReader(2)
    assert has_more(reader, 30.0)


def test_the_error_is_raised_after_the_patience() -> None:
    reader: Any = SeekingReader(1_000_000)
    with pytest.raises(pulsar.BrokerMetadataError):
        has_more(reader, 0.0)
