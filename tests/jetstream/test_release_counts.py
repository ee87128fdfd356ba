"""Released messages: a release is no attempt, in whichever process it happened."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import broker
from broker.driver.contract import MessageSource, MessageSubscription
from broker.errors import TopicNotFound
from broker.hooks import Event, Hooks, Settled, Warned
from broker.messages import Message, Outcome
from broker.names import EPHEMERAL
from broker.outbound import OutboundMessage
from broker_jetstream import release_counts
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.messages import JetStreamMessageSource
from broker_jetstream.names import RELEASE_COUNTS_STREAM, release_counts_subject
from broker_jetstream.release_counts import counts_from_runs, runs_from_counts
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.conftest import Open
from tests.jetstream.support import Listener, make_topic, publish, receive, settle_all, subscribe, until
from tests.servers.nats import NatsServer

LEASE = 3.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow server must not make a source skip a count."""
    monkeypatch.setattr(release_counts, "PATIENCE", 30.0)


def bodies(number: int, key: bytes | None = None) -> list[OutboundMessage]:
    return [OutboundMessage(b"%d" % index, key) for index in range(number)]


def attempts(messages: list[Message[bytes]]) -> list[int | None]:
    return [message.delivery_attempt for message in messages]


async def stored(backend: JetStreamBackend, topic: str) -> int:
    """How many subscriptions of a topic have stored counts."""
    subject = release_counts_subject(topic.replace(".", "="), "*")
    body = {"subjects_filter": subject}
    try:
        info = await backend._connection.api(f"STREAM.INFO.{RELEASE_COUNTS_STREAM}", body, what="test")
    except TopicNotFound:
        return 0
    return len(info["state"].get("subjects") or {})


def has_buffered(source: MessageSource, number: int) -> bool:
    assert isinstance(source, JetStreamMessageSource)
    return len(source._buffer) == number


async def test_later_consumers_count_only_deliveries_that_reached_a_handler(open_backend: Open, topic: str) -> None:
    first = await open_backend()
    await make_topic(first, topic)
    await publish(first, topic, *bodies(20))
    for _ in range(8):
        source = await subscribe(await open_backend(), topic)
        found = await receive(source, 20)
        assert attempts(found) == [1] * 20
        assert await source.settle(settle_all(found, Outcome.RELEASE)) == [None] * 20
        await source.close()
    source = await subscribe(first, topic)
    found = await receive(source, 20)
    assert attempts(found) == [1] * 20
    await source.settle([*settle_all(found[:5], Outcome.NACK), *settle_all(found[5:], Outcome.RELEASE)])
    successor = await subscribe(await open_backend(), topic)
    await source.close()
    seen = {int(m.data or b""): m.delivery_attempt for m in await receive(successor, 20)}
    assert seen == {number: 2 if number < 5 else 1 for number in range(20)}


async def test_messages_buffered_at_close_count_as_released(open_backend: Open, topic: str) -> None:
    backend, successor = await open_backend(), await open_backend()
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(10))
    for _ in range(3):
        source = await subscribe(backend, topic)
        await source._pulls.request(10, 1 << 20)  # pyright: ignore[reportAttributeAccessIssue]
        await until(partial(has_buffered, source, 10))
        (message,) = await source.fetch(1, 1 << 20, 30.0)
        await source.settle(settle_all([message], Outcome.RELEASE))
        await source.close()
    assert attempts(await receive(await subscribe(successor, topic), 10)) == [1] * 10


async def test_concurrent_releases_of_many_processes_lose_no_count(open_backend: Open, topic: str) -> None:
    backends = [await open_backend() for _ in range(8)]
    await make_topic(backends[0], topic)
    await publish(backends[0], topic, *bodies(160))
    for _ in range(3):
        sources = [await subscribe(backend, topic) for backend in backends]
        batches = await asyncio.gather(*(receive(source, 20) for source in sources))
        assert {attempt for found in batches for attempt in attempts(found)} == {1}
        assert [len(found) for found in batches] == [20] * len(sources)
        await asyncio.gather(
            *(source.settle(settle_all(found, Outcome.RELEASE)) for source, found in zip(sources, batches, strict=True))
        )
        await asyncio.gather(*(source.close() for source in sources))
    assert attempts(await receive(await subscribe(backends[0], topic), 160)) == [1] * 160


