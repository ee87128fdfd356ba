"""Names that foreign producers choose take a bounded memory."""

from __future__ import annotations

from broker.hooks import Hooks
from broker_jetstream import codec
from broker_jetstream.connection import Connection
from broker_jetstream.membership import Membership
from broker_jetstream.settings import JetStreamSettings
from broker_kafka.codec.headers import RecordView


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
        Connection(JetStreamSettings(owner_timeout=3600), Hooks()),
        "orders",
        "billing",
        lambda: changes.append(len(changes)),
        lambda: None,
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
