"""One server, several connections: by name, by object, from several threads and loops; and its clock."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from broker.errors import ConfigurationError, InvalidSetting, UnknownSetting
from broker.hooks import Hooks
from broker.outbound import OutboundMessage
from broker.registry import create_backend
from broker_inmem import Broker, BrokerOptions, InmemSettings, ManualClock, SystemClock
from broker_inmem.backend import InmemBackend
from tests.inmem.clients import Client, bodies, published, read, settle, soon, take


def named(url: str) -> Broker:
    backend = create_backend(url, Hooks())
    assert isinstance(backend, InmemBackend)
    return backend.broker


def test_connections_of_one_name_share_a_server() -> None:
    assert named("inmem:") is named("memory:") is named("inmem://default")
    name = f"shared-{uuid4().hex}"
    assert named(f"inmem://{name}") is named(f"inmem://{name}") is named(f"memory:{name}")
    assert named(f"inmem://{name}") is not named("inmem:")
    Broker.forget(name)


def test_the_first_url_sets_the_options_of_the_server() -> None:
    name = f"shared-{uuid4().hex}"
    first = named(f"inmem://{name}?seed=5&partitions=2&lease_seconds=3")
    assert (first.seed, first.options.partitions) == (5, 2)
    assert named(f"inmem://{name}?lease_seconds=9") is first
    assert named(f"inmem://{name}?seed=5&partitions=2") is first
    with pytest.raises(ConfigurationError):
        named(f"inmem://{name}?seed=6")
    Broker.forget(name)


def test_a_private_server_is_reached_by_its_url_and_by_its_object() -> None:
    broker = Broker()
    assert named(broker.url) is broker
    assert create_backend(InmemSettings(broker=broker), Hooks()).capabilities == broker.capabilities
    with pytest.raises(ConfigurationError):
        Broker(name=broker.name)


@pytest.mark.parametrize("url", ["inmem:?broker=x", "inmem:?partitions=0", "inmem://user@name", "inmem:/path"])
def test_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidSetting):
        named(url)


def test_an_unknown_parameter_suggests_the_nearest() -> None:
    with pytest.raises(UnknownSetting, match="partitions"):
        named("inmem:?partition=3")


async def test_a_connection_may_have_its_own_lease(broker: Broker, clock: ManualClock) -> None:
    async with Client(broker) as usual, Client(broker, lease_seconds=1) as brief:
        assert brief.backend.capabilities.messages is not None
        assert brief.backend.capabilities.messages.lease_seconds == 1
        await usual.topic()
        await usual.publish([b"a", b"b"])
        long, short = await usual.subscribe(), await brief.subscribe()
        [kept] = await take(long, 1)
        assert len(await take(short, 1)) == 1
        clock.advance(1)
        [back] = await take(long)
        assert back.delivery_attempt == 2
        assert await settle(long, [kept, back]) == [None, None]


async def test_the_same_seed_gives_the_same_order() -> None:
    broker = Broker()
    orders: list[list[bytes]] = []
    for options in (broker.options, BrokerOptions(seed=broker.seed)):
        async with Client(broker if options is broker.options else Broker(options)) as client:
            await client.topic()
            await client.publish([str(n).encode() for n in range(50)])
            orders.append(bodies(await take(await client.subscribe())))
    assert orders[0] == orders[1]


async def message_reader(client: Client) -> Callable[[], Awaitable[list[bytes]]]:
    source = await client.subscribe()

    async def some() -> list[bytes]:
        taken = await take(source, 100, 0.1)
        assert not any(await settle(source, taken))
        return bodies(taken)

    return some


async def record_reader(client: Client) -> Callable[[], Awaitable[list[bytes]]]:
    member = await client.join()

    async def some() -> list[bytes]:
        return bodies(await read(member, 100, 0.1))

    return some


@pytest.mark.parametrize(("open_reader", "readers"), [(message_reader, 2), (record_reader, 1)])
def test_several_loops_share_a_server(
    open_reader: Callable[[Client], Awaitable[Callable[[], Awaitable[list[bytes]]]]], readers: int
) -> None:
    """One loop publishes, others consume in threads of their own; everything arrives once."""
    broker = Broker(BrokerOptions(partitions=4))
    total = 3000
    seen: Counter[bytes] = Counter()
    lock = threading.Lock()
    done = threading.Event()

    async def consume() -> None:
        async with Client(broker) as client:
            some = await open_reader(client)
            while not done.is_set():
                got = await some()
                with lock:
                    seen.update(got)
                    if sum(seen.values()) >= total:
                        done.set()

    async def publish() -> None:
        async with Client(broker) as client:
            for start in range(0, total, 30):
                numbers = range(start, start + 30)
                await published(client, [OutboundMessage(str(n).encode(), str(n % 50)) for n in numbers])
                await asyncio.sleep(0)

    async def prepare() -> None:
        async with Client(broker) as client:
            await client.topic()

    asyncio.run(prepare())
    with ThreadPoolExecutor(3) as pool:
        consumers = [pool.submit(asyncio.run, consume()) for _ in range(readers)]
        pool.submit(asyncio.run, publish()).result(20)
        assert done.wait(20)
        for consumer in consumers:
            consumer.result(20)
    assert sum(seen.values()) == len(seen) == total


def test_a_group_is_rebalanced_across_loops() -> None:
    broker = Broker()
    leave = threading.Event()
    joined = threading.Event()

    async def stay() -> tuple[int, int]:
        async with Client(broker) as client:
            await client.topic()
            member = await client.join()
            await read(member)
            joined.set()
            while len(member.assignment()) != 2:
                await read(member, wait=0.05)
            leave.set()
            while len(member.assignment()) != 4:
                await read(member, wait=0.05)
            return 2, 4

    async def visit() -> int:
        async with Client(broker) as client:
            member = await client.join()
            while not leave.is_set():
                await read(member, wait=0.05)
            return len(member.assignment())

    with ThreadPoolExecutor(2) as pool:
        staying = pool.submit(asyncio.run, stay())
        assert joined.wait(20)
        visiting = pool.submit(asyncio.run, visit())
        assert visiting.result(20) == 2
        assert staying.result(20) == (2, 4)


def test_a_loop_closed_during_a_fetch_does_not_affect_others() -> None:
    broker = Broker()
    dead = asyncio.new_event_loop()
    clients = [Client(broker)]

    async def fall_asleep() -> None:
        await clients[0].backend.open()
        await clients[0].topic()
        source = await clients[0].subscribe()
        sleepers.append(asyncio.create_task(take(source, wait=30)))
        await asyncio.sleep(0)

    async def go_on() -> None:
        async with Client(broker) as client, asyncio.timeout(60):
            source = await client.subscribe()
            sleeping = asyncio.create_task(take(source, wait=30))
            await asyncio.sleep(0)
            await client.publish([b"a"])
            assert bodies(await soon(sleeping)) == [b"a"]

    sleepers: list[asyncio.Task[object]] = []
    dead.run_until_complete(fall_asleep())
    # As if the thread that ran the loop had been abandoned; suppress the warning about the task.
    sleepers[0]._log_destroy_pending = False  # type: ignore[attr-defined]
    dead.close()
    asyncio.run(go_on())


async def test_real_time_ends_leases_too() -> None:
    async with Client(Broker(), lease_seconds=0.05) as client:
        await client.topic()
        await client.publish([b"a"])
        source = await client.subscribe()
        await take(source)
        [again] = await soon(take(source, wait=30))
        assert again.delivery_attempt == 2


def test_a_manual_clock_only_goes_forward() -> None:
    clock = ManualClock()
    before = clock.now()
    clock.advance(90)
    assert (clock.now() - before).total_seconds() == 90
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
    assert abs(SystemClock().time() - SystemClock().time()) < 1


async def test_timers_of_a_manual_clock_fire_in_order_and_not_when_cancelled() -> None:
    clock, fired, loop = ManualClock(), list[str](), asyncio.get_running_loop()
    start = clock.time()
    clock.call_at(start + 2, lambda: fired.append("second"), loop)
    clock.call_at(start + 1, lambda: fired.append("first"), loop)
    clock.call_at(start + 1.5, lambda: fired.append("never"), loop).cancel()
    for _ in range(200):
        clock.call_at(start + 3, lambda: fired.append("never"), loop).cancel()
    clock.advance(1.5)
    assert fired == ["first"]
    clock.advance(10)
    assert fired == ["first", "second"]
    clock.call_at(start, lambda: fired.append("overdue"), loop)
    await asyncio.sleep(0)
    assert fired[-1] == "overdue"