async def test_deliveries_to_a_dead_process_count_as_attempts(open_backend: Open, topic: str) -> None:
    dead, successor = await open_backend(lease_seconds=LEASE), await open_backend(lease_seconds=LEASE)
    await make_topic(dead, topic)
    await publish(dead, topic, *bodies(3))
    source = await subscribe(dead, topic)
    await source.settle(settle_all(await receive(source, 3), Outcome.RELEASE))
    assert attempts(await receive(source, 3)) == [1] * 3
    # These leases are not renewed, as after a crash.
    found = await receive(await subscribe(successor, topic), 3)
    assert attempts(found) == [2] * 3


def note_release(seen: asyncio.Event, event: Event) -> None:
    if isinstance(event, Settled) and event.released:
        seen.set()


async def test_a_hot_key_does_not_raise_the_attempts_of_others(
    nats_server: NatsServer, open_backend: Open, topic: str
) -> None:
    backend = await open_backend()
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(40, b"hot"))
    for _ in range(3):
        released = asyncio.Event()
        async with (
            broker.connect(nats_server.url) as bus,
            bus.messages(topic, subscription="billing", ordered_by_key=True, max_outstanding=16) as inbox,
        ):
            bus.hooks.listen(partial(note_release, released))
            first = await inbox.next_message(timeout=60)
            assert first is not None
            assert first.delivery_attempt == 1
            # Its followers fill the share of their key; the others are released.
            async with asyncio.timeout(60):
                await released.wait()
    # Released messages are redelivered after a delay.
    assert attempts(await receive(await subscribe(backend, topic), 40)) == [1] * 40


async def test_counts_of_a_deleted_consumer_do_not_apply_to_its_successor(open_backend: Open, topic: str) -> None:
    backend = await open_backend(lease_seconds=LEASE)
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(2))
    source = await subscribe(backend, topic)
    await source.settle(settle_all(await receive(source, 2), Outcome.RELEASE))
    await source.close()
    assert await stored(backend, topic) == 1
    # As other tools do, which do not know the counts.
    stream = topic.replace(".", "=")
    await backend._connection.api(f"STREAM.DELETE.{stream}", what="test")
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(2))
    source = await subscribe(backend, topic)
    assert attempts(await receive(source, 2)) == [1, 1]
    # Their leases end, as after a crash.
    assert attempts(await receive(source, 2)) == [2, 2]


async def test_admin_hides_the_counts_and_deletes_them(open_backend: Open, topic: str) -> None:
    backend = await open_backend()
    admin = backend.admin()
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(2))
    for remove in (lambda: admin.delete_subscription(topic, "billing"), lambda: admin.delete_topic(topic)):
        source = await subscribe(backend, topic, start="earliest")
        await source.settle(settle_all(await receive(source, 2), Outcome.RELEASE))
        await source.close()
        assert await stored(backend, topic) == 1
        assert topic in await admin.list_topics()
        assert not [name for name in await admin.list_topics() if "release-counts" in name]
        assert await admin.list_subscriptions(topic) == ["billing"]
        await remove()
        assert await stored(backend, topic) == 0


async def test_without_releases_no_count_is_stored(open_backend: Open, topic: str) -> None:
    backend = await open_backend()
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(3))
    source = await subscribe(backend, topic)
    acked, nacked, rejected = await receive(source, 3)
    outcomes = zip((acked, nacked, rejected), (Outcome.ACK, Outcome.NACK, Outcome.REJECT), strict=True)
    await source.settle([s for message, outcome in outcomes for s in settle_all([message], outcome)])
    await source.settle(settle_all(await receive(source, 1), Outcome.ACK))
    await source.close()
    # An ephemeral subscription has no later consumer, and its only one knows its releases.
    lonely = MessageSubscription(topic=topic, subscription=EPHEMERAL, start="earliest")
    alone = await backend.subscribe(lonely, Listener())
    for _ in range(3):
        found = await receive(alone, 3)
        assert attempts(found) == [1] * 3
        await alone.settle(settle_all(found, Outcome.RELEASE))
    await alone.close()
    assert await stored(backend, topic) == 0
    other = await subscribe(backend, topic, "other", start="earliest")
    await other.settle(settle_all(await receive(other, 3), Outcome.RELEASE))
    assert await stored(backend, topic) == 1
    await other.close()


