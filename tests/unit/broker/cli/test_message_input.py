"""Lines of input become messages, or an error that names the line, the field and what to do."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime

import pytest

from broker.cli.errors import Exit, Failure
from broker.cli.message_input import BadLine, Common, from_json_lines, from_lines, parse_attributes, parse_json
from broker.cli.streams import Source


def parse(line: str | bytes, **common):
    return parse_json(line.encode() if isinstance(line, str) else line, 7, Common(**common))


def test_every_field_of_a_line_reaches_the_message():
    message = parse(
        '{"data": "héllo", "key": "42", "attributes": {"type": "created"}, "id": "a-1", "ttl": 60,'
        ' "publish_time": "2030-01-31T12:00:00Z", "deliver_at": "2030-02-01T00:00:00+02:00"}'
    )
    assert message.data == "héllo".encode()
    assert message.key == b"42"
    assert message.attributes == {"type": "created"}
    assert message.id == "a-1"
    assert message.ttl == 60
    assert message.publish_time == datetime(2030, 1, 31, 12, tzinfo=UTC)
    assert message.deliver_at == datetime(2030, 1, 31, 22, tzinfo=UTC)


def test_a_publish_time_can_be_kept_as_an_attribute():
    line = '{"data": "x", "attributes": {"type": "created"}, "publish_time": "2020-01-01T02:00:00+02:00"}'
    message = parse(line, publish_time_as="published", attributes={"source": "archive"})
    assert message.publish_time is None
    assert message.attributes == {"source": "archive", "type": "created", "published": "2020-01-01T00:00:00Z"}
    # What an earlier copy kept is older.
    line = '{"data": "x", "attributes": {"published": "2019-01-01T00:00:00Z"}, "publish_time": "2020-01-01T00:00:00Z"}'
    assert parse(line, publish_time_as="published").attributes == {"published": "2019-01-01T00:00:00Z"}
    assert parse('{"data": "x"}', publish_time_as="published").attributes == {}


@pytest.mark.parametrize(
    ("line", "data"),
    [
        ('{"data": null}', None),
        ('{"data": ""}', b""),
        ('{"payload": {"a": [1, "é"]}}', '{"a": [1, "é"]}'.encode()),
        ('{"payload": null}', b"null"),
        ('{"payload": "text"}', b'"text"'),
        ('{"data_base64": "/wA="}', b"\xff\x00"),
    ],
)
def test_bodies(line: str, data: bytes | None):
    assert parse(line).data == data


@pytest.mark.parametrize(
    "text",
    [
        "1e400",
        "-1E-400",
        "0.1000000000000000055",
        "1.50",
        "9" * 5000,
        '{"a":1,"a":2}',
        '{ "a" : [1, 2.0],"b":"\\u00e9\\/" }',
        '{"payload": 1, "payload": {"data": 2}}',
        "[" * 200 + "]" * 200,
        "18446744073709551616",
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize("line", ['{"payload": %s}', '{"key": "payload", "payload":%s , "id": "1"}\r'])
def test_the_text_of_a_payload_is_published_as_it_stands(line: str, text: str):
    assert parse(line % text).data == text.encode()


def test_position_fields_of_consume_are_ignored():
    line = '{"topic": "old", "partition": 3, "offset": 9, "broker_time": "x", "delivery_attempt": 2, "data": "d"}'
    assert parse(line).partition is None


def test_a_line_overrides_the_options_and_attributes_are_merged():
    message = parse(
        '{"data": "d", "key": "own", "attributes": {"a": "own"}}', key="common", attributes={"a": "1", "b": "2"}
    )
    assert message.key == b"own"
    assert message.attributes == {"a": "own", "b": "2"}
    assert parse('{"data": "d", "key": null}', key="common").key is None
    assert parse('{"data": "d"}', key="common").key == b"common"


@pytest.mark.parametrize(
    ("line", "field", "says"),
    [
        ("{", None, "not JSON"),
        (b'{"data": "\xff"}', None, "not UTF-8"),
        ("[1]", None, "a list, not an object"),
        ("{}", "data", "missing"),
        ('{"dta": "x"}', "dta", "Did you mean 'data'?"),
        ('{"data": "x", "payload": 1}', "payload", "together with 'data'"),
        ('{"data": 3}', "data", 'use "payload"'),
        ('{"data_base64": "?"}', "data_base64", "not base64"),
        ('{"data": "\\ud800"}', "data", "lone surrogate"),
        ('{"data": "x", "key": 42}', "key", 'Write it as text: "42"'),
        ('{"data": "x", "attributes": {"n": 3}}', "attributes.n", 'Write it as text: "3"'),
        ('{"data": "x", "attributes": []}', "attributes", "not an object"),
        ('{"data": "x", "attributes": {"anybroker-key": "v"}}', None, "reserved prefix"),
        ('{"data": "x", "id": ""}', None, "id is ''"),
        ('{"data": "x", "ttl": "5"}', "ttl", "number of seconds"),
        ('{"data": "x", "ttl": true}', "ttl", "number of seconds"),
        ('{"data": "x", "ttl": -1}', "ttl", "-1 is not a number of seconds"),
        ('{"data": "x", "ttl": 1e400}', None, "ttl is inf"),
        ('{"data": "x", "ttl": %s}' % ("9" * 350), "ttl", "too many digits"),
        ('{"data": "x", "ttl": %s}' % ("9" * 5000), None, "ttl is inf"),
        ('{"data": %s}' % ("9" * 5000), "data", "a number, not text"),
        ('{"data": "x", "key": %s}' % ("9" * 5000), "key", "a number, not text. Write it as text"),
        ('{"data": "x", "key": %s}' % ("[" * 900 + "]" * 900), "key", "a list, not text. Write it as text"),
        ("[" * 200_000, None, "nested too deeply"),
        ('{"payload": %s}' % ("[" * 200_000 + "]" * 200_000), None, "nested too deeply"),
        ('{"payload": ' + '{"a":' * 200_000, None, "nested too deeply"),
        ('{"payload": [NaN]}', None, "NaN is no JSON value"),
        ('{"payload": -Infinity}', None, "-Infinity is no JSON value"),
        ('{"payload": "\\ud800"}', "payload", "lone surrogate"),
        ('{"data": "x", "data": "y"}', "data", "given twice"),
        ('{"payload": 1, "id": "a", "payload": 1}', "payload", "given twice"),
        ('{"data": "x", "attributes": {"a": "1", "b": "2", "a": "3"}}', "attributes.a", "given twice"),
        ('{"data": "x", "deliver_at": "soon"}', "deliver_at", "not a time"),
        ('{"data": "x", "deliver_at": "2030-01-01T00:00:00"}', "deliver_at", "no timezone"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_bad_line_names_its_number_the_field_and_the_fix(line: str | bytes, field: str | None, says: str):
    with pytest.raises(BadLine) as caught:
        parse(line)
    error = caught.value
    assert error.line == 7
    assert error.field == field
    assert "Line 7" in error.message
    assert says in f"{error.message}. {error.advice}"
    assert error.advice
    assert error.code == Exit.NOT_PUBLISHED


async def collect(items):
    return [item async for item in items]


async def test_lines_are_numbered_across_reads_and_blank_ones_skipped():
    big = "x" * 70_000
    source = Source(io.BytesIO(f'{{"data": "{big}"}}\n\n  \nnope\n{{"data": "last"}}'.encode()))
    items = await collect(from_json_lines(source, Common()))
    assert [item.line for item in items] == [1, 4, 5]
    assert isinstance(items[1].message, BadLine)
    assert items[0].message.data == big.encode()
    assert items[2].message.data == b"last"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_json_lines_in_utf_16_are_refused_before_the_first(encoding: str):
    lines = '{"data": "1"}\n{"data": "2"}\n'.encode(encoding)
    with pytest.raises(Failure, match="The input is UTF-16") as caught:
        await anext(from_json_lines(Source(io.BytesIO(lines)), Common()))
    assert "iconv" in caught.value.advice
    assert caught.value.code == Exit.NOT_PUBLISHED


async def test_lines_in_utf_16_are_refused_before_the_first():
    with pytest.raises(Failure, match="The input is UTF-16"):
        await anext(from_lines(Source(io.BytesIO("one\ntwo\n".encode("utf-16"))), Common()))


async def test_a_mark_of_utf_8_before_the_first_line_is_skipped():
    items = await collect(from_json_lines(Source(io.BytesIO(b'\xef\xbb\xbf{"data": "1"}\r\n{"data": "2"}')), Common()))
    assert [item.message.data for item in items] == [b"1", b"2"]


async def test_plain_lines_are_bytes_and_an_empty_line_is_an_empty_message():
    items = await collect(from_lines(Source(io.BytesIO(b"a\n\n\xff\r\nlast")), Common()))
    assert [item.message.data for item in items] == [b"a", b"", b"\xff\r", b"last"]


def test_attributes_of_the_option():
    assert parse_attributes(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for wrong in ("a", "=1"):
        with pytest.raises(Failure, match="not name=value"):
            parse_attributes([wrong])
    with pytest.raises(Failure, match="'a' is given twice"):
        parse_attributes(["a=1", "b=2", "a=1"])


def test_what_consume_prints_can_be_published_again():
    from broker.cli.rendering import envelope_json
    from broker.outbound import OutboundMessage
    from broker.records import Record

    class Seen:
        def __init__(self, message: OutboundMessage) -> None:
            self.message = message

        def id(self, raw):
            return "r-1"

        def key(self, raw):
            return self.message.key

        def native(self, raw):
            return None

        def delivery_attempt(self, raw):
            return None

        def attributes(self, raw):
            return self.message.attributes

        def publish_time(self, raw):
            return datetime(2030, 1, 1, tzinfo=UTC)

        def broker_time(self, raw):
            return None

    original = OutboundMessage(b"\xff\xfe", key=b"\x80", attributes={"naïve": "yes"})
    record = Record("topic", 1, 5, original.key, original.data, None, Seen(original))
    copy = parse(json.dumps(envelope_json(record)))
    assert (copy.data, copy.key, dict(copy.attributes), copy.id) == (b"\xff\xfe", b"\x80", {"naïve": "yes"}, "r-1")
