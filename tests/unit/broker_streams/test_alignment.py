"""The order in which the topics of a partition are handled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_streams.alignment import Alignment
from broker_streams.context import Incoming


def messages(topic: str, *times: int | None, first: int = 0) -> list[Incoming]:
    return [Incoming(topic, first + n, b"", b"", time) for n, time in enumerate(times)]


def times(found: list[Incoming]) -> list[tuple[str, int | None]]:
    return [(each.topic, each.timestamp_ms) for each in found]


def test_one_topic_is_never_held_back():
    alignment = Alignment(["a"])
    alignment.add(messages("a", 5, 3, None))
    assert times(alignment.ready(0)) == [("a", 5), ("a", 3), ("a", None)]
    assert alignment.ready(0) == []
    assert len(alignment) == 0


def test_topics_are_merged_by_time():
    alignment = Alignment(["a", "b", "c"])
    alignment.ends({"a": 3, "b": 2, "c": 0})
    alignment.add(messages("b", 2, 4))
    assert alignment.ready(0) == []
    assert alignment.waiting == ["a"]
    alignment.add(messages("a", 1, 4, 9))
    assert times(alignment.ready(0)) == [("a", 1), ("b", 2), ("a", 4), ("b", 4), ("a", 9)]
    assert (alignment.waiting, alignment.deadline, len(alignment)) == ([], None, 0)


def test_a_topic_is_waited_for_until_it_reached_its_end():
    alignment = Alignment(["a", "b"])
    alignment.ends({"a": 4, "b": 2})
    alignment.add(messages("a", 1, 2))
    alignment.add(messages("b", 1, 5))
    assert times(alignment.ready(0)) == [("a", 1), ("b", 1), ("a", 2)]
    assert alignment.waiting == ["a"]
    alignment.add(messages("a", 3, 4, first=2))
    assert times(alignment.ready(0)) == [("a", 3), ("a", 4), ("b", 5)]
    alignment.add(messages("b", 9, first=2))
    assert times(alignment.ready(0)) == [("b", 9)]


def test_an_end_behind_the_last_message_may_be_reached():
    alignment = Alignment(["a", "b"])
    alignment.ends({"a": 3, "b": 7})
    alignment.add(messages("a", 1))
    assert alignment.ready(0) == []
    alignment.reached({"b": 7})
    assert times(alignment.ready(0)) == [("a", 1)]
    assert alignment.waiting == ["a"]
    alignment.reached({"a": 3})
    assert alignment.waiting == []


def test_patience_ends_a_wait():
    alignment = Alignment(["a", "b"], patience=5)
    alignment.add(messages("a", 1, 2))
    assert alignment.ready(100) == []
    assert alignment.deadline == 105
    assert alignment.ready(104.9) == []
    assert times(alignment.ready(105)) == [("a", 1), ("a", 2)]
    alignment.add(messages("a", 3, first=2))
    assert alignment.ready(106) == []
    assert alignment.deadline == 111


def test_the_buffer_is_bounded():
    alignment = Alignment(["a", "b"], limit=3)
    alignment.add(messages("a", 1, 2, 3, 4, 5))
    assert times(alignment.ready(0)) == [("a", 1), ("a", 2)]
    assert len(alignment) == 3


def test_a_message_without_a_time_follows_the_one_before():
    alignment = Alignment(["a", "b"])
    alignment.ends({"a": 3, "b": 3})
    alignment.add(messages("a", None, 5, None))
    alignment.add(messages("b", 4, None, 6))
    assert times(alignment.ready(0)) == [("a", None), ("b", 4), ("b", None), ("a", 5), ("a", None), ("b", 6)]


def test_clear_forgets_what_is_buffered():
    alignment = Alignment(["a", "b"])
    alignment.ends({"a": 2, "b": 1})
    alignment.add(messages("a", 1, 2))
    assert alignment.ready(0) == []
    alignment.clear()
    assert (len(alignment), alignment.deadline, alignment.waiting) == (0, None, ["a", "b"])
    alignment.add([*messages("a", 1, 2), *messages("b", 1)])
    assert len(alignment.ready(0)) == 3


def test_a_topic_of_another_partition():
    with pytest.raises(KeyError):
        Alignment(["a"]).add(messages("b", 1))


@given(
    st.lists(st.lists(st.none() | st.integers(0, 20), max_size=12), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_the_order_does_not_depend_on_how_messages_arrive(lanes, random):
    names = [f"topic-{n}" for n in range(len(lanes))]

    def merged(*, whole: bool) -> list[Incoming]:
        alignment = Alignment(names)
        alignment.ends({name: len(lane) for name, lane in zip(names, lanes, strict=True)})
        rest = {name: messages(name, *lane) for name, lane in zip(names, lanes, strict=True)}
        found: list[Incoming] = []
        while any(rest.values()):
            name = random.choice([name for name, left in rest.items() if left])
            count = len(rest[name]) if whole else random.randint(1, len(rest[name]))
            alignment.add(rest[name][:count])
            rest[name] = rest[name][count:]
            found += alignment.ready(0)
        return found

    found = merged(whole=False)
    assert found == merged(whole=True)
    for name, lane in zip(names, lanes, strict=True):
        assert [each for each in found if each.topic == name] == messages(name, *lane)
    known = [[time for time in lane if time is not None] for lane in lanes]
    if known == lanes and all(lane == sorted(lane) for lane in known):
        assert [each.timestamp_ms for each in found] == sorted(time for lane in known for time in lane)
