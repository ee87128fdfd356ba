"""Messages as Kafka records, and records as messages, without a broker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from confluent_kafka import Message
from hypothesis import example, given
from hypothesis import strategies as st

from broker.envelopes import DEAD_LETTER_PREFIX, RESERVED_PREFIX, RETRY_LETTER_PREFIX
from broker.outbound import OutboundMessage
from broker_kafka.codec.headers import RECORD_VIEW, encode_headers, encode_time

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)
RESERVED = (RESERVED_PREFIX, DEAD_LETTER_PREFIX, RETRY_LETTER_PREFIX)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: not name.startswith(RESERVED))
VALUES = st.text(st.characters(exclude_categories=["Cs"]))


def record(headers: list[tuple[str, bytes | None]], timestamp: tuple[int, int] = (1, 1000)) -> Message:
    return Message(topic="orders", partition=2, offset=7, value=b"v", headers=headers, timestamp=timestamp)  # pyright: ignore[reportArgumentType]


@given(st.dictionaries(NAMES, VALUES))
def test_attributes_come_back_equal(attributes: dict[str, str]) -> None:
    message = OutboundMessage(b"v", attributes=attributes)
    assert RECORD_VIEW.attributes(record(encode_headers(message))) == attributes


def test_a_plain_message_has_no_headers() -> None:
    assert encode_headers(OutboundMessage(b"v", key="k")) == []


def test_an_id_is_the_publishers_or_the_offset() -> None:
    assert RECORD_VIEW.id(record(encode_headers(OutboundMessage(b"v", id="é 1")))) == "é 1"
    assert RECORD_VIEW.id(record([])) == "orders:2:7"


def test_the_timestamp_has_milliseconds_and_a_header_the_rest() -> None:
    coarse = OutboundMessage(b"v", publish_time=NOW)
    fine = OutboundMessage(b"v", publish_time=NOW + timedelta(microseconds=9))
    for message in (coarse, fine):
        made = record(encode_headers(message), (1, encode_time(message)))
        assert RECORD_VIEW.publish_time(made) == message.publish_time
        assert RECORD_VIEW.broker_time(made) is None
    assert encode_headers(coarse) == []


@given(st.datetimes(timezones=st.just(UTC)))
@example(datetime(1960, 1, 1, tzinfo=UTC))
@example(datetime(1970, 1, 1, tzinfo=UTC))
@example(datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC))
def test_every_publish_time_comes_back_equal(time: datetime) -> None:
    message = OutboundMessage(b"v", publish_time=time)
    made = record(encode_headers(message), (1, encode_time(message)))
    assert RECORD_VIEW.publish_time(made) == time
    assert RECORD_VIEW.publish_times([made]) == [(time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)]


@given(st.integers(-(2**45), 2**48))
def test_every_timestamp_is_exact_to_the_millisecond(milliseconds: int) -> None:
    try:
        expected = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
    except OverflowError:
        expected = None
    assert RECORD_VIEW.publish_time(record([], (1, milliseconds))) == expected


def test_log_append_time_is_the_brokers() -> None:
    made = record([], (2, 1_500))
    assert RECORD_VIEW.broker_time(made) == datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)
    assert RECORD_VIEW.publish_time(made) is None


def test_a_forwarded_message_keeps_its_publish_time() -> None:
    message = OutboundMessage(b"v", publish_time=NOW, native=record([]))
    assert encode_time(message) == 0
    assert RECORD_VIEW.publish_time(record(encode_headers(message), (1, 5))) == NOW


def test_foreign_headers_are_forwarded_unless_their_name_was_removed() -> None:
    foreign = record(
        [("twice", b"1"), ("twice", b"2"), ("gone", b"1"), ("gone", b"2"), ("raw", b"\xff"), ("none", None)]
    )
    assert dict(RECORD_VIEW.attributes(foreign)) == {"twice": "2", "gone": "2"}
    message = OutboundMessage(b"v", attributes={"twice": "3"}, native=foreign)
    assert encode_headers(message) == [("twice", b"1"), ("raw", b"\xff"), ("none", None), ("twice", b"3")]


def test_hostile_reserved_headers_do_no_harm() -> None:
    made = record([("anybroker-time", b"soon"), ("anybroker-attributes", b"%zz&x&=nameless"), ("anybroker-id", None)])
    assert RECORD_VIEW.id(made) == "orders:2:7"
    assert dict(RECORD_VIEW.attributes(made)) == {}
    assert RECORD_VIEW.publish_time(made) is not None
