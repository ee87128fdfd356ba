"""What a partition takes of what the client hands over after a take-over, where deliveries follow on one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from broker.driver.contract import TopicPartition
from broker_pulsar.assigned_partition import AssignedPartition
from broker_pulsar.client import pulsar
from broker_pulsar.message_ids import pack

LEDGER = 7


class Delivered:
    """As much of the client's message as a partition looks at."""

    def __init__(self, entry: int, slot: int) -> None:
        self._id: Any = pulsar.MessageId(0, LEDGER, entry, slot - 1)

    def message_id(self) -> Any:
        return self._id

    def data(self) -> bytes:
        return b"x"

    def partition_key(self) -> str:
        return ""

    def properties(self) -> dict[str, str]:
        return {}


def taken_over(received: Sequence[tuple[int, int]], *, committed: int, first: int | None) -> AssignedPartition:
    """A partition that is ours anew, of which the client gave us something before; entries of the ledger."""
    partition = AssignedPartition(TopicPartition("t", 0), "member", None)
    partition.arrived([Delivered(*topic_partition) for topic_partition in received])
    partition.restart(pack(LEDGER, committed, 0), expected=None if first is None else pack(LEDGER, first, 0))
    partition.owned, partition.requested_at = True, 0
    return partition


def came(partition: AssignedPartition, *places: tuple[int, int]) -> list[tuple[int, int]]:
    """What is to be handed over after these came."""
    partition.arrived([Delivered(*topic_partition) for topic_partition in places])
    return [(record.offset >> 12 & 0xFFFFF, record.offset & 0xFFF) for record in partition.buffer]


@pytest.mark.parametrize("slots", [(0,), (1, 2)])
def test_the_rest_of_an_earlier_delivery_is_left_out(slots: tuple[int, ...]) -> None:
    partition = taken_over([(4, slots[-1])], committed=4, first=4)
    assert came(partition, *((5, slot) for slot in slots)) == []
    assert partition.misaligned
    whole = [(entry, slot) for entry in (4, 5) for slot in slots]
    assert came(partition, *whole) == whole
    assert not partition.misaligned


def test_a_batch_of_which_a_part_is_committed_begins_where_the_positions_fall() -> None:
    partition = taken_over([(4, 3)], committed=4, first=4)
    assert came(partition, (4, 4), (5, 0)) == []
    assert came(partition, (4, 3), (4, 4), (5, 0)) == [(4, 3), (4, 4), (5, 0)]


def test_a_second_delivery_alone_tells_where_both_begin() -> None:
    partition = taken_over([(6, 0)], committed=4, first=4)
    assert came(partition, (6, 0)) == []
    assert came(partition, (6, 0), (7, 0)) == [(6, 0), (7, 0)]


@pytest.mark.parametrize("first", [None, 5])
def test_what_was_not_received_yet_lacks_nothing(first: int | None) -> None:
    partition = taken_over([(3, 0)], committed=4, first=first)
    assert came(partition, (3, 0), (6, 2), (6, 3)) == [(6, 2), (6, 3)]
    assert not partition.misaligned


def test_a_new_member_waits_for_nothing() -> None:
    partition = taken_over([], committed=4, first=4)
    assert came(partition, (4, 3), (4, 4)) == [(4, 3), (4, 4)]


def test_what_does_not_come_is_asked_for_ever_more_rarely() -> None:
    partition = taken_over([(4, 1)], committed=4, first=4)
    assert [look for look in range(1, 20) if partition.needs_redelivery_request(1, 0)] == [2, 4, 8, 16]
    assert came(partition, (4, 0), (4, 1)) == [(4, 0), (4, 1)]
    assert not any(partition.needs_redelivery_request(1, 0) for _ in range(4)), (
        "what came is not committed yet, that is all"
    )


def test_where_nothing_is_to_come_nothing_is_asked_for() -> None:
    partition = taken_over([], committed=4, first=None)
    assert not any(partition.needs_redelivery_request(0, 0) for _ in range(4))
    assert [partition.needs_redelivery_request(1, 0) for _ in range(2)] == [False, True], "it has just been published"


def test_what_the_broker_has_begun_to_send_is_not_asked_for() -> None:
    """The client would drop both copies of a message of which chunks are under way."""
    partition = taken_over([(4, 1)], committed=4, first=4)
    partition.requested_at = 7
    assert not any(partition.needs_redelivery_request(1, 8) for _ in range(9))
    assert [partition.needs_redelivery_request(1, 7) for _ in range(2)] == [False, True]


def test_a_consumer_of_which_nothing_was_asked_is_not_asked_again() -> None:
    """To one that is new to it, of a seek or a reconnect, the broker sends by itself, and may be slow with it."""
    partition = taken_over([(4, 1)], committed=4, first=4)
    partition.keep("a")
    assert not any(partition.needs_redelivery_request(1, 0) for _ in range(9))


def test_what_is_astray_is_asked_for_at_each_look() -> None:
    partition = taken_over([(4, 3)], committed=4, first=4)
    came(partition, (4, 4))
    assert all(partition.needs_redelivery_request(1, 9) for _ in range(4))
