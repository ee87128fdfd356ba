"""The bus closes within the deadlines of its consumers and topics, from any caller, and lets handlers end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import broker
from broker_inmem import Broker
from broker_inmem.settings import InmemSettings
from tests.unit.broker.consuming.warp import warped


@pytest.fixture
async def bus() -> AsyncIterator[broker.Bus]:
    bus = broker.connect(InmemSettings(broker=Broker()))
    async with bus:
        await bus.admin.ensure_topic("orders")
        await bus.admin.ensure_topic("out")
        yield bus


class Working:
    """A handler of one message of `orders`, which publishes to `out` once it may."""

    def __init__(self, bus: broker.Bus) -> None:
        self.bus = bus
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def handle(self, message: broker.Message) -> None:
        self.begun.set()
        await self.may_end.wait()
        await self.bus.topic("out").publish(b"from the handler")

    async def start(self) -> asyncio.Task[None]:
        """Publish the message and receive it; when it returns, the handler runs."""
        await self.bus.topic("orders").publish(b"1")
        inbox = self.bus.messages("orders", subscription="billing")
        await inbox.open()
        receiving = asyncio.create_task(inbox.receive(self.handle))
        await self.begun.wait()
        return receiving


def test_consumers_are_closed_concurrently() -> None:
    started = 0

    async def hang(message: broker.Message) -> None:
        nonlocal started
        started += 1
        await asyncio.Event().wait()

    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            await bus.admin.ensure_topic("orders")
            receiving: list[asyncio.Task[None]] = []
            await bus.topic("orders").publish(b"1")
            for number in range(4):
                inbox = bus.messages("orders", subscription=f"sub-{number}", close_timeout=10)
                await inbox.open()
                receiving.append(asyncio.create_task(inbox.receive(hang)))
            while started < 4:
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await bus.close()
            assert 10 <= loop.time() - began < 20
            await asyncio.gather(*receiving, return_exceptions=True)

    warped(test)


async def test_a_cancelled_close_continues_and_a_second_call_waits_for_it(bus: broker.Bus) -> None:
    working = Working(bus)
    receiving = await working.start()
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    second = asyncio.create_task(bus.close())
    await asyncio.sleep(0)
    assert not second.done()
    with pytest.raises(broker.Closed):
        bus.messages("orders", subscription="billing")
    with pytest.raises(broker.Closed):
        bus.records("orders", group="audit")
    working.may_end.set()
    await second
    await receiving
    with pytest.raises(broker.Closed):
        await bus.topic("out").publish(b"too late")


async def test_a_handler_may_publish_while_the_bus_closes() -> None:
    server = Broker()
    async with broker.connect(InmemSettings(broker=server)) as bus:
        await bus.admin.ensure_topic("orders")
        await bus.admin.ensure_topic("out")
        working = Working(bus)
        receiving = await working.start()
        closing = asyncio.create_task(bus.close())
        await asyncio.sleep(0)
        working.may_end.set()
        await closing
        await receiving
    async with broker.connect(InmemSettings(broker=server)) as bus:
        assert (await bus.admin.describe_topic("out")).messages == 1
        assert (await bus.admin.lag("orders", "billing")).waiting == 0


async def test_a_handler_may_close_the_bus(bus: broker.Bus) -> None:
    async def handle(message: broker.Message) -> None:
        await bus.close()

    await bus.topic("orders").publish(b"1")
    inbox = bus.messages("orders", subscription="billing")
    await inbox.open()
    async with asyncio.timeout(60):
        await inbox.receive(handle)
        await bus.close()
    with pytest.raises(broker.Closed):
        await bus.topic("orders").publish(b"2")


@pytest.mark.parametrize("start", ["middle", 5, None])
async def test_an_invalid_start_is_refused(bus: broker.Bus, start: object) -> None:
    with pytest.raises(broker.ConfigurationError, match="start"):
        bus.messages("orders", subscription="billing", start=start)  # pyright: ignore[reportArgumentType]
    with pytest.raises(broker.ConfigurationError, match="start"):
        bus.records("orders", group="audit", start=start)  # pyright: ignore[reportArgumentType]
    with pytest.raises(broker.ConfigurationError, match="start"):
        await bus.admin.ensure_subscription("orders", "billing", start=start)  # pyright: ignore[reportArgumentType]
    assert await bus.admin.subscriptions("orders") == []


@pytest.mark.parametrize(
    ("option", "value"), [("dead_letter", 5), ("retry", "always"), ("codec", 5), ("stop_when_idle", float("nan"))]
)
def test_an_option_of_a_wrong_type_is_named(option: str, value: object) -> None:
    bus = broker.connect(InmemSettings(broker=Broker()))
    with pytest.raises(broker.ConfigurationError, match=option):
        bus.messages("orders", subscription="billing", **{option: value})  # pyright: ignore[reportArgumentType, reportCallIssue]
