"""The Message family: fetch, settle, leases, pulls, subscriptions."""

from __future__ import annotations

import asyncio
import time

import pytest

from broker.driver.contract import Settlement
from broker.errors import Closed, LeaseLost, NotFound, Unsupported
from broker.messages import Message, Outcome
from broker.names import EPHEMERAL, native_name
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.messages import JetStreamMessageSource
from tests.jetstream.conftest import Open
from tests.jetstream.support import make_topic, publish, receive, settle_all, subscribe, until


def bodies(*texts: str) -> list[OutboundMessage]:
    return [OutboundMessage(text.encode()) for text in texts]


@pytest.mark.parametrize("confirm", [False, True])
async def test_acked_messages_are_not_redelivered(both_ways: JetStreamBackend, topic: str, confirm: bool) -> None:
    await make_topic(both_ways, topic)
    await publish(both_ways, topic, *bodies("a", "b", "c"))
    source = await subscribe(both_ways, topic, confirm_acks=confirm)
    found = await receive(source, 3)
    assert [message.data for message in found] == [b"a", b"b", b"c"]
    assert [message.delivery_attempt for message in found] == [1, 1, 1]
    assert await source.settle(settle_all(found, Outcome.ACK)) == [None] * 3
    await both_ways.check_health()
    lag = await both_ways.admin().lag(topic, "billing")
    assert (lag.waiting, lag.unsettled) == (0, 0)


async def test_released_messages_are_redelivered_at_once_and_rejected_ones_never(
    both_ways: JetStreamBackend, topic: str
) -> None:
    await make_topic(both_ways, topic)
    await publish(both_ways, topic, *bodies("back", "never"))
    source = await subscribe(both_ways, topic)
    back, never = await receive(source, 2)
    await source.settle([Settlement(back, Outcome.RELEASE), Settlement(never, Outcome.REJECT, None, "bad\nreason ü")])
    found = await receive(source, 1) + await receive(source, 1, 0.5)
    assert [message.data for message in found] == [b"back"]


@pytest.mark.deep
async def test_an_extended_lease_lasts(open_backend: Open, topic: str) -> None:
    backend = await open_backend(lease_seconds=3.0)
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies("kept", "dropped"))
    source = await subscribe(backend, topic)
    kept, dropped = await receive(source, 2)
    again: list[Message[bytes]] = []
    for _ in range(4):
        again += await source.fetch(10, 1 << 20, 1.2)
        assert await source.extend([kept]) == [None]
    again += await receive(source, 2, 0.3)
    assert b"kept" not in [message.data for message in again]
    assert isinstance((await source.extend([dropped]))[0], LeaseLost)
    assert (await source.settle(settle_all([kept], Outcome.ACK))) == [None]


@pytest.mark.parametrize("confirm", [False, True])
async def test_settling_after_the_lease_ended_is_refused(open_backend: Open, topic: str, confirm: bool) -> None:
    # The second lease must last until its message is settled.
    backend = await open_backend(lease_seconds=3.0)
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies("x"))
    source = await subscribe(backend, topic, confirm_acks=confirm)
    (first,) = await receive(source, 1)
    (second,) = await receive(source, 1)
    assert second.delivery_attempt == 2
    (error,) = await source.settle(settle_all([first], Outcome.ACK))
    assert isinstance(error, LeaseLost)
    assert await source.settle(settle_all([second], Outcome.ACK)) == [None]


