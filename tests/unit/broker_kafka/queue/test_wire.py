"""Markers as bytes: V1 to the byte, V2 so that a V1 tracker can read it, and foreign bytes as no marker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker_kafka.queue import markers_pb2
from broker_kafka.queue.markers.start_writer import StartWriter, read_each
from broker_kafka.queue.markers.wire import (
    Content,
    Kind,
    Marker,
    MessageId,
    Origin,
    pack_markers,
    read_content,
    read_markers,
    write_marker,
)

FIRST = MessageId("", 1, 5)
FAR = MessageId("", 3, 2**40)

# Written by hand from the field numbers and values of kafka-mq-go's kafka_mq_v1.proto.
GOLDEN = {
    "START": (
        Marker(kind=Kind.START, id=FIRST, after_ms=60_000),
        Content(key=b"q", value=b"hello"),
        "1a 04 08 01 10 05 20 e0 d4 03 2a 01 71 32 05 68 65 6c 6c 6f",
    ),
    "START without a value": (
        Marker(kind=Kind.START, id=FIRST, after_ms=1),
        Content(key=b"q", value=b""),
        "1a 04 08 01 10 05 20 01 2a 01 71",
    ),
    "START of the first message": (
        Marker(kind=Kind.START, id=MessageId("", 0, 0), after_ms=300),
        Content(key=b"q", value=b"v"),
        "1a 00 20 ac 02 2a 01 71 32 01 76",
    ),
    "END": (Marker(kind=Kind.END, id=FIRST), None, "10 01 1a 04 08 01 10 05"),
    "END far on": (Marker(kind=Kind.END, id=FAR), None, "10 01 1a 09 08 03 10 80 80 80 80 80 20"),
    "KEEPALIVE": (
        Marker(kind=Kind.KEEPALIVE, id=FIRST, after_ms=60_000),
        None,
        "10 02 1a 04 08 01 10 05 20 e0 d4 03",
    ),
}


def read_marker(data: bytes | None) -> Marker | None:
    """What a record of one marker says."""
    ((marker, _),) = read_markers(data)
    return marker


texts = st.text(max_size=8)
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
topics = st.text("abyzAZ09._-", max_size=8).filter(lambda name: name not in (".", ".."))
queues = names.filter(lambda name: name.lstrip() == name)
ids = st.builds(MessageId, topics, st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), queues)
times = st.integers(0, 2**41)
starts = st.builds(
    Marker,
    kind=st.just(Kind.START),
    id=ids,
    after_ms=times,
    attempt=st.none() | st.integers(0, 2**32 - 1),
    released=st.booleans(),
    reason=texts,
) | st.builds(Marker, kind=st.just(Kind.START), id=ids, renews=times, as_of=times)
markers = starts | st.builds(
    Marker,
    kind=st.sampled_from([Kind.END, Kind.KEEPALIVE]),
    id=ids,
    after_ms=times,
    attempt=st.none() | st.integers(0, 2**32 - 1),
    released=st.booleans(),
    more=st.lists(st.integers(0, 2**63 - 1), max_size=3).map(tuple),
    reason=texts,
)
payloads = st.none() | st.binary(max_size=8)
headers = st.lists(st.tuples(texts, payloads), max_size=3).map(tuple)
contents = st.builds(
    Content,
    key=payloads,
    value=payloads,
    headers=headers,
    origin=st.none() | st.builds(Origin, texts, st.integers(0, 2**31 - 1), times, times),
    max_attempts=st.integers(0, 2**32 - 1),
    dead_letter=texts,
    holder=texts,
)


@pytest.mark.parametrize("name", GOLDEN)
def test_v1_is_written_to_the_byte(name: str) -> None:
    marker, content, golden = GOLDEN[name]
    assert write_marker(marker, content, v1=True).hex(" ") == golden


@pytest.mark.parametrize("name", GOLDEN)
def test_v1_is_read(name: str) -> None:
    marker, content, golden = GOLDEN[name]
    data = bytes.fromhex(golden)
    assert read_marker(data) == marker
    if content is not None:
        assert read_content(data) == content


def test_a_v1_marker_names_one_message() -> None:
    marker = Marker(kind=Kind.END, id=FIRST, more=(6,))
    with pytest.raises(ValueError, match="this one 2"):
        write_marker(marker, v1=True)


def test_v1_leaves_out_what_it_has_no_field_for() -> None:
    marker = Marker(kind=Kind.START, id=MessageId("orders", 1, 5), after_ms=60_000, attempt=3, released=True)
    content = Content(key=b"q", value=b"hello", headers=(("a", b"b"),), max_attempts=5, holder="me")
    assert write_marker(marker, content, v1=True).hex(" ") == GOLDEN["START"][2]


@given(markers, contents)
def test_v2_round_trip(marker: Marker, content: Content) -> None:
    data = write_marker(marker, content)
    assert read_marker(data) == marker
    assert read_content(data) == content


@given(st.lists(st.tuples(markers, contents), min_size=2, max_size=5))
def test_packed_markers_round_trip(written: list[tuple[Marker, Content]]) -> None:
    parts = [write_marker(marker, content) for marker, content in written]
    read = read_markers(pack_markers(parts))
    assert list(read) == list(zip([marker for marker, _ in written], parts, strict=True))


def test_an_unknown_packed_marker_hides_no_other() -> None:
    start = write_marker(Marker(kind=Kind.START, id=FIRST), Content())
    foreign = bytes.fromhex("10 07 1a 04 08 01 10 05")
    assert [marker is None for marker, _ in read_markers(pack_markers([foreign, start, b"\xff", start]))] == [
        True,
        False,
        True,
        False,
    ]


def test_a_v1_tracker_skips_packed_markers() -> None:
    raw = markers_pb2.Marker.FromString(pack_markers([b"x", b"y"]))
    assert (raw.type, raw.message_id.partition, raw.message_id.offset) == (markers_pb2.END, 0, -1)


def test_a_v1_tracker_reads_a_release_as_a_keepalive_of_that_delay() -> None:
    data = write_marker(Marker(kind=Kind.KEEPALIVE, id=FIRST, after_ms=1500, released=True, attempt=2, reason="later"))
    raw = markers_pb2.Marker.FromString(data)
    assert raw.type == markers_pb2.KEEPALIVE
    assert (raw.message_id.partition, raw.message_id.offset, raw.redeliver_after_ms) == (1, 5, 1500)


def test_the_fields_of_v1_have_their_numbers() -> None:
    fields = {field.name: field.number for field in markers_pb2.Marker.DESCRIPTOR.fields}
    v1 = ["version", "type", "message_id", "redeliver_after_ms", "key", "value"]
    assert [fields.pop(name) for name in v1] == [1, 2, 3, 4, 5, 6]
    assert min(fields.values()) == 7
    assert markers_pb2.Version.items() == [("V1", 0), ("V2", 1), ("V3", 2)]
    assert markers_pb2.Type.items() == [("START", 0), ("END", 1), ("KEEPALIVE", 2)]


def test_the_generated_code_is_that_of_the_committed_format() -> None:
    text = Path(markers_pb2.__file__).with_name("markers.proto").read_text()
    for name, body in re.findall(r"^(?:message|enum) (\w+) \{(.*?)^\}", text, re.DOTALL | re.MULTILINE):
        written = {(field, int(number)) for field, number in re.findall(r"(\w+) = (\d+);", body)}
        generated = getattr(markers_pb2, name)
        fields = generated.DESCRIPTOR.fields if hasattr(generated.DESCRIPTOR, "fields") else generated.DESCRIPTOR.values
        assert {(field.name, field.number) for field in fields} == written


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"\xff\xff\xff",
        b"hello",
        bytes.fromhex("10 01"),
        bytes.fromhex("10 07 1a 04 08 01 10 05"),
        bytes.fromhex("08 09 1a 04 08 01 10 05"),
        write_marker(Marker(kind=Kind.START, id=MessageId("a\0b", 0, 1))),
        write_marker(Marker(kind=Kind.START, id=MessageId("a" * 250, 0, 1))),
        write_marker(Marker(kind=Kind.START, id=MessageId("no topic", 0, 1))),
        write_marker(Marker(kind=Kind.START, id=MessageId("..", 0, 1))),
        write_marker(Marker(kind=Kind.START, id=MessageId("a", 0, 1, "q\0"))),
        write_marker(Marker(kind=Kind.START, id=MessageId("a", 0, 1, "é" * 16_001))),
        write_marker(Marker(kind=Kind.START, id=MessageId("a", 0, 1, " q"))),
    ],
    ids=[
        "none",
        "empty",
        "garbage",
        "text",
        "no id",
        "another kind",
        "another version",
        "no name of a topic",
        "too long a topic",
        "letters of no topic",
        "a folder",
        "no name of a queue",
        "too long a queue",
        "white space before a queue",
    ],
)
def test_unknown_bytes_are_no_marker(data: bytes | None) -> None:
    assert read_marker(data) is None


def test_the_longest_names_are_valid() -> None:
    marker = Marker(kind=Kind.START, id=MessageId("a" * 249, 0, 1, "é" * 16_000))
    assert read_marker(write_marker(marker)) == marker


@given(st.binary(max_size=40))
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    marker = read_marker(data)
    assert marker is None or marker.kind in Kind


def test_a_delay_is_cut_to_a_hundred_years() -> None:
    marker = read_marker(write_marker(Marker(kind=Kind.START, id=FIRST, after_ms=2**64 - 1)))
    assert marker is not None
    assert marker.after_ms < 2**42


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**63 - 1),
            st.integers(1, 2**31),
            st.none() | st.binary(max_size=4),
            st.none() | st.binary(max_size=4),
            st.lists(st.tuples(texts, st.none() | st.binary(max_size=4)), max_size=2).map(tuple),
            st.none() | st.builds(Origin, texts, st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), times),
            times,
            st.integers(0, 90_000),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_start_writer_equals_write_marker(starts: list[tuple[Any, ...]]) -> None:
    """Whatever was written with the writer before."""
    writer = StartWriter("t", 3, "q", lease_ms=30_000, holder="me", max_attempts=5, dead_letter="d")
    for offset, attempt, key, value, headers, origin, time, wait in starts:
        first = origin or Origin("t", 3, offset, time)
        marker = Marker(kind=Kind.START, id=MessageId("t", 3, offset, "q"), after_ms=30_000, attempt=attempt)
        shared: dict[str, Any] = {"holder": "me", "max_attempts": 5, "dead_letter": "d"}
        content = Content(key=key, value=value, headers=headers, origin=first, **shared)
        if origin is None and not headers and key is not None and value is not None:
            data = writer.plain(offset, attempt, key, value, time)
        else:
            marker = replace(marker, after_ms=wait or 30_000, released=wait > 0)
            data = writer.write(offset, attempt, key, value, headers, first, wait_ms=wait)
        assert data == write_marker(marker, content)


@given(
    st.dictionaries(
        st.integers(0, 2**63 - 1),
        st.tuples(st.binary(max_size=4), st.binary(max_size=4), st.integers(0, 2**63 - 1), headers),
        min_size=2,
        max_size=5,
    ),
    st.booleans(),
    st.booleans(),
)
def test_starts_written_together_equal_single_ones(
    messages: dict[int, tuple[bytes, bytes, int, Any]], keyed: bool, headed: bool
) -> None:
    writer = StartWriter("t", 3, "q", lease_ms=30_000, holder="me", max_attempts=5, dead_letter="d")
    keys, values, times, lists = zip(*messages.values(), strict=True)
    columns = [
        markers_pb2.HeaderList(headers=[markers_pb2.Header(name=name, value=value) for name, value in each])
        for each in lists
    ]
    record = writer.together(list(messages), keys if keyed else (), values, times, columns if headed else ())
    ((marker, data),) = read_markers(record)
    assert marker is not None
    assert [each.offset for each in marker.ids()] == list(messages)
    assert read_content(data).holder == "me"
    found = list(read_each(marker, data, messages))
    assert len(found) == len(messages)
    for (start, part), (offset, (key, value, time, its_headers)) in zip(found, messages.items(), strict=True):
        assert read_marker(part) == start
        assert start == Marker(kind=Kind.START, id=MessageId("t", 3, offset, "q"), after_ms=30_000, attempt=1)
        origin = Origin("t", 3, offset, time)
        assert part == writer.write(offset, 1, key if keyed else None, value, its_headers if headed else (), origin)
    assert [start.id.offset for start, _ in read_each(marker, data, {min(messages)})] == [min(messages)]


def three_starts() -> markers_pb2.Marker:
    """STARTs of three messages, with all that they can have."""
    writer = StartWriter("t", 3, "q", lease_ms=30_000, holder="me")
    lists = [markers_pb2.HeaderList()] * 3
    ((marker, data),) = read_markers(writer.together([1, 2, 3], (b"k",) * 3, (b"v",) * 3, (1, 2, 3), lists))
    assert marker is not None
    return markers_pb2.Marker.FromString(data)


@pytest.mark.parametrize("column", ["more_offsets", "values", "times", "keys", "headers_of"])
def test_starts_with_an_incomplete_column_are_no_marker(column: str) -> None:
    raw = three_starts()
    del getattr(raw, column)[1:]
    assert read_marker(raw.SerializeToString()) is None


@pytest.mark.parametrize(("field", "value"), [("type", Kind.END), ("type", Kind.KEEPALIVE), ("version", 3)])
def test_starts_of_another_kind_or_version_are_no_marker(field: str, value: int) -> None:
    raw = three_starts()
    setattr(raw, field, int(value))
    assert read_marker(raw.SerializeToString()) is None


def test_a_v1_tracker_skips_starts_written_together() -> None:
    writer = StartWriter("t", 3, "q", lease_ms=30_000, holder="me")
    raw = markers_pb2.Marker.FromString(writer.together([1, 2], (), (b"a", b"b"), (0, 0), ()))
    assert (raw.type, raw.message_id.partition, raw.message_id.offset) == (markers_pb2.END, 0, -1)
