"""Options of a message consumer: an invalid one is a ConfigurationError with field, value and accepted values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from broker.capabilities import LeaseMode, MessageCapabilities
from broker.consuming.options import ConsumerOptions, check_options, fitting_retry, longest_delay
from broker.consuming.retry.policy import Retry
from broker.errors import ConfigurationError

ABLE = MessageCapabilities(lease=LeaseMode.NONE)
WHOLE = ("max_outstanding", "max_outstanding_bytes", "prefetch")
SECONDS = ("max_lease", "close_timeout", "blocked_after", "stop_when_idle")


def check(sources: int = 1, **options: Any) -> None:
    check_options(ConsumerOptions(**options), sources, Retry(), ABLE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_outstanding": 1, "max_outstanding_bytes": 1, "prefetch": 1, "max_lease": 60},
        {"close_timeout": 1, "stop_when_idle": 0.5},
    ],
)
def test_valid_options_are_accepted(options: dict[str, Any]) -> None:
    refused: ConfigurationError | None = None
    try:
        check(**options)
    except ConfigurationError as error:
        refused = error
    assert refused is None


@pytest.mark.parametrize("value", [10.0, math.nan, math.inf, "10", True, b"1"])
@pytest.mark.parametrize("field", WHOLE)
def test_a_count_must_be_an_int(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        check(**{field: value})
    assert raised.value.message == f"{field} is {value!r}"
    assert "an int of 1 or more" in raised.value.advice


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "5", True, b"1"])
@pytest.mark.parametrize("field", SECONDS)
def test_a_time_must_be_finite_and_positive(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        check(**{field: value})
    assert raised.value.message == f"{field} is {value!r}"
    assert "seconds above 0" in raised.value.advice


@pytest.mark.parametrize("field", WHOLE)
def test_a_count_must_be_positive(field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field} is 0"):
        check(**{field: 0})


def test_max_outstanding_must_cover_every_topic() -> None:
    with pytest.raises(ConfigurationError, match="max_outstanding is 2 for 3 topics"):
        check(3, max_outstanding=2)


FIXED = MessageCapabilities(lease=LeaseMode.FIXED, lease_seconds=10)


def test_a_policy_without_a_maximum_fits_a_fixed_lease() -> None:
    fitting = fitting_retry(Retry(max_attempts=7), FIXED)
    assert (fitting.max_attempts, fitting.maximum, fitting.initial) == (7, 5.0, 0.5)
    assert fitting_retry(None, FIXED).longest <= longest_delay(ConsumerOptions(), FIXED) == 10
    assert fitting_retry(Retry(maximum=30), FIXED).maximum == 30
    assert fitting_retry(None, ABLE) == Retry()


def test_a_maximum_beyond_a_fixed_lease_is_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_options(ConsumerOptions(), 1, Retry(maximum=30), FIXED)
    assert raised.value.advice == "Lower Retry.maximum"