async def test_a_fetch_without_messages_returns_in_time(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    source = await subscribe(both_ways, topic)
    begin = time.monotonic()
    assert await source.fetch(10, 1 << 20, 0.2) == []
    assert 0.2 <= time.monotonic() - begin < 20  # pull_expires is 30 seconds


async def test_interrupt_ends_a_fetch_without_losing_messages(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    source = await subscribe(both_ways, topic)
    for round_number in range(20):
        fetching = asyncio.create_task(source.fetch(10, 1 << 20, 10))
        await asyncio.sleep(0)
        publishing = asyncio.create_task(publish(both_ways, topic, *bodies(str(round_number))))
        await asyncio.sleep(0.0005 * round_number)
        source.interrupt()
        found = list(await fetching)
        await publishing
        found += await receive(source, 1 - len(found))
        assert [message.data for message in found] == [str(round_number).encode()]
        await source.settle(settle_all(found, Outcome.ACK))
    source.interrupt()
    assert len(await source.fetch(1, 1, 0.05)) == 0


async def test_a_fetch_returns_no_more_than_its_limits(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    await publish(both_ways, topic, *(OutboundMessage(b"x" * 1000) for _ in range(50)))
    source = await subscribe(both_ways, topic)
    assert len(await source.fetch(3, 1 << 20, 30)) <= 3
    found = await source.fetch(50, 2500, 30)
    assert sum(message.size for message in found) <= 2500
    assert len(await source.fetch(50, 1, 30)) == 1


async def test_late_arrivals_do_not_enlarge_the_next_request(
    backend: JetStreamBackend, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_topic(backend, topic)
    source = await subscribe(backend, topic)
    assert isinstance(source, JetStreamMessageSource)
    requested: list[int] = []
    request = source._pulls.request

    async def watch(number: int, max_bytes: int, *, no_wait: bool = False) -> bytes:
        requested.append(number)
        return await request(number, max_bytes, no_wait=no_wait)

    monkeypatch.setattr(source._pulls, "request", watch)
    dropped = await request(7, 1 << 20)
    source._pulls.drop()
    await publish(backend, topic, *bodies(*"1234567"))
    assert len(await receive(source, 7)) == 7  # they arrive after their pull was dropped
    assert dropped not in source._pulls.open
    requested.clear()
    source._pulls.drop()
    assert await source.fetch(5, 1 << 20, 0.05) == []
    assert requested[0] == 5


async def test_pulls_that_no_fetch_waits_for_are_cancelled(open_backend: Open, topic: str) -> None:
    idle_backend, busy_backend = await open_backend(), await open_backend()
    await make_topic(idle_backend, topic)
    idle = await subscribe(idle_backend, topic)
    await publish(idle_backend, topic, *bodies("first"))
    assert len(await idle.fetch(1000, 1 << 24, 30)) == 1
    # The other 999 of the pull stay requested until the server has dropped it.
    await until_pulls_wait(idle_backend, topic, 0)
    await publish(idle_backend, topic, *bodies(*map(str, range(100))))
    busy = await subscribe(busy_backend, topic)
    assert len(await receive(busy, 100)) == 100


async def until_pulls_wait(backend: JetStreamBackend, topic: str, number: int) -> None:
    """Wait until so many pull requests wait on the server."""

    async def so_many_wait() -> bool:
        info = await backend.admin().describe_subscription(topic, "billing")
        return info.native["num_waiting"] == number

    await eventually(so_many_wait, 60.0, f"{number} waiting pull requests")


@pytest.mark.deep
async def test_buffered_messages_keep_their_leases(open_backend: Open, topic: str) -> None:
    backend = await open_backend(lease_seconds=3.0)
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(*map(str, range(10))))
    source = await subscribe(backend, topic)
    await until_buffered(source, 10)
    await asyncio.sleep(4.8)  # longer than the lease, without a fetch
    found = await receive(source, 10)
    assert [message.delivery_attempt for message in found] == [1] * 10
    assert await source.settle(settle_all(found, Outcome.ACK)) == [None] * 10
    assert await receive(source, 1, 0.3) == []


async def until_buffered(source: object, number: int) -> None:
    """Make messages arrive in the source without a fetch."""
    await source._pulls.request(number, 1 << 20)  # pyright: ignore[reportAttributeAccessIssue]
    await until(lambda: len(source._buffer) == number)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "public"])
async def test_close_releases_buffered_messages(open_backend: Open, topic: str, fast: bool) -> None:
    backend = await open_backend(fast_path=fast, lease_seconds=90.0)
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(*map(str, range(10))))
    source = await subscribe(backend, topic)
    await until_buffered(source, 10)
    begin = time.monotonic()
    await source.close()
    await source.close()
    other = await subscribe(backend, topic)
    assert len(await receive(other, 10, 60)) == 10
    assert time.monotonic() - begin < 60  # the lease is 90 seconds
    with pytest.raises(Closed):
        await source.fetch(1, 1, 1)
    assert await backend.admin().list_subscriptions(topic) == ["billing"]