async def test_an_unresponsive_server_does_not_delay_close(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_counts, "PATIENCE", 0.5)
    with NatsServer() as server:
        backend = JetStreamBackend(
            JetStreamSettings(servers=(server.url,), settle_timeout=0.5, request_timeout=60), Hooks()
        )
        await backend.open()
        await make_topic(backend, topic)
        await publish(backend, topic, *bodies(10))
        source = await subscribe(backend, topic)
        (message,) = await source.fetch(10, 1, 30.0)
        server.pause()
        begin = time.monotonic()
        await source.settle(settle_all([message], Outcome.RELEASE))
        await source.close()
        assert time.monotonic() - begin < 30
        server.resume()
        await backend.close()


async def test_a_user_without_permission_for_the_counts_is_warned_once(topic: str) -> None:
    subjects = f'"anybroker.release-counts.>", "$JS.API.STREAM.*.{RELEASE_COUNTS_STREAM}"'
    forbidden = f"permissions: {{ publish: {{ deny: [{subjects}] }} }}"
    events: list[Event] = []
    with NatsServer.with_user("ann", "x", forbidden) as server:
        hooks = Hooks()
        hooks.listen(events.append)
        patient: dict[str, Any] = {"settle_timeout": 60.0, "request_timeout": 60.0}
        settings = JetStreamSettings(servers=(server.url,), user="ann", password=SecretStr("x"), **patient)
        backend = JetStreamBackend(settings, hooks)
        await backend.open()
        await make_topic(backend, topic)
        await publish(backend, topic, *bodies(2))
        listener = Listener()
        source = await subscribe(backend, topic, listener=listener)
        for _ in range(3):
            found = await receive(source, 2)
            # A consumer knows its own releases without the server.
            assert attempts(found) == [1, 1]
            begin = time.monotonic()
            await source.settle(settle_all(found, Outcome.RELEASE))
            assert time.monotonic() - begin < 30  # a missing answer would take 60
        assert [type(event) for event in listener.events] == [Warned]
        await source.close()
        await backend.admin().delete_subscription(topic, "billing")
        await backend.close()


async def test_the_permissions_in_the_documentation_suffice(events: list[Event]) -> None:
    page = (Path(__file__).parents[2] / "docs/backends/jetstream.md").read_text()
    publishing, receiving = page.split("  publish:   ")[1].split("  ```")[0].split("  subscribe: ")
    rights = f"permissions: {{ publish: {json.dumps(publishing.split())}, subscribe: {json.dumps(receiving.split())} }}"
    users = (
        f'authorization {{ users: [ {{ user: "all", password: "x" }}, {{ user: "ann", password: "x", {rights} }} ] }}'
    )
    with NatsServer(users) as server:
        hooks = Hooks()
        hooks.listen(events.append)
        everything, ann = (
            JetStreamBackend(JetStreamSettings(servers=(server.url,), user=user, password=SecretStr("x")), hooks)
            for user in ("all", "ann")
        )
        await everything.open()
        await make_topic(everything, "orders")
        await ann.open()
        await publish(ann, "orders", *bodies(3))
        for _ in range(3):
            listener = Listener()
            source = await subscribe(ann, "orders", listener=listener)
            found = await receive(source, 3)
            assert attempts(found) == [1] * 3
            await source.settle(settle_all(found, Outcome.RELEASE))
            await source.close()
            assert listener.events == []
        assert await stored(everything, "orders") == 1
        await ann.close()
        await everything.close()
    assert not [event for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize(
    "counts", [{}, {7: 1}, {1: 2, 2: 2, 3: 2, 5: 2, 6: 1}, {9: 3, 1: 3, 10: 3}, dict.fromkeys(range(1000), 4)]
)
def test_runs_are_equivalent_to_counts(counts: dict[int, int]) -> None:
    runs = runs_from_counts(counts, 100)
    assert counts_from_runs(runs) == counts
    assert len(runs) <= 4


def test_with_too_many_runs_the_lowest_counts_are_left_out() -> None:
    assert runs_from_counts({1: 1, 3: 5, 5: 2, 7: 4}, 2) == [(3, 1, 5), (7, 1, 4)]
