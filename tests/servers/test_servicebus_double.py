"""The parts of the Service Bus double that need neither proton nor a server: sections of messages and filters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.servers.servicebus.filters import Correlation, FilterRefused, Subject, parse_sql
from tests.servers.servicebus.sections import Sections, int_, is_batch, with_entries

TRUE: list[str] = [
    "1=1",
    "kind = 'a'",
    "kind <> 'b' and size >= 2",
    "size IN (1, 2, 3)",
    "kind LIKE 'a%' OR kind LIKE '_b'",
    "NOT (size < 2)",
    "missing IS NULL",
    "kind IS NOT NULL",
    "EXISTS(kind)",
    "sys.Label = 'made'",
    "[two words] = 'it''s'",
    "yes = true",
    "user.kind = 'a'",
]
FALSE: list[str] = ["1=0", "missing = 'a'", "missing <> 'a'", "NOT missing = 'a'", "size > 'a'", "kind NOT IN ('a')"]


def subject() -> Subject:
    user: dict[str, Any] = {"kind": "a", "size": 2, "two words": "it's", "yes": True}
    return Subject({"label": "made"}, user)


@pytest.mark.parametrize("expression", TRUE)
def test_filters_that_match(expression: str):
    assert parse_sql(expression)(subject())


@pytest.mark.parametrize("expression", FALSE)
def test_filters_that_do_not_match(expression: str):
    assert not parse_sql(expression)(subject())


@pytest.mark.parametrize(
    "expression", ["", "kind = ", "kind + 1 = 2", "kind", "(kind = 'a'", "newid() = 'a'", "kind ="]
)
def test_other_filters_are_refused(expression: str):
    with pytest.raises(FilterRefused):
        parse_sql(expression)


def test_correlation_filters_compare_all_properties():
    assert Correlation({"label": "made"}, {"size": "2"})(subject())
    assert not Correlation({"label": "other"}, {})(subject())
    assert not Correlation({}, {"missing": "2"})(subject())


def test_encoding_keeps_the_body_and_properties():
    body = b"\x00\x53\x75\xa0\x02hi"
    properties = b"\x00\x53\x73\xc0\x04\x01\xa1\x01m"
    raw = b"\x00\x53\x70\x45" + properties + body
    sections = Sections(raw)
    assert (sections.properties, sections.rest) == (properties, body)
    encoded = sections.encode(count=3, ttl=None, annotations={"x-opt-a": int_(7)}, application={"Why": "so"})
    again = Sections(encoded)
    assert (again.properties, again.rest) == (properties, body)
    assert b"x-opt-a" in again.annotations
    assert b"Why" in again.application


def test_maps_grow():
    small = b"\xc1\x07\x02\xa1\x01a\xa1\x01b"
    grown = with_entries(small, [b"\xa1\x01c\xa1\x01d"])
    assert int.from_bytes(grown[5:9], "big") == 4
    assert grown.endswith(b"\xa1\x01a\xa1\x01b\xa1\x01c\xa1\x01d")


def test_batches_are_distinguished_from_messages():
    message = b"\x00\x53\x75\xa0\x02hi"
    batch = b"\x00\x53\x75\xa0" + bytes([len(message)]) + message
    assert is_batch(batch) == [message]
    assert is_batch(message) is None
    assert is_batch(b"\x00\x53\x77\xa1\x02hi") is None
