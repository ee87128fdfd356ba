"""Members of a copartitioned group agree on the owner of each number before they read: no number has two owners."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from pydantic import SecretStr

from broker import OperationTimeout, TopicPartition
from broker.driver.contract import RecordSource, RecordSubscription
from broker.testing.waiting import let_pass
from broker_jetstream import membership
from broker_jetstream.backend import JetStreamBackend
from tests.jetstream.conftest import Open
from tests.jetstream.support import GroupListener, make_topic, until
from tests.servers.nats import NatsServer
from tests.servers.proxy import Proxy

NUMBERS = 4


@pytest.fixture
async def topics(backend: JetStreamBackend, topic: str) -> tuple[str, str]:
    """Empty topics: the server pins none of their partitions, so the members alone decide."""
    names = (f"{topic}.left", f"{topic}.right")
    for name in names:
        await make_topic(backend, name, partitions=NUMBERS)
    return names


async def join(
    backend: JetStreamBackend, topics: tuple[str, ...], listener: GroupListener | None = None
) -> RecordSource:
    subscription = RecordSubscription(topics=topics, group="audit", copartitioned=True)
    return await backend.join(subscription, listener or GroupListener())


def numbers(source: RecordSource) -> set[int]:
    """The numbers that a member owns, each whole."""
    owned = source.assignment()
    found = {partition.partition for partition in owned}
    assert len(owned) == 2 * len(found)
    return found


async def test_members_that_join_get_nothing_that_its_owner_has_not_released(
    open_backend: Open, topics: tuple[str, str]
) -> None:
    first, second, third = [await open_backend(owner_timeout=1.0) for _ in range(3)]
    owner, released = GroupListener(), asyncio.Event()

    async def finish_work(_: Sequence[TopicPartition]) -> None:
        await released.wait()

    owner.on_revoke = finish_work
    source = await join(first, topics, owner)
    assert numbers(source) == set(range(NUMBERS))
    listeners = [GroupListener(), GroupListener()]
    sources = [await join(each, topics, listener) for each, listener in zip((second, third), listeners, strict=True)]
    await until(lambda: len(owner.revoked) > 0)
    # Longer than a member may be silent: the first announces itself also while it waits for the application.
    await let_pass(2.5)
    assert [listener.given for listener in listeners] == [[], []]
    released.set()
    await until(lambda: all(numbers(each) for each in sources))
    await until(lambda: sorted(n for each in (source, *sources) for n in numbers(each)) == list(range(NUMBERS)))
    assert (owner.gone, [listener.gone for listener in listeners]) == ([], [[], []])


async def test_members_whose_process_stood_still_keep_their_numbers(
    open_backend: Open, topics: tuple[str, str]
) -> None:
    listeners = [GroupListener(), GroupListener()]
    sources = [await join(await open_backend(owner_timeout=1.0), topics, listener) for listener in listeners]
    await until(lambda: [len(numbers(source)) for source in sources] == [2, 2])
    before = [numbers(source) for source in sources]
    time.sleep(3)  # noqa: ASYNC251
    await let_pass(1.5)
    assert [numbers(source) for source in sources] == before
    assert [listener.gone for listener in listeners] == [[], []]


async def test_a_member_that_was_cut_off_yields_to_who_took_its_numbers(
    open_backend: Open, nats_server: NatsServer, topics: tuple[str, str]
) -> None:
    with Proxy(nats_server.port) as proxy:
        lost, taker = GroupListener(), GroupListener()
        cut_off = await join(await open_backend(servers=(proxy.url,), owner_timeout=1.0), topics, lost)
        source = await join(await open_backend(owner_timeout=1.0), topics, taker)
        await until(lambda: len(numbers(source)) == len(numbers(cut_off)) == 2)
        held = numbers(cut_off)
        proxy.hold()
        await until(lambda: len(numbers(source)) == NUMBERS)
        proxy.hold(False)
        await until(lambda: len(lost.gone) > 0)
        await until(lambda: sorted([*numbers(source), *numbers(cut_off)]) == list(range(NUMBERS)))
        assert {partition.partition for partition in lost.gone} == held
        assert taker.gone == []


async def test_the_numbers_of_a_member_that_does_not_answer_stay_its_own(
    open_backend: Open, nats_server: NatsServer, topics: tuple[str, str]
) -> None:
    with Proxy(nats_server.port) as proxy:
        await join(await open_backend(servers=(proxy.url,), owner_timeout=6.0), topics)
        # Its requests wait on the server, but a new member does not hear of it.
        proxy.hold()
        newcomer = await join(await open_backend(owner_timeout=6.0), topics)
        await let_pass(2)
        assert numbers(newcomer) == set()
        await until(lambda: numbers(newcomer) == set(range(NUMBERS)))


async def test_the_numbers_of_a_member_that_left_are_free_at_once(open_backend: Open, topics: tuple[str, str]) -> None:
    source = await join(await open_backend(owner_timeout=300.0), topics)
    assert numbers(source) == set(range(NUMBERS))
    await source.close()
    newcomer = await join(await open_backend(owner_timeout=300.0), topics)
    await until(lambda: numbers(newcomer) == set(range(NUMBERS)))


async def test_members_that_may_not_announce_themselves_cannot_join(
    monkeypatch: pytest.MonkeyPatch, open_backend: Open, topic: str
) -> None:
    monkeypatch.setattr(membership, "_MARK_SECONDS", 0.5)
    forbidden = 'permissions: { publish: { deny: ["anybroker.group.>"] } }'
    with NatsServer.with_user("ann", "x", forbidden) as server:
        backend = await open_backend(servers=(server.url,), user="ann", password=SecretStr("x"))
        topics = (f"{topic}.left", f"{topic}.right")
        for name in topics:
            await make_topic(backend, name, partitions=NUMBERS)
        with pytest.raises(OperationTimeout, match=r"permission to publish and subscribe to anybroker\.group"):
            await join(backend, topics)
        await backend.close()
