"""The two surfaces side by side: each call on a bus that is not open yet, or not any more, ends alike on both."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import broker
import broker.blocking
from broker_inmem import Broker

BusCall = Callable[[Any], Any]

CALLS: dict[str, BusCall] = {
    "open": lambda bus: bus.open(),
    "close": lambda bus: bus.close(),
    "health": lambda bus: bus.health(),
    "is_open": lambda bus: bus.is_open,
    "repr": repr,
    "topic": lambda bus: bus.topic("orders").name,
    "topic with a bad name": lambda bus: bus.topic("?"),
    "topic with a bad codec": lambda bus: bus.topic("orders", 5),
    "publish": lambda bus: bus.topic("orders").publish(b"x"),
    "publish_batch": lambda bus: bus.topic("orders").publish_batch([b"x"]),
    "enqueue": lambda bus: bus.topic("orders").enqueue(b"x"),
    "flush": lambda bus: bus.topic("orders").flush(),
    "close a topic": lambda bus: bus.topic("orders").close(),
    "topics": lambda bus: bus.admin.topics(),
    "list_dead": lambda bus: bus.admin.list_dead("orders"),
    "bounds": lambda bus: bus.log.bounds("orders"),
    "messages": lambda bus: bus.messages("orders", subscription="billing").closed,
    "messages with a bad option": lambda bus: bus.messages("orders", subscription="billing", prefetch=0),
    "next_message": lambda bus: bus.messages("orders", subscription="billing").next_message(),
    "stop a consumer": lambda bus: bus.messages("orders", subscription="billing").stop(),
    "close a consumer": lambda bus: bus.messages("orders", subscription="billing").close(),
    "receive": lambda bus: bus.messages("orders", subscription="billing").receive(None),
    "records": lambda bus: bus.records("orders", group="audit").closed,
    "records with a bad option": lambda bus: bus.records("orders", group="audit", max_buffered=0),
    "next_record": lambda bus: bus.records("orders", group="audit").next_record(),
    "pause": lambda bus: bus.records("orders", group="audit").pause(),
    "assignment": lambda bus: bus.records("orders", group="audit").assignment(),
    "commit": lambda bus: bus.records("orders", group="audit").commit(),
    "close records": lambda bus: bus.records("orders", group="audit").close(),
    "as_messages": lambda bus: bus.records("orders", group="audit").as_messages().closed,
}

WITH: dict[str, BusCall] = {
    "enter a consumer": lambda bus: bus.messages("orders", subscription="billing"),
    "enter a consumer of records": lambda bus: bus.records("orders", group="audit"),
    "enter a publisher": lambda bus: bus.transactional_publisher("tx-1"),
}


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """The kind of end, and its value; advice differs, since one surface awaits."""
    try:
        value = call()
    except broker.BrokerError as error:
        return type(error).__name__, error.message
    return "returned", str(value).replace("async with", "with").replace("broker.blocking.", "")


def awaited(call: BusCall) -> BusCall:
    async def work(bus: broker.Bus) -> Any:
        result = call(bus)
        return await result if inspect.isawaitable(result) else result

    return work


def entered(call: BusCall) -> BusCall:
    async def work(bus: broker.Bus) -> None:
        async with call(bus):
            pass

    return work


def entered_without_await(call: BusCall) -> BusCall:
    def work(bus: broker.blocking.Bus) -> None:
        with call(bus):
            pass

    return work


BOTH = {name: (awaited(call), call) for name, call in CALLS.items()} | {
    name: (entered(call), entered_without_await(call)) for name, call in WITH.items()
}


@pytest.fixture
def server() -> Broker:
    server = Broker()

    async def prepare() -> None:
        async with broker.connect(server.url) as bus:
            await bus.admin.ensure_topic("orders")

    asyncio.run(prepare())
    return server


@pytest.mark.parametrize("closed", [False, True], ids=["not-open", "closed"])
@pytest.mark.parametrize("name", list(BOTH))
def test_both_surfaces_end_alike(server: Broker, name: str, closed: bool):
    asynchronous, blocking = BOTH[name]
    bus, other = broker.connect(server.url), broker.blocking.connect(server.url)

    async def awaiting() -> Any:
        if closed:
            await bus.open()
            await bus.close()
        try:
            return await asynchronous(bus)
        finally:
            await bus.close()

    if closed:
        other.open()
        other.close()
    try:
        expected, found = outcome(lambda: asyncio.run(awaiting())), outcome(lambda: blocking(other))
        if closed and expected[0] == "Closed":
            # Without a loop, the closed bus is all that can be known.
            assert found[0] == "Closed"
        else:
            assert found == expected
    finally:
        other.close()


def test_a_bus_that_is_only_declared_has_no_thread(server: Broker):
    before = threading.active_count()
    bus = broker.blocking.connect(server.url)
    orders = bus.topic("orders")
    service = bus.messages("orders", subscription="billing").handled_by(print)
    bus.records("orders", group="audit")
    assert threading.active_count() == before
    with bus:
        assert orders.publish(b"1").id
        assert not service.consumer.closed


def test_a_consumer_closed_before_its_bus_opened_stays_closed(server: Broker):
    with broker.blocking.connect(server.url) as bus:
        inbox = bus.messages("orders", subscription="billing")
        inbox.close()
        assert inbox.closed
        with pytest.raises(broker.Closed):
            inbox.open()


def test_a_bus_closed_before_it_opened_stays_closed(server: Broker):
    bus = broker.blocking.connect(server.url)
    bus.close()
    with pytest.raises(broker.Closed, match="The bus is closed"):
        bus.open()


def test_a_failed_open_may_be_repeated(server: Broker):
    server.faults.fail("open", broker.ConnectionFailed("no route"))
    bus = broker.blocking.connect(server.url)
    with pytest.raises(broker.ConnectionFailed):
        bus.open()
    assert not bus.is_open
    with bus:
        assert bus.is_open
        assert bus.topic("orders").publish(b"1").id


def test_an_iteration_ends_with_the_bus(server: Broker):
    with broker.blocking.connect(server.url) as bus:
        inbox = bus.messages("orders", subscription="billing")
        log = bus.records("orders", group="audit")
        inbox.open()
        log.__enter__()
    assert list(inbox) == []
    assert list(inbox.batches()) == []
    assert list(log) == []
    assert list(log.batches()) == []


RUN = {
    "broker": """
import asyncio, broker
from broker_inmem import Broker

server = Broker()

async def prepare():
    async with broker.connect(server.url) as bus:
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"1")

async def handle(message):
    print("handled", flush=True)

asyncio.run(prepare())
bus = broker.connect(server.url)
broker.run(bus.messages("orders", subscription="billing").handled_by(handle))
print(bus, flush=True)
""",
    "broker.blocking": """
import asyncio, broker.blocking
from broker_inmem import Broker

server = Broker()

with broker.blocking.connect(server.url) as bus:
    bus.admin.ensure_topic("orders")
    bus.topic("orders").publish(b"1")

def handle(message):
    print("handled", flush=True)

bus = broker.blocking.connect(server.url)
broker.blocking.run(bus.messages("orders", subscription="billing").handled_by(handle))
print(bus, flush=True)
""",
}


@pytest.mark.parametrize("surface", list(RUN))
def test_run_opens_the_bus_and_closes_it(surface: str):
    with subprocess.Popen([sys.executable, "-c", RUN[surface]], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "handled\n"
        process.send_signal(signal.SIGTERM)
        assert ", closed>" in process.stdout.read()
        assert process.wait(60) == 0