@pytest.mark.parametrize("what", ["subscription", "topic"])
async def test_a_fetch_raises_when_its_subscription_is_deleted(
    both_ways: JetStreamBackend, topic: str, what: str
) -> None:
    await make_topic(both_ways, topic)
    source = await subscribe(both_ways, topic)
    fetching = asyncio.create_task(source.fetch(1, 1, 120))
    await until_pulls_wait(both_ways, topic, 1)
    admin = both_ways.admin()
    await (admin.delete_topic(topic) if what == "topic" else admin.delete_subscription(topic, "billing"))
    with pytest.raises(NotFound):
        await asyncio.wait_for(fetching, 60)
    with pytest.raises(NotFound):
        await receive(source, 1)


async def test_ephemeral_subscriptions_are_separate_and_deleted_at_close(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    one, two = [await subscribe(backend, topic, EPHEMERAL, start="latest") for _ in range(2)]  # pyright: ignore[reportArgumentType]
    await publish(backend, topic, *bodies("x"))
    assert [len(await receive(each, 1)) for each in (one, two)] == [1, 1]
    assert await backend.admin().list_subscriptions(topic) == []
    stream = topic.replace(".", "=")
    names = await backend._connection.api(f"CONSUMER.NAMES.{stream}", {}, what="x")
    assert len(names["consumers"]) == 2
    await one.close()
    await two.close()
    names = await backend._connection.api(f"CONSUMER.NAMES.{stream}", {}, what="x")
    assert not names["consumers"]


async def test_an_unsuitable_foreign_durable_is_refused(open_backend: Open, topic: str) -> None:
    backend = await open_backend(lease_seconds=10)
    await make_topic(backend, topic)
    stream = topic.replace(".", "=")

    async def durable(name: str, **config: object) -> None:
        body = {"stream_name": stream, "config": {"durable_name": name, "ack_policy": "explicit", **config}}
        await backend._connection.api(f"CONSUMER.CREATE.{stream}.{name}", body, what="x")

    await durable("no-ack", ack_policy="none")
    await durable("short", ack_wait=1_000_000_000)
    await durable("limit", max_deliver=3, ack_wait=30_000_000_000)
    await durable("push", deliver_subject=f"push.{stream}")
    for name in ("no-ack", "short", "limit", "push"):
        with pytest.raises(Unsupported):
            await subscribe(backend, topic, native_name(name), max_deliveries=50)
    await durable("fits", max_deliver=100, ack_wait=30_000_000_000)
    await subscribe(backend, topic, native_name("fits"), max_deliveries=50)


async def test_lease_and_limit_of_our_durable_are_raised(open_backend: Open, topic: str) -> None:
    first, second = await open_backend(lease_seconds=5), await open_backend(lease_seconds=60)
    await make_topic(first, topic)
    await subscribe(first, topic)
    await subscribe(second, topic)
    info = await first.admin().describe_subscription(topic, "billing")
    assert info.native["config"]["ack_wait"] == 60 * 10**9
    assert info.native["config"]["max_deliver"] == -1
    await subscribe(first, topic)
    info = await first.admin().describe_subscription(topic, "billing")
    assert info.native["config"]["ack_wait"] == 60 * 10**9


async def test_many_messages_arrive_in_order(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    await publish(both_ways, topic, *(OutboundMessage(b"%d" % n, key=f"k{n % 7}") for n in range(5000)))
    source = await subscribe(both_ways, topic)
    found: list[bytes | None] = []
    while len(found) < 5000:
        batch = await source.fetch(700, 1 << 20, 30)
        assert batch
        found += [message.data for message in batch]
        assert await source.settle(settle_all(batch, Outcome.ACK)) == [None] * len(batch)
    assert found == [b"%d" % n for n in range(5000)]
    assert await source.fetch(1, 1, 0.2) == []
