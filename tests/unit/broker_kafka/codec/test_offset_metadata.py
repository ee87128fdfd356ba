"""The metadata of an offset: lossless if it fits, else without the highest ranges; foreign text is ignored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker_kafka.codec.offset_metadata import LIMIT, decode, encode


def as_ranges(offsets: set[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = (ranges[-1][0], offset + 1)
        else:
            ranges.append((offset, offset + 1))
    return ranges


def as_offsets(ranges: list[tuple[int, int]]) -> set[int]:
    return {offset for start, stop in ranges for offset in range(start, stop)}


@given(st.integers(0, 2**62), st.sets(st.integers(1, 3000), max_size=400))
def test_metadata_that_fits_is_lossless(position: int, above: set[int]) -> None:
    finished = as_ranges({position + offset for offset in above})
    text, fullness = encode(position, finished)
    assert len(text) <= LIMIT
    assert fullness <= 1
    assert decode(position, text) == finished


@given(st.integers(0, 10**9), st.sets(st.integers(1, 100_000), max_size=300), st.integers(0, 200))
def test_shortened_metadata_keeps_the_lowest_ranges(position: int, above: set[int], limit: int) -> None:
    offsets = {position + offset for offset in above}
    text, fullness = encode(position, as_ranges(offsets), limit)
    kept = as_offsets(decode(position, text))
    assert len(text) <= limit
    assert kept <= offsets
    assert kept == set(sorted(offsets)[: len(kept)])
    assert (kept == offsets) == (fullness <= 1)


def test_ten_thousand_scattered_offsets_fit() -> None:
    finished = [(2 * number + 1, 2 * number + 2) for number in range(10_000)]
    text, fullness = encode(0, finished)
    assert decode(0, text) == finished
    assert fullness < 1


def test_overflowing_ranges_are_reported_and_dropped_from_the_top() -> None:
    finished = [(2 * number + 1, 2 * number + 2) for number in range(20_000)]
    text, fullness = encode(0, finished)
    assert fullness > 1
    kept = decode(0, text)
    assert len(kept) > 10_000
    assert kept == finished[: len(kept)]


@given(st.text(max_size=60))
def test_foreign_text_decodes_to_nothing(text: str) -> None:
    assert decode(7, text) == [] or text.startswith("abm1.7.")


@given(st.binary(max_size=40), st.sampled_from("brx"))
def test_damaged_text_is_read_without_an_error(body: bytes, kind: str) -> None:
    text, _ = encode(7, [(9, 12)])
    for damaged in (f"abm1.7.{kind}{body.decode('latin-1')}", text[:-1], text[:-3] + "~~~"):
        assert all(7 <= start < stop for start, stop in decode(7, damaged))


def test_metadata_of_another_position_is_ignored() -> None:
    text, _ = encode(7, [(9, 12)])
    assert decode(7, text) == [(9, 12)]
    assert decode(8, text) == []


def test_nothing_finished_is_empty_metadata() -> None:
    assert encode(7, []) == ("", 0.0)
    assert decode(7, "") == []
