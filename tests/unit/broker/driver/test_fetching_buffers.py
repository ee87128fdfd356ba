"""Taking records from the buffer of a source."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from broker.driver.fetching import take_from
from broker.messages import Message
from tests.unit.broker.consuming.scripted_source import NONE, VIEW, Raw


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 10), st.integers(1, 100))
def test_take_respects_both_bounds_and_returns_at_least_one(
    sizes: list[int], max_messages: int, max_bytes: int
) -> None:
    messages = [Message("orders", None, Raw("1", None, 1, NONE), VIEW, None, size) for size in sizes]
    buffer = deque(messages)
    taken = take_from(buffer, max_messages, max_bytes)
    assert [*taken, *buffer] == messages
    assert 1 <= len(taken) <= max_messages
    assert len(taken) == 1 or sum(each.size for each in taken) <= max_bytes
    if buffer and len(taken) < max_messages:
        assert sum(each.size for each in taken) + buffer[0].size > max_bytes
