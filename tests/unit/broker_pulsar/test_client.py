"""Answers of the client."""

from __future__ import annotations

import pytest

from broker import ConnectionFailed
from broker_pulsar.client import exceptions, pulsar, seek
from broker_pulsar.errors import result_error, translate

REPEAT = pulsar.Result(-1)
"""What the core of the client returns while it reconnects; the extension has no name for it."""


class Reconnecting:
    def seek_async(self, target: object, answer: object) -> None:
        assert callable(answer)
        answer(REPEAT)


def test_a_result_without_a_name_is_retriable() -> None:
    with pytest.raises(exceptions.NotConnected) as raised:
        seek(Reconnecting(), 0, lambda: True)
    for error in (translate(raised.value, "Seeking"), result_error(REPEAT, "Publishing")):
        assert isinstance(error, ConnectionFailed)
        assert error.retriable
