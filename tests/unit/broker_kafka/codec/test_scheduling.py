"""The header with the due time of a message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from broker.errors import InvalidMessage
from broker.outbound import OutboundMessage
from broker_kafka.codec.headers import DUE, due_of, encode_due, encode_headers

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("moment", "due"),
    [
        (EPOCH + timedelta(milliseconds=1_500), 1_500),
        (EPOCH + timedelta(milliseconds=1_500, microseconds=1), 1_501),
        (datetime(1970, 1, 1, 2, 0, 1, tzinfo=timezone(timedelta(hours=2))), 1_000),
        (EPOCH - timedelta(days=1), 0),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=14))), 0),
    ],
)
def test_no_message_is_due_early(moment: datetime, due: int) -> None:
    assert due_of(((DUE, encode_due(moment, NOW)),)) == due


def test_the_header_has_the_due_time() -> None:
    moment = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    headers = tuple(encode_headers(OutboundMessage(b"v", attributes={"a": "b"}, deliver_at=moment)))
    assert EPOCH + timedelta(milliseconds=due_of(headers)) == moment


@pytest.mark.parametrize("ahead", [timedelta(days=30, microseconds=1), datetime.max.replace(tzinfo=UTC) - NOW])
def test_delays_above_a_month_are_rejected(ahead: timedelta) -> None:
    assert encode_due(NOW + timedelta(days=30), NOW)
    with pytest.raises(InvalidMessage, match=r"deliver_at is .* 30 days"):
        encode_due(NOW + ahead, NOW)


@pytest.mark.parametrize("value", [None, b"", b"-1", b"soon", b"1.5", b"9" * 40])
def test_a_foreign_header_is_ignored(value: bytes | None) -> None:
    assert due_of(((DUE, value),)) == 0
