"""Commands that run after a poll: their order, and where their exceptions go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_kafka.client.consumer import PollBefore


class Client:
    """Calls back in its next poll, if it is given something to call."""

    def __init__(self, callback: Callable[[], object] | None = None, record: str | None = None) -> None:
        self.callback = callback
        self.record = record

    def poll(self, timeout: float) -> str | None:
        assert timeout == 0
        if self.callback is not None:
            self.callback()
        return self.record


def test_work_runs_after_a_poll_whose_record_is_kept() -> None:
    kept: list[Any] = []
    done: list[Any] = []
    client: Any = Client(record="record")
    PollBefore(kept.append).run(client, lambda given: done.append((given, list(kept))))
    assert done == [(client, ["record"])]


def test_within_a_callback_earlier_work_runs_first() -> None:
    poll_before = PollBefore(lambda record: None)
    done: list[str] = []

    def give_up() -> None:
        assert not poll_before.calling_back
        with poll_before.callback(client):
            assert poll_before.calling_back
            poll_before.run(client, lambda _: done.append("within"))

    client: Any = Client(give_up)
    poll_before.run(client, lambda _: done.append("before"))
    assert done == ["before", "within"]
    assert not poll_before.calling_back


def test_an_exception_of_the_work_is_not_raised_in_the_callback() -> None:
    poll_before = PollBefore(lambda record: None)
    given_up: list[bool] = []

    def give_up() -> None:
        with poll_before.callback(client):
            given_up.append(True)

    def fail(_: object) -> None:
        raise KeyError("mine")

    client: Any = Client(give_up)
    with pytest.raises(KeyError, match="mine"):
        poll_before.run(client, fail)
    assert given_up == [True]
    poll_before.run(client, lambda _: None)
