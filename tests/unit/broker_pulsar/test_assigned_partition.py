"""One partition of a record group: which deliveries it accepts after an assignment, and how assignments change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from broker.driver.contract import TopicPartition
from broker_pulsar.assigned_partition import AssignedPartition, Change, PartitionState
from broker_pulsar.client import pulsar
from broker_pulsar.message_ids import pack
from broker_pulsar.subscriptions import OWNER, RELEASED

LEDGER = 7
NO_RECEIVER: Any = None


class NativeMessage:
    """The part of the client's message that a partition reads."""

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


def reassigned(received: Sequence[tuple[int, int]], *, committed: int, first: int | None) -> AssignedPartition:
    """A partition that was assigned again.

    :param received: entry and slot of messages that the client delivered before.
    :param committed: the committed entry.
    :param first: the first entry of the expected delivery; None if the log has none.
    """
    partition = AssignedPartition(TopicPartition("t", 0), "member", NO_RECEIVER, None)
    partition.arrived([NativeMessage(*place) for place in received])
    partition.restart(pack(LEDGER, committed, 0), expected=None if first is None else pack(LEDGER, first, 0))
    partition.owned = True
    return partition


def buffered_after(partition: AssignedPartition, *places: tuple[int, int]) -> list[tuple[int, int]]:
    """Deliver messages; returns entry and slot of all buffered records."""
    partition.arrived([NativeMessage(*place) for place in places])
    return [(record.offset >> 12 & 0xFFFFF, record.offset & 0xFFF) for record in partition.buffer]


@pytest.mark.parametrize("slots", [(0,), (1, 2)], ids=["unbatched", "batched"])
def test_the_rest_of_an_earlier_delivery_is_dropped(slots: tuple[int, ...]) -> None:
    partition = reassigned([(4, slots[-1])], committed=4, first=4)
    assert buffered_after(partition, *((5, slot) for slot in slots)) == []
    assert partition.misaligned
    redelivery = [(entry, slot) for entry in (4, 5) for slot in slots]
    assert buffered_after(partition, *redelivery) == redelivery
    assert not partition.misaligned


def test_the_redelivery_of_a_partly_committed_batch_starts_where_positions_fall() -> None:
    partition = reassigned([(4, 3)], committed=4, first=4)
    assert buffered_after(partition, (4, 4), (5, 0)) == []
    assert buffered_after(partition, (4, 3), (4, 4), (5, 0)) == [(4, 3), (4, 4), (5, 0)]


def test_a_repeated_first_message_starts_the_redelivery() -> None:
    partition = reassigned([(6, 0)], committed=4, first=4)
    assert buffered_after(partition, (6, 0)) == []
    assert buffered_after(partition, (6, 0), (7, 0)) == [(6, 0), (7, 0)]


@pytest.mark.parametrize("first", [None, 5])
def test_a_delivery_above_all_earlier_ones_is_complete(first: int | None) -> None:
    partition = reassigned([(3, 0)], committed=4, first=first)
    assert buffered_after(partition, (3, 0), (6, 2), (6, 3)) == [(6, 2), (6, 3)]
    assert not partition.misaligned


def test_a_new_member_accepts_the_first_delivery() -> None:
    partition = reassigned([], committed=4, first=4)
    assert buffered_after(partition, (4, 3), (4, 4)) == [(4, 3), (4, 4)]


def test_redelivery_is_requested_less_and_less_often() -> None:
    partition = reassigned([(4, 1)], committed=4, first=4)
    assert [check for check in range(1, 20) if partition.needs_redelivery_request(0)] == [2, 4, 8, 16]
    assert buffered_after(partition, (4, 0), (4, 1)) == [(4, 0), (4, 1)]
    assert not any(partition.needs_redelivery_request(0) for _ in range(9)), "the backlog is uncommitted, not lost"


def test_redelivery_is_not_requested_while_the_broker_sends() -> None:
    partition = reassigned([(4, 1)], committed=4, first=4)
    assert not any(partition.needs_redelivery_request(sent) for sent in range(1, 9))
    assert [partition.needs_redelivery_request(8) for _ in range(2)] == [False, True], "the client dropped a message"


@pytest.mark.parametrize("received", [[], [(3, 0)]], ids=["new member", "all committed"])
@pytest.mark.parametrize("first", [None, 4])
def test_redelivery_is_not_requested_of_what_never_arrived(received: list[tuple[int, int]], first: int | None) -> None:
    """The broker may be slow to send the chunks of a message, and the client drops it if the first one comes twice."""
    partition = reassigned(received, committed=4, first=first)
    assert not partition.awaits_redelivery
    assert not any(partition.needs_redelivery_request(0) for _ in range(9))


