"""Which members of a share consumer are asked, and how many there are to be."""

from __future__ import annotations

from broker_kafka.share.fetch_scheduling import FetchScheduler


def test_one_is_asked_and_others_only_where_it_gets_nothing() -> None:
    asking: FetchScheduler[str] = FetchScheduler(8, 3)
    members: dict[str, str | None] = {"a": None, "b": None}
    for member in members:
        asking.add(member, 0.0)
    assert asking.next_member(members, 1.0) == "a"
    assert asking.next_member(members, 1.01) is None
    assert asking.recheck_after(members) is not None
    assert asking.next_member(members, 1.1) == "b"
    assert asking.recheck_after(members) is None


def test_one_that_gets_nothing_keeps_nobody_who_does_from_being_asked() -> None:
    asking: FetchScheduler[str] = FetchScheduler(8, 3)
    members: dict[str, str | None] = {"a": None, "b": None}
    for member in members:
        asking.add(member, 0.0)
    assert [asking.next_member(members, now) for now in (1.0, 2.0)] == ["a", "b"]
    for now in (3.0, 3.001, 3.002):
        asking.received("b", now)
        assert asking.next_member(members, now) == "b"


def test_who_got_something_the_longest_ago_is_asked_first() -> None:
    asking: FetchScheduler[str] = FetchScheduler(8, 1)
    members: dict[str, str | None] = {"a": None, "b": None}
    for member in members:
        asking.add(member, 0.0)
    told: list[str | None] = []
    for now in (1.0, 2.0, 3.0):
        told.append(asking.next_member(members, now))
        asking.received(told[-1] or "", now)
    assert told == ["a", "b", "a"]


def test_members_are_added_where_none_is_free_or_one_that_works_may_have_partitions_alone() -> None:
    asking: FetchScheduler[str] = FetchScheduler(8, 3)
    members: dict[str, str | None] = {"a": None}
    asking.add("a", 0.0)
    assert asking.next_member(members, 1.0) == "a"
    assert not asking.needs_another(members, 9.0)
    asking.received("a", 9.0)
    members["a"] = "a batch"
    assert asking.needs_another(members, 9.0)
    added = 0
    while asking.needs_another(members, now := 10.0 + added):
        added += 1
        members[f"b{added}"] = None
        asking.add(f"b{added}", now)
        assert asking.next_member(members, now) == f"b{added}"
    # Of six members of three partitions two have each.
    assert len(members) == 6
    assert asking.idle_member(members, 99.0) is None
    members["a"] = None
    assert asking.idle_member(members, 99.0) == "a"


def test_the_partition_of_a_topic_that_has_one_needs_one_member_that_is_free() -> None:
    asking: FetchScheduler[str] = FetchScheduler(8, 1)
    members: dict[str, str | None] = {"a": "a batch", "b": None}
    for member in members:
        asking.add(member, 0.0)
    assert asking.next_member(members, 1.0) == "b"
    assert not asking.needs_another(members, 9.0)


def test_there_are_no_more_members_than_asked_for() -> None:
    asking: FetchScheduler[str] = FetchScheduler(2, 3)
    members: dict[str, str | None] = {"a": "a batch", "b": "a batch"}
    for member in members:
        asking.add(member, 0.0)
    assert not asking.needs_another(members, 9.0)
    asking.remove("b")
    del members["b"]
    assert asking.needs_another(members, 9.0)
