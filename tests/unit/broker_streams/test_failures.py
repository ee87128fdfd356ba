"""Policies, their mistakes, and dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

import broker
from broker import BrokerError, DecodeError, Limits, OutboundMessage, Retry
from broker_streams import SKIP, STOP, DeadLetter, Retrying, StreamFailed
from broker_streams.failures import dead_letter, describe, policy_mistakes, policy_topics

EXACT = Retry(max_attempts=3, initial=1, multiplier=2, maximum=60, jitter=0)


class TestRetrying:
    def test_it_waits_longer_and_gives_up(self):
        policy = Retrying(EXACT)
        assert [policy.delay(OSError(), failures) for failures in (1, 2, 3, 4)] == [1, 2, None, None]
        assert policy.then is STOP

    def test_one_attempt_is_no_retry(self):
        assert Retrying(Retry(max_attempts=1)).delay(OSError(), 1) is None

    def test_it_retries_what_the_retry_names(self):
        policy = Retrying(Retry(initial=1, jitter=0, on=(OSError,), never=(FileNotFoundError,)), SKIP)
        assert policy.delay(OSError(), 1) == 1
        assert policy.delay(ValueError(), 1) is None
        assert policy.delay(FileNotFoundError(), 1) is None

    def test_jitter_stays_in_its_bounds(self):
        policy = Retrying(Retry(initial=10, jitter=0.5))
        assert all(5 <= (policy.delay(OSError(), 1) or 0) <= 15 for _ in range(100))


def test_policies_compare_by_value_and_are_readable():
    assert DeadLetter("a") == DeadLetter("a") != DeadLetter("b")
    assert len({STOP, SKIP, DeadLetter("a"), DeadLetter("a"), Retrying(EXACT), Retrying(EXACT)}) == 4
    shown = [repr(policy) for policy in (STOP, SKIP, DeadLetter("a"), Retrying(EXACT, SKIP))]
    assert shown == ["STOP", "SKIP", "DeadLetter('a')", "Retrying(3 attempts, then=SKIP)"]


@pytest.mark.parametrize("policy", [STOP, SKIP, DeadLetter("letters"), Retrying(EXACT), Retrying(EXACT, SKIP)])
def test_valid_policies_have_no_mistakes(policy: Any):
    assert list(policy_mistakes("on_error", policy)) == []


@pytest.mark.parametrize(
    ("policy", "lines"),
    [
        (None, ["on_error is None. It takes STOP, SKIP, DeadLetter(topic) or Retrying(Retry(...))"]),
        (Retrying(5), ["on_error retries by 5. Retrying takes a broker.Retry"]),  # pyright: ignore[reportArgumentType]
        (
            Retrying(Retry(max_deliveries=9)),
            ["on_error has max_deliveries=9: a processor counts none. Leave it out"],
        ),
        (
            Retrying(EXACT, Retrying(EXACT)),  # pyright: ignore[reportArgumentType]
            ["on_error has a Retrying in then=. Take STOP, SKIP or DeadLetter(topic)"],
        ),
        (
            Retrying(EXACT, "skip"),  # pyright: ignore[reportArgumentType]
            ["then= of on_error is 'skip'. It takes STOP, SKIP, DeadLetter(topic) or Retrying(Retry(...))"],
        ),
    ],
)
def test_mistakes_name_the_option(policy: Any, lines: list[str]):
    assert list(policy_mistakes("on_error", policy)) == lines


def test_all_mistakes_of_a_policy_are_told():
    lines = list(policy_mistakes("on_undecodable", Retrying(Retry(max_deliveries=9), DeadLetter("a b"))))
    assert ["the same bytes fail again" in lines[0], "max_deliveries" in lines[1], "'a b'" in lines[2]] == [True] * 3
    assert len(lines) == 3


def test_topics_of_policies():
    policies = (STOP, None, DeadLetter("one"), Retrying(EXACT, DeadLetter("two")), DeadLetter("one"), Retrying(EXACT))
    assert policy_topics(*policies) == {"one", "two"}


def headers_of(attributes: Mapping[str, str]) -> int:
    """Bytes of attributes when every byte of a value is percent-encoded."""
    return sum(len(name) + 3 * len(text.encode()) for name, text in attributes.items())


class TestDeadLetter:
    def letter(self, **changes: Any) -> OutboundMessage:
        fields: dict[str, Any] = {
            "topic": "clicks-in",
            "partition": 3,
            "offset": 17,
            "key": b"ann",
            "data": b"\xff",
            "attributes": {"trace": "1"},
            "group": "clicks",
            "reason": "undecodable",
            "error": DecodeError("no JSON"),
            "attempts": 2,
            "id": "clicks/clicks-in/3/17/0",
            "timestamp": datetime(2026, 1, 1, tzinfo=UTC),
        }
        return dead_letter(**fields | changes)

    def test_it_is_the_message_with_reason_error_and_origin(self):
        sent = datetime(2025, 12, 31, tzinfo=UTC)
        letter = self.letter(publish_time=sent)
        assert (letter.key, letter.data, letter.id) == (b"ann", b"\xff", "clicks/clicks-in/3/17/0")
        assert letter.publish_time == sent
        assert dict(letter.attributes) == {
            "trace": "1",
            "dead-letter-topic": "clicks-in",
            "dead-letter-reason": "undecodable",
            "dead-letter-error": "DecodeError: no JSON",
            "dead-letter-attempts": "2",
            "dead-letter-partition": "3",
            "dead-letter-offset": "17",
            "dead-letter-subscription": "clicks",
            "dead-letter-id": "clicks-in:3:17",
            "dead-letter-time": "2026-01-01T00:00:00+00:00",
        }

    def test_what_is_not_known_is_left_out(self):
        letter = self.letter(error=None, attempts=None, key=None, data=None)
        assert (letter.key, letter.data) == (None, None)
        assert not {"dead-letter-error", "dead-letter-attempts"} & set(letter.attributes)

    def test_the_time_is_now_by_default(self):
        before = datetime.now(UTC)
        found = datetime.fromisoformat(self.letter(timestamp=None).attributes["dead-letter-time"])
        assert before <= found <= datetime.now(UTC)

    def test_details_of_an_earlier_letter_are_replaced(self):
        earlier = {"dead-letter-topic": "other", "dead-letter-cut": "x", "trace": "1"}
        attributes = self.letter(attributes=earlier).attributes
        assert attributes["dead-letter-topic"] == "clicks-in"
        assert "dead-letter-cut" not in attributes
        assert attributes["trace"] == "1"

    def test_long_and_odd_texts_can_be_sent(self):
        letter = self.letter(error=ValueError("\ud800" + "x" * 100_000), reason="y" * 5000)
        assert len(letter.attributes["dead-letter-error"].encode()) == 1024
        assert letter.attributes["dead-letter-reason"].endswith("y…")

    @pytest.mark.parametrize("free", [0, 600, 3000, 100_000])
    @pytest.mark.parametrize("headers", [0, 10_000, 20_000])
    @pytest.mark.parametrize("text", ["😀" * 5000, "line\n" * 5000, "x" * 5000])
    def test_it_fits_where_its_message_did(self, text: str, headers: int, free: int):
        """As percent-encoded headers, the longest form that a broker gives them."""
        attributes = {"note": "ü" * (headers // 2)}
        limits = Limits(message=1_000_000, letter_bytes=1024)
        before = OutboundMessage(b"x" * (1_000_000 - 3 * headers - free), b"ann", attributes)
        letter = self.letter(
            data=before.data, attributes=attributes, error=ValueError(text), reason=f"{text} failed", limits=limits
        )
        added = {name: text for name, text in letter.attributes.items() if name.startswith("dead-letter-")}
        assert headers_of(added) <= 3 * 1024 + free
        assert headers_of(letter.attributes) <= 64_000
        assert {"dead-letter-reason", "dead-letter-error"} <= added.keys()
        if free == 100_000 and headers < 16_384:
            assert len(added["dead-letter-error"].encode()) > 1020

    async def test_redrive_moves_it_back_as_it_was(self):
        sent = datetime(2025, 12, 31, tzinfo=UTC)
        async with broker.connect("inmem://streams-redrive") as bus:
            for topic in ("clicks-in", "letters"):
                await bus.admin.ensure_topic(topic, partitions=1)
            await bus.topic("letters").publish(self.letter(publish_time=sent))
            moved = await bus.admin.redrive("letters", to=["clicks-in"])
            assert moved.moved == 1
            (batch,) = [batch async for batch in bus.log.read("clicks-in", 0)]
            (record,) = batch
            assert (record.key, record.data, dict(record.attributes)) == (b"ann", b"\xff", {"trace": "1"})
            assert record.publish_time == sent

    def test_an_error_without_text_is_named(self):
        class Silent(Exception):
            def __str__(self):
                raise RuntimeError

        assert describe(Silent()) == "Silent, which has no text"
        assert self.letter(error=Silent()).attributes["dead-letter-error"] == "Silent, which has no text"


def test_stream_failed_says_where():
    cause = ValueError("bad")
    error = StreamFailed("on_click raised", topic="clicks-in", partition=3, offset=17, key="ann", native=cause)
    assert isinstance(error, BrokerError)
    assert (error.topic, error.partition, error.offset, error.key) == ("clicks-in", 3, 17, "ann")
    assert error.native is cause and not error.retriable
    assert "on_error=" in str(error)
