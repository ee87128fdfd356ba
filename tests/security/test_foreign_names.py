"""Names that foreign producers choose take a bounded memory."""

from __future__ import annotations

from typing import Any, cast

import pytest

from broker.hooks import Hooks
from broker_jetstream import codec
from broker_jetstream.connection import Connection
from broker_jetstream.membership import Membership
from broker_jetstream.settings import JetStreamSettings
from broker_kafka.codec.headers import RecordView
from broker_kafka.queue.markers.wire import MessageId
from broker_kafka.queue.tracker import redelivery_checks
from broker_kafka.queue.tracker.redelivery_checks import GroupPositions, TopicChecks

MOST = 100


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_offsets(*_: object) -> list[Any]:
        return []

    monkeypatch.setattr(redelivery_checks, "_MOST_KEPT", MOST)
    monkeypatch.setattr(redelivery_checks, "committed_offsets", no_offsets)


@pytest.mark.usefixtures("few")
async def test_topics_of_forged_markers() -> None:
    checks = TopicChecks(cast("Any", None))
    for number in range(5):
        names = [f"no topic {number} {each}" for each in range(2 * MOST)]
        assert (await checks.unwritable(names)).keys() == set(names)
        assert all(checks.is_news(name) for name in names)
    assert len(checks._known) == len(checks._reported) == MOST


@pytest.mark.usefixtures("few")
async def test_queues_and_partitions_of_forged_markers() -> None:
    positions = GroupPositions(cast("Any", None), "billing", lambda _: None)
    for number in range(5):
        await positions.passed(MessageId("orders", each, 0, f"queue-{number}") for each in range(2 * MOST))
        await positions.passed(MessageId("orders", 0, 0, f"queue-{number}-{each}") for each in range(MOST))
    assert len(positions._known) == MOST


def test_header_names_of_foreign_records() -> None:
    class Raw:
        def __init__(self, headers: list[tuple[str, bytes]]) -> None:
            self.headers = lambda: headers

    view = RecordView()
    for number in range(2000):
        name = f"{number}-" + "x" * 10_000
        assert view.attributes(Raw([(name, b"1"), (f"short-{number}", b"2")])) == {name: "1", f"short-{number}": "2"}
    assert len(view._attribute_names) <= 1000
    assert sum(map(len, view._attribute_names)) < 200_000


def test_header_names_of_forwarded_messages() -> None:
    before = codec._plain_name.cache_info().currsize
    for number in range(100):
        lines = codec._attribute_lines({f"{number}-" + "x" * 10_000: "1"})
        assert lines.startswith(f"{number}-xxx".encode())
    assert codec._plain_name.cache_info().currsize == before


async def test_members_that_a_stranger_announces() -> None:
    changes: list[int] = []
    membership = Membership(
        Connection(JetStreamSettings(), Hooks()), "orders", "billing", lambda: changes.append(len(changes))
    )

    def announce(name: str, claims: list[int]) -> None:
        data = b'{"id": "%b", "claims": %b}' % (name.encode(), str(claims).encode())
        membership._on_announcement(b"", b"", data, b"")

    announce("known", [1])
    for number in range(5000):
        announce(f"stranger-{number}", [])
    announce("x" * 1000, [])
    announce("known", list(range(5000)))
    others = membership.others()
    assert len(others) <= 2048
    assert others["known"] == {1}
    # Known members are heard all the same.
    announce("known", [1, 2])
    assert membership.others()["known"] == {1, 2}