def test_redelivery_is_not_requested_after_a_seek() -> None:
    """The broker sends to the consumer of a seek by itself, and may be slow."""
    partition = reassigned([(4, 1)], committed=4, first=4)
    partition.restart(pack(LEDGER, 2, 0))
    assert not any(partition.needs_redelivery_request(0) for _ in range(9))


def test_redelivery_is_requested_at_each_check_while_misaligned() -> None:
    partition = reassigned([(4, 3)], committed=4, first=4)
    buffered_after(partition, (4, 4))
    assert all(partition.needs_redelivery_request(check) for check in range(4))


@pytest.mark.parametrize(
    ("active", "connection", "owned", "change"),
    [
        ("me", "first", False, Change.ASSIGNED),
        ("me", "first", True, Change.NONE),
        ("me", "second", True, Change.NONE),
        ("other", "first", False, Change.NONE),
        ("other", "first", True, Change.REVOKED),
        ("other", "second", True, Change.LOST),
        ("other", "", True, Change.LOST),
        ("", "", True, Change.NONE),
        ("", "first", False, Change.NONE),
    ],
)
def test_changes_of_the_assignment(active: str, connection: str, owned: bool, change: Change) -> None:
    partition = AssignedPartition(TopicPartition("t", 0), "me", NO_RECEIVER, None)
    partition.owned, partition.connection = owned, "first"
    state = PartitionState(active, connection, others=frozenset({"them"}), sent=0, properties={})
    assert partition.detect_change(state) is change


@pytest.mark.parametrize("active", ["me", "other", ""])
@pytest.mark.parametrize(("found", "lost"), [({}, False), ({OWNER: "ours"}, False), ({OWNER: "theirs"}, True)])
def test_the_mark_of_another_owner_is_a_loss(active: str, found: dict[str, str], lost: bool) -> None:
    partition = AssignedPartition(TopicPartition("t", 0), "me", NO_RECEIVER, None)
    partition.owned, partition.connection, partition.mark = True, "first", "ours"
    state = PartitionState(active, "first", others=frozenset({"them"}), sent=0, properties=found)
    assert (partition.detect_change(state) is Change.LOST) is lost


def test_the_mark_of_the_owner_before_is_no_loss() -> None:
    partition = AssignedPartition(TopicPartition("t", 0), "me", NO_RECEIVER, None)
    state = PartitionState("me", "first", others=frozenset(), sent=0, properties={OWNER: "theirs"})
    assert partition.detect_change(state) is Change.ASSIGNED


@pytest.mark.parametrize(
    ("properties", "connected", "released"),
    [
        ({}, {"them"}, True),
        ({OWNER: "them/1"}, {"them"}, False),
        ({OWNER: "them/1", RELEASED: "them/1"}, {"them"}, True),
        ({OWNER: "them/2", RELEASED: "them/1"}, {"them"}, False),
        ({OWNER: "them/1"}, {"others"}, True),
        ({OWNER: "them/1"}, set(), True),
    ],
)
def test_a_partition_is_released_by_a_mark_or_a_disconnect(
    properties: dict[str, str], connected: set[str], released: bool
) -> None:
    state = PartitionState("me", "first", others=frozenset(connected), sent=0, properties=properties)
    assert state.released is released


@pytest.mark.parametrize(
    ("active", "owned", "properties", "waits"),
    [
        ("them", False, {OWNER: "me/1"}, True),
        ("", False, {OWNER: "me/1", RELEASED: "me/0"}, True),
        ("them", False, {OWNER: "me/1", RELEASED: "me/1"}, False),
        ("them", False, {OWNER: "them/1"}, False),
        ("them", True, {OWNER: "me/1"}, False),
        ("me", False, {OWNER: "me/1"}, False),
    ],
)
def test_another_member_waits_for_a_release(active: str, owned: bool, properties: dict[str, str], waits: bool) -> None:
    partition = AssignedPartition(TopicPartition("t", 0), "me", NO_RECEIVER, None)
    partition.owned, partition.mark = owned, "me/1"
    state = PartitionState(active, "first", others=frozenset({"them"}), sent=0, properties=properties)
    assert partition.is_unreleased(state) is waits


def test_nothing_is_to_be_released_before_the_first_assignment() -> None:
    partition = AssignedPartition(TopicPartition("t", 0), "me", NO_RECEIVER, None)
    assert not partition.is_unreleased(PartitionState("them", "first", frozenset({"them"}), 0, {}))
