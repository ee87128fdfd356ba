"""Which ids of messages a publisher gave, whichever version or program wrote the message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker.outbound import OutboundMessage
from broker_servicebus.codec import VIEW, Raw, encode

UUID = "6a6e747e78574c308ac92eb3c5717bc8"


def received(message_id: str | None, properties: dict[bytes, Any]) -> Any:
    native: Any = SimpleNamespace(message_id=message_id, application_properties=properties, sequence_number=7)
    return Raw(native, 0.0)


@pytest.mark.parametrize("given", [None, "order-1", UUID, "x" * 200])
def test_ids_of_this_version(given: str | None) -> None:
    sent, identity = encode(OutboundMessage(b"x", id=given))
    properties = {str(name).encode(): value for name, value in (sent.application_properties or {}).items()}
    raw = received(sent.message_id, properties)
    assert (VIEW.id(raw), VIEW.given_id(raw)) == (identity, given)


@pytest.mark.parametrize(
    ("message_id", "properties", "given"),
    [
        (UUID, {b"anybroker-time": "1"}, None),
        ("order-1", {b"anybroker-time": "1"}, "order-1"),
        (UUID, {}, UUID),
        (None, {}, None),
    ],
    ids=["made by an older version", "given to an older version", "of a foreign program", "none"],
)
def test_ids_of_others(message_id: str | None, properties: dict[bytes, Any], given: str | None) -> None:
    assert VIEW.given_id(received(message_id, properties)) == given
