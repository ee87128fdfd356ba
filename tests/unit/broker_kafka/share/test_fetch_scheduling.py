"""Which member of a share consumer fetches next, and how many members are of use."""

from __future__ import annotations

from broker_kafka.share.fetch_scheduling import FetchScheduler


def test_other_members_fetch_only_where_the_first_gets_nothing() -> None:
    scheduler: FetchScheduler[str] = FetchScheduler(8, 3)
    members: dict[str, str | None] = {"a": None, "b": None}
    for member in members:
        scheduler.add(member, 0.0)
    assert scheduler.next_member(members, 1.0) == "a"
    assert scheduler.next_member(members, 1.01) is None
    assert scheduler.recheck_after(members) is not None
    assert scheduler.next_member(members, 1.1) == "b"
    assert scheduler.recheck_after(members) is None


def test_a_member_that_gets_nothing_does_not_block_others() -> None:
    scheduler: FetchScheduler[str] = FetchScheduler(8, 3)
    members: dict[str, str | None] = {"a": None, "b": None}
    for member in members:
        scheduler.add(member, 0.0)
    assert [scheduler.next_member(members, now) for now in (1.0, 2.0)] == ["a", "b"]
    for now in (3.0, 3.001, 3.002):
        scheduler.received("b", now)
        assert scheduler.next_member(members, now) == "b"


def test_the_member_that_received_the_longest_ago_fetches_first() -> None:
    scheduler: FetchScheduler[str] = FetchScheduler(8, 1)
    members: dict[str, str | None] = {"a": None, "b": None}
    for member in members:
        scheduler.add(member, 0.0)
    order: list[str | None] = []
    for now in (1.0, 2.0, 3.0):
        order.append(scheduler.next_member(members, now))
        scheduler.received(order[-1] or "", now)
    assert order == ["a", "b", "a"]


def test_members_are_added_when_none_is_free_or_busy_ones_may_own_partitions() -> None:
    scheduler: FetchScheduler[str] = FetchScheduler(8, 3)
    members: dict[str, str | None] = {"a": None}
    scheduler.add("a", 0.0)
    assert scheduler.next_member(members, 1.0) == "a"
    assert not scheduler.needs_another(members, 9.0)
    scheduler.received("a", 9.0)
    members["a"] = "a batch"
    assert scheduler.needs_another(members, 9.0)
    added = 0
    while scheduler.needs_another(members, now := 10.0 + added):
        added += 1
        members[f"b{added}"] = None
        scheduler.add(f"b{added}", now)
        assert scheduler.next_member(members, now) == f"b{added}"
    # Of six members of three partitions two have each.
    assert len(members) == 6
    assert scheduler.idle_member(members, 99.0) is None
    members["a"] = None
    assert scheduler.idle_member(members, 99.0) == "a"


def test_a_single_partition_needs_one_free_member() -> None:
    scheduler: FetchScheduler[str] = FetchScheduler(8, 1)
    members: dict[str, str | None] = {"a": "a batch", "b": None}
    for member in members:
        scheduler.add(member, 0.0)
    assert scheduler.next_member(members, 1.0) == "b"
    assert not scheduler.needs_another(members, 9.0)


def test_share_members_is_the_limit() -> None:
    scheduler: FetchScheduler[str] = FetchScheduler(2, 3)
    members: dict[str, str | None] = {"a": "a batch", "b": "a batch"}
    for member in members:
        scheduler.add(member, 0.0)
    assert not scheduler.needs_another(members, 9.0)
    scheduler.remove("b")
    del members["b"]
    assert scheduler.needs_another(members, 9.0)
