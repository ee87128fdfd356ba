"""A reader of Pulsar that was moved: its broker does not know it until it has come back."""

from __future__ import annotations

from typing import Any

import pytest

from broker_pulsar.client import has_more, pulsar


class Moved:
    """Stands in for a reader whose broker does not know it the first few times; when that is so cannot be had."""

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown

    def has_message_available(self) -> bool:
        self.unknown -= 1
        if self.unknown >= 0:
            raise pulsar.BrokerMetadataError
        return True


def test_a_reader_that_comes_back_is_asked_again() -> None:
    reader: Any = Moved(2)
    assert has_more(reader, 30.0)


def test_one_that_does_not_come_back_is_told_in_time() -> None:
    reader: Any = Moved(1_000_000)
    with pytest.raises(pulsar.BrokerMetadataError):
        has_more(reader, 0.0)
