"""Times and durations on the command line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from broker.cli.arguments import parse_duration, parse_start, parse_time
from broker.cli.errors import Exit, Failure


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("5m", timedelta(minutes=5)),
        ("1.5h", timedelta(minutes=90)),
        ("7D", timedelta(days=7)),
        ("90 s", timedelta(0, 90)),
    ],
)
def test_an_age_is_a_time_ago(text: str, ago: timedelta):
    before = datetime.now(UTC)
    found = parse_time("--since", text)
    assert before - ago <= found <= datetime.now(UTC) - ago


@pytest.mark.parametrize("text", ["2030-01-31T12:00:00Z", "2030-01-31T14:00+02:00", "20300131T120000Z"])
def test_a_time_has_a_timezone(text: str):
    assert parse_start(text) == datetime(2030, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize("text", ["2030-01-31", "2030-01-31T00:00"])
def test_a_time_without_a_timezone_is_refused(text: str):
    with pytest.raises(Failure, match="has no timezone") as caught:
        parse_time("--since", text)
    assert caught.value.advice.startswith("Write 2030-01-31T00:00:00Z for UTC")
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize("text", ["", "m", "5", "5x", "-5m", "0m", ".m", "9999999w", "999999999999w", "soon"])
def test_anything_else_is_refused_with_what_the_option_takes(text: str):
    with pytest.raises(Failure, match="--since is") as caught:
        parse_time("--since", text, "an offset, ")
    assert caught.value.advice.startswith("It takes an offset, a time such as")


def test_a_duration_that_no_broker_can_keep_is_refused():
    assert parse_duration("90") == timedelta(seconds=90)
    with pytest.raises(Failure, match="too long"):
        parse_duration("99999999999w")
