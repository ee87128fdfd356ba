"""Output is safe for terminals, exact for programs, and never loses bytes."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest

from broker import errors
from broker.cli.arguments import parse_duration, parse_start
from broker.cli.errors import advice_of, error_line
from broker.cli.output import escaped, json_line, show_table
from broker.cli.rendering import bytes_field, native_rows, printable, timestamp


def test_binary_values_are_base64_under_another_name():
    assert bytes_field("data", "é".encode()) == {"data": "é"}
    assert bytes_field("data", b"\xff\x00") == {"data_base64": "/wA="}
    assert bytes_field("key", None) == {"key": None}
    assert bytes_field("key", b"") == {"key": ""}


def test_control_characters_do_not_reach_the_terminal():
    assert printable(b"a\x1b[2Jb\nc\x00") == r"a\x1b[2Jb\nc\x00"
    assert escaped("tab\there\u202e") == r"tab\there\u202e"
    assert printable(b"\xff") == "base64:/w=="
    assert printable(None) == "-"
    assert printable(b"x" * 100, 10) == "x" * 9 + "…"


def test_native_fields_are_a_row_per_entry():
    native = {"state": {"b": 1, "a": {"deep": [1], 3: "n"}}, "empty": {}, "config": None}
    assert native_rows(native) == [
        ("native.config", None),
        ("native.empty", {}),
        ("native.state.a.3", "n"),
        ("native.state.a.deep", [1]),
        ("native.state.b", 1),
    ]
    assert native_rows({}) == []


def test_a_table_in_a_pipe_is_neither_folded_nor_padded(capsys):
    assert show_table(("FIELD", "VALUE"), [("a", "x" * 500), ("b", "y"), ("c", None)])
    assert capsys.readouterr().out.splitlines() == ["FIELD  VALUE", f"a      {'x' * 500}", "b      y", "c      -"]
    assert not show_table(("FIELD",), [])


def test_a_json_line_is_one_line_of_utf8():
    line = json_line({"data": "a\nb é", "n": 1})
    assert line.count(b"\n") == 1
    assert "é".encode() in line


def test_times():
    assert timestamp(datetime(2030, 1, 1, 12, tzinfo=UTC)) == "2030-01-01T12:00:00Z"
    assert timestamp(None) is None
    assert timestamp(datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))) is None
    assert parse_duration("90").total_seconds() == 90
    assert parse_duration("1.5h").total_seconds() == 5400
    assert parse_duration("7d").days == 7
    assert parse_start("latest") == "latest"


@pytest.mark.parametrize("wrong", ["", "0s", "-1h", "5 parsecs", "h"])
def test_an_invalid_duration(wrong: str):
    with pytest.raises(Exception, match="not a duration"):
        parse_duration(wrong)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.BrokerError) and kind is not errors.PublishError
    ],
)
def test_the_default_advice_of_an_error_names_no_python(kind: type[errors.BrokerError]):
    advice = advice_of(kind("The message"))
    assert not re.search(r"\w\(|\bbus\.|\bawait\b|max_lease", advice), advice
    assert bool(advice) == bool(kind.default_advice)


@pytest.mark.parametrize(
    ("advice", "shown"),
    [
        ("Use another name, or set queue=offsets", "Use another name, or set queue=offsets"),
        ("Delete it: `await bus.admin.delete_group('old')`", "Delete it: `broker groups delete 'old'`"),
        ("Stop its consumers and delete it: bus.admin.delete_group('a b')", "`broker groups delete 'a b'`"),
        ("Give retry=Retry(...) alone", ""),
        ("See `await bus.admin.groups()`, or `broker groups list`", "See `broker groups list`"),
        (
            "Call bus.admin.ensure_topic('t', **{'retention.ms': '-1'}), or set these options with kafka-configs",
            "Set {'retention.ms': '-1'} with kafka-configs",
        ),
        ("Call bus.admin.ensure_topic('t', max_message_bytes=9), or set more", "max.message.bytes of the topic to 9"),
        ("Use a body with to_json(struct('*'))", "Use a body with to_json(struct('*'))"),
    ],
)
def test_an_advice_names_commands_for_python_calls(advice: str, shown: str):
    error = errors.BrokerError("No", advice=advice)
    assert shown in advice_of(error)
    assert bool(shown) == bool(advice_of(error))
    assert "bus." not in error_line(error)
