"""What is done once a client has told its news: the order of it, and whose its exceptions are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_kafka.client.consumer import Hearing


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


def test_work_is_done_after_the_news_and_what_the_poll_brings_is_kept() -> None:
    kept: list[Any] = []
    done: list[Any] = []
    client: Any = Client(record="record")
    Hearing(kept.append).then(client, lambda given: done.append((given, list(kept))))
    assert done == [(client, ["record"])]


def test_within_a_callback_work_is_done_at_once_and_what_was_asked_before_comes_first() -> None:
    hearing = Hearing(lambda record: None)
    done: list[str] = []

    def give_up() -> None:
        assert not hearing.calling_back
        with hearing.callback(client):
            assert hearing.calling_back
            hearing.then(client, lambda _: done.append("asked within"))

    client: Any = Client(give_up)
    hearing.then(client, lambda _: done.append("asked before"))
    assert done == ["asked before", "asked within"]
    assert not hearing.calling_back


def test_an_exception_of_the_work_is_its_own_and_not_the_callbacks() -> None:
    hearing = Hearing(lambda record: None)
    given_up: list[bool] = []

    def give_up() -> None:
        with hearing.callback(client):
            given_up.append(True)

    def fail(_: object) -> None:
        raise KeyError("mine")

    client: Any = Client(give_up)
    with pytest.raises(KeyError, match="mine"):
        hearing.then(client, fail)
    assert given_up == [True]
    hearing.then(client, lambda _: None)
