"""Limits that are checked before sending, and their errors."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from broker.capabilities import Capabilities, Limits, PublishCapabilities
from broker.driver.limits import MessageLimits, message_size
from broker.errors import BrokerError, InvalidMessage, MessageTooLarge, Unsupported
from broker.outbound import OutboundMessage

LIMITS = Limits(body=10, key=4, id=5, attribute_key=6, attribute_value=7, attributes=2, message=19)


def limits_of(limits: Limits = LIMITS, ability: str | None = None) -> MessageLimits:
    publish = PublishCapabilities(limits=limits)
    return MessageLimits(Capabilities(backend="test", publish=replace(publish, **({ability: True} if ability else {}))))


@pytest.mark.parametrize(
    "message",
    [
        OutboundMessage(b"x" * 10),
        OutboundMessage(b"", key=b"kkkk"),
        OutboundMessage(b"", key=b""),
        OutboundMessage(b"", id="éé1"),
        OutboundMessage(b"", attributes={"a" * 6: "v" * 7}),
        OutboundMessage(b"", attributes={"a": "1", "b": "2"}),
        OutboundMessage(b"x" * 10, key=b"kkkk", id="iiiii", attributes={"a": "4444"}),
    ],
)
def test_largest_message_passes_and_is_measured(message: OutboundMessage) -> None:
    assert limits_of().check(message) == message_size(message)


@pytest.mark.parametrize(
    ("message", "kind", "field", "actual", "allowed"),
    [
        (OutboundMessage(b"x" * 11), MessageTooLarge, "Body", 11, 10),
        (OutboundMessage(b"", key=b"kkkkk"), MessageTooLarge, "Key", 5, 4),
        (OutboundMessage(b"", id="ééé"), MessageTooLarge, "Id", 6, 5),
        (OutboundMessage(b"", attributes={"a" * 7: ""}), MessageTooLarge, "Attribute name 'aaaaaaa'", 7, 6),
        (OutboundMessage(b"", attributes={"trace": "ü" * 4}), MessageTooLarge, "Attribute 'trace'", 8, 7),
        (OutboundMessage(b"", attributes={"a": "", "b": "", "c": ""}), InvalidMessage, "attributes", 3, 2),
        (OutboundMessage(b"x" * 10, "kkkk", {"a": "55555"}, "iiiii"), MessageTooLarge, "together", 20, 19),
    ],
)
def test_refusal_names_field_actual_and_allowed(
    message: OutboundMessage, kind: type[BrokerError], field: str, actual: int, allowed: int
) -> None:
    with pytest.raises(kind) as raised:
        limits_of().check(message)
    text = raised.value.message
    assert field in text
    assert str(actual) in text.split(";")[0]
    assert str(allowed) in text.split(";")[1]
    assert not raised.value.retriable


@pytest.mark.parametrize(
    ("message", "ability"),
    [
        (OutboundMessage(None), "tombstones"),
        (OutboundMessage(b"", deliver_at=datetime.now(UTC)), "deliver_at"),
        (OutboundMessage(b"", ttl=1.0), "ttl"),
        (OutboundMessage(b"", partition=0), "partitions"),
    ],
)
def test_an_option_that_the_backend_lacks_is_refused(message: OutboundMessage, ability: str) -> None:
    with pytest.raises(Unsupported, match=ability.rstrip("s")):
        limits_of().check(message)
    assert limits_of(ability=ability).check(message) == 0


def test_a_refusal_names_the_setting_that_causes_it() -> None:
    needed = {"publish.partitions": "shared=true, which is false here"}
    limits = MessageLimits(Capabilities(backend="test", publish=PublishCapabilities(), settings_needed=needed))
    with pytest.raises(Unsupported, match="partition; it takes shared=true, which is false here"):
        limits.check(OutboundMessage(b"", partition=0))
    with pytest.raises(Unsupported) as raised:
        limits.check(OutboundMessage(b"", ttl=1.0))
    assert "shared" not in raised.value.message


def test_without_limits_everything_passes() -> None:
    message = OutboundMessage(b"x" * 100_000, "k" * 1000, {str(n): "v" * 100 for n in range(100)}, "i" * 1000)
    assert limits_of(Limits()).check(message) == message_size(message) > 111_000
