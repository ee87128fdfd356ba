"""Names: portable or native; everything else is an InvalidName."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import InvalidName
from broker.names import NativeName, check_name, known_name, native_name


@pytest.mark.parametrize("name", ["abc", "Orders.v2_x-1", "a" * 200, native_name("a/b c")])
def test_a_portable_or_native_name_passes(name: str) -> None:
    assert check_name(name, "topic") is name


@pytest.mark.parametrize("name", ["", "ab", "1st", "a b", "a" * 201, "orders\n", "ä" * 5])
def test_another_name_is_refused_with_the_rules(name: str) -> None:
    with pytest.raises(InvalidName) as raised:
        check_name(name, "group")
    assert raised.value.message == f"group name {name!r} is not portable"
    assert "native_name" in raised.value.advice


@pytest.mark.parametrize("name", [5, None, b"orders", ["orders"]])
def test_a_name_that_is_not_a_str_is_refused_with_its_type(name: Any) -> None:
    with pytest.raises(InvalidName) as raised:
        check_name(name, "topic")
    assert str(raised.value) == f"topic name is {name!r} of type {type(name).__name__}. It takes a str"
    with pytest.raises(InvalidName, match="It takes a str"):
        native_name(name)


def test_a_native_name_is_not_empty() -> None:
    with pytest.raises(InvalidName, match="empty"):
        native_name("")
    assert isinstance(native_name("x"), NativeName)


@pytest.mark.parametrize("name", ["orders\0old", "\0", "orders\ud800"])
def test_a_native_name_has_no_control_or_unencodable_characters(name: str) -> None:
    with pytest.raises(InvalidName, match="NUL or a lone surrogate") as raised:
        native_name(name)
    assert repr(name) in raised.value.message


def test_a_known_name_is_native_unless_it_is_portable() -> None:
    assert type(known_name("orders")) is str
    for name in ("_schemas", "team/app 1"):
        assert isinstance(known_name(name), NativeName)
        assert check_name(known_name(name), "topic") == name
    with pytest.raises(InvalidName):
        known_name("")
