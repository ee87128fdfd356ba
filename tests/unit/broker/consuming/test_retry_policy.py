"""Options of a retry policy, its backoff, and the count of attempts."""

from __future__ import annotations

import math
import sys

import pytest

from broker.consuming.retry.policy import Attempts, Retry
from broker.errors import InvalidSetting
from broker.messages import Message
from tests.unit.broker.consuming.scripted_source import NONE, VIEW, Raw


def test_b1_backoff_grows_to_its_maximum() -> None:
    retry = Retry(initial=1, multiplier=2, maximum=10, jitter=0)
    assert [retry.delay(n) for n in (1, 2, 3, 4, 5, 5000)] == [1, 2, 4, 8, 10, 10]
    jittered = Retry(initial=1, maximum=10, jitter=0.5)
    assert all(0.5 <= jittered.delay(1) <= 1.5 for _ in range(100))


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_attempts", 0), ("initial", -1.0), ("multiplier", 0.5), ("maximum", 0.1), ("jitter", 1.0), ("timeout", 0.0)],
)
def test_an_invalid_policy_names_the_field(field: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=field):
        Retry(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "takes"),
    [
        ("max_attempts", 2.0, "an int"),
        ("max_attempts", True, "an int"),
        ("max_attempts", "3", "an int"),
        ("max_deliveries", 10.0, "an int"),
        ("max_deliveries", True, "an int"),
        ("initial", "1", "seconds"),
        ("initial", math.nan, "seconds"),
        ("multiplier", None, "1 or more"),
        ("maximum", "60", "at least"),
        ("jitter", math.nan, "below 1"),
        ("timeout", "3", "seconds"),
        ("timeout", math.inf, "seconds"),
        ("on", OSError, "tuple of exception classes"),
        ("on", [OSError], "tuple of exception classes"),
        ("never", ("OSError",), "tuple of exception classes"),
        ("never", (OSError("x"),), "tuple of exception classes"),
        ("never", (int,), "tuple of exception classes"),
        ("never", None, "tuple of exception classes"),
    ],
)
def test_a_wrong_type_names_field_value_and_accepted_values(field: str, value: object, takes: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        Retry(**{field: value})  # type: ignore[arg-type]
    assert raised.value.message == f"Retry.{field} is {value!r}"
    assert takes in raised.value.advice


def test_attempts_of_settled_messages_are_dropped() -> None:
    attempts = Attempts()
    message = named("orders", "a")
    assert not attempts
    assert [attempts.failed(message), attempts.failed(named("orders", "a"))] == [1, 2]
    attempts.released(message)
    assert attempts.releases(message) == 1
    attempts.forget(message)
    assert not attempts


def test_equal_ids_of_two_topics_are_counted_as_two_messages() -> None:
    attempts = Attempts()
    order, bill = named("orders", "a"), named("bills", "a")
    assert [attempts.failed(order), attempts.failed(bill), attempts.failed(order)] == [1, 1, 2]
    attempts.released(order)
    assert (attempts.releases(order), attempts.releases(bill)) == (1, 0)
    attempts.forget(order)
    assert (attempts.failures(order), attempts.failures(bill)) == (0, 1)


def test_long_ids_are_told_apart_and_take_no_room() -> None:
    attempts = Attempts()
    long, alike, odd = (named("orders", "x" * 1_000_000 + end) for end in ("", "y", "\ud800"))
    references = sys.getrefcount(long.id)
    assert [attempts.failed(long), attempts.failed(alike), attempts.failed(odd), attempts.failed(long)] == [1, 1, 1, 2]
    attempts.released(long)
    assert (attempts.releases(long), attempts.releases(alike)) == (1, 0)
    references -= sys.getrefcount(long.id)
    assert references == 0
    for message in (long, alike, odd):
        attempts.forget(message)
    assert not attempts


def named(topic: str, id: str) -> Message:
    return Message(topic, b"", Raw(id, None, 1, NONE), VIEW)
