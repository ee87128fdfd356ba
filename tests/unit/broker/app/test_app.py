"""Apps: registered functions at work on a bus in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

import broker
from broker import ConfigurationError, Message, OutboundPayload, Retry
from broker.app import App, BlockingContext, Call, CircuitBreaker, Context, limit_rate, make_context
from broker.testing.harness import unique
from broker.testing.waiting import eventually


@dataclass
class Order:
    drink: str


@dataclass
class Invoice:
    text: str


class State(NamedTuple):
    till: list[str]


@asynccontextmanager
async def bus_with(*topics: str) -> AsyncGenerator[broker.Bus]:
    async with broker.connect(f"inmem://{unique('apps')}") as bus:
        for topic in topics:
            await bus.admin.ensure_topic(topic)
        yield bus


async def order(bus: broker.Bus, *drinks: str, topic: str = "orders") -> None:
    for drink in drinks:
        await bus.topic(topic, broker.Json(Order)).publish(Order(drink), key="k")


async def test_payload_state_result_and_ack() -> None:
    till: list[str] = []
    ended: list[str] = []

    @asynccontextmanager
    async def lifespan(bus: broker.Bus) -> AsyncGenerator[State]:
        assert bus.is_open
        yield State(till)
        ended.append("lifespan")

    async def bill(order: Order, context: Context[State]) -> Invoice | None:
        context.state.till.append(f"{order.drink} {context.message.topic}")
        return None if order.drink == "water" else Invoice(f"one {order.drink}")

    app = App("billing", lifespan=lifespan)
    app.handle("orders", bill, into="invoices")
    async with bus_with("orders", "invoices") as bus:
        async with app.running(bus) as running:
            await order(bus, "coffee", "water", "tea")
            await eventually(lambda: len(till) == 3, 30)
            assert running.trouble == ""
            assert not ended
        assert ended == ["lifespan"]
        assert running.trouble == "app billing stops"
        assert (await bus.admin.lag("orders", "billing")).waiting == 0
        async with bus.messages("invoices", subscription="look", codec=broker.Json(Invoice)) as inbox:
            texts = {(await next_one(inbox)).payload.text for _ in range(2)}
    assert till == ["coffee orders", "water orders", "tea orders"]
    assert texts == {"one coffee", "one tea"}


async def next_one(inbox: broker.MessageConsumer[Any]) -> Message[Any]:
    message = await inbox.next_message(timeout=30)
    assert message is not None
    return message


async def test_handlers_can_be_called_without_a_broker() -> None:
    async def bill(order: Order, context: Context[State]) -> None:
        context.state.till.append(order.drink)

    till: list[str] = []
    await bill(Order("tea"), make_context(State(till)))
    assert till == ["tea"]
    with pytest.raises(ConfigurationError, match=r"no bus.*make_context"):
        _ = make_context().bus


def test_a_service_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import broker.app, broker.otel, broker.probes, broker.cli.run"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_plain_functions_run_in_threads_and_publish() -> None:
    threads: set[str] = set()

    def bill(order: Order, context: BlockingContext[State]) -> OutboundPayload[Invoice]:
        threads.add(threading.current_thread().name)
        context.publish("journal", order.drink.encode())
        return OutboundPayload(Invoice(order.drink), key="customer")

    app = App("billing", lifespan=lambda bus: asynccontextmanager(states)(bus))
    app.handle("orders", bill, into="invoices")
    async with bus_with("orders", "invoices", "journal") as bus, app.running(bus):
        await order(bus, "coffee")
        async with bus.messages("invoices", subscription="look") as inbox:
            invoice = await next_one(inbox)
        async with bus.messages("journal", subscription="look") as inbox:
            assert (await next_one(inbox)).data == b"coffee"
    assert (invoice.key, invoice.data) == (b"customer", b'{"text":"coffee"}')
    assert threads
    assert threading.current_thread().name not in threads


async def states(bus: broker.Bus) -> AsyncGenerator[State]:
    yield State([])


async def test_layers_are_around_each_message_the_first_outermost() -> None:
    seen: list[str] = []

    def named(name: str) -> Any:
        async def layer(message: Message[Any], call: Call) -> object:
            seen.append(f"{name} {message.payload.drink}")
            try:
                return await call(message)
            finally:
                seen.append(f"{name} ends")

        return layer

    async def bill(order: Order) -> None:
        seen.append("handler")

    app = App("billing", layers=[named("outer")])
    app.handle("orders", bill, layers=[named("inner")])
    async with bus_with("orders") as bus, app.running(bus):
        await order(bus, "tea")
        await eventually(lambda: len(seen) == 5, 30)
    assert seen == ["outer tea", "inner tea", "handler", "inner ends", "outer ends"]


async def test_a_layer_may_answer_in_place_of_the_handler() -> None:
    async def drop(message: Message[Any], call: Call) -> object:
        return None

    async def bill(order: Order) -> None:
        raise AssertionError("is never called")

    app = App("billing", layers=[drop])
    app.handle("orders", bill)
    async with bus_with("orders") as bus, app.running(bus):
        await order(bus, "tea")
        await eventually(lambda: settled(bus), 30)


async def settled(bus: broker.Bus) -> bool:
    lag = await bus.admin.lag("orders", "billing")
    return not lag.waiting and not lag.unsettled


async def test_options_reach_the_consumer() -> None:
    tries: list[str] = []

    async def bill(order: Order) -> None:
        tries.append(order.drink)
        raise ValueError("no paper")

    app = App("billing")
    app.handle("orders", bill, subscription="bills", retry=Retry(max_attempts=1), dead_letter="orders.dead")
    async with bus_with("orders", "orders.dead") as bus, app.running(bus):
        await order(bus, "tea")
        async with bus.messages("orders.dead", subscription="look") as letters:
            letter = await next_one(letters)
    assert letter.attributes["dead-letter-subscription"] == "bills"
    assert tries == ["tea"]


async def test_the_first_consumer_that_fails_stops_all() -> None:
    async def bill(order: Order) -> None: ...

    app = App("billing")
    app.handle("orders", bill)
    app.handle("refunds", bill)
    async with bus_with("orders", "refunds") as bus:
        with pytest.raises(broker.TopicNotFound):
            async with app.running(bus) as running:
                await bus.admin.delete_topic("refunds")
                await running.wait()
                assert "failed" in running.trouble or "stops" in running.trouble


async def test_a_missing_topic_opens_nothing() -> None:
    entered: list[str] = []

    @asynccontextmanager
    async def lifespan(bus: broker.Bus) -> AsyncGenerator[None]:
        entered.append("begins")
        try:
            yield
        finally:
            entered.append("ends")

    async def bill(order: Order) -> None: ...

    app = App("billing", lifespan=lifespan)
    app.handle("orders", bill)
    app.handle("missing", bill)
    async with bus_with("orders") as bus:
        with pytest.raises(broker.TopicNotFound):
            async with app.running(bus):
                raise AssertionError("does not run")
    assert entered == ["begins", "ends"]


async def test_a_lifespan_that_fails_opens_nothing() -> None:
    @asynccontextmanager
    async def lifespan(bus: broker.Bus) -> AsyncGenerator[None]:
        raise ConnectionError("no database")
        yield

    async def bill(order: Order) -> None: ...

    app = App("billing", lifespan=lifespan)
    app.handle("orders", bill)
    async with bus_with("orders") as bus:
        with pytest.raises(ConnectionError, match="no database"):
            async with app.running(bus):
                raise AssertionError("does not run")
        assert await bus.admin.subscriptions("orders") == []


async def test_a_running_handler_ends_before_the_lifespan() -> None:
    begun, seen = asyncio.Event(), list[str]()

    @asynccontextmanager
    async def lifespan(bus: broker.Bus) -> AsyncGenerator[None]:
        yield
        seen.append("lifespan ends")

    async def bill(order: Order) -> None:
        begun.set()
        await asyncio.sleep(0.1)
        seen.append("handler ends")

    app = App("billing", lifespan=lifespan)
    app.handle("orders", bill)
    async with bus_with("orders") as bus:
        async with app.running(bus):
            await order(bus, "tea")
            await begun.wait()
        assert seen == ["handler ends", "lifespan ends"]
        assert await settled(bus)


async def test_a_cancelled_block_cancels_its_handlers() -> None:
    begun, seen = asyncio.Event(), list[str]()

    async def bill(order: Order) -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    app = App("billing")
    app.handle("orders", bill)
    async with bus_with("orders") as bus:

        async def run() -> None:
            async with app.running(bus) as running:
                await running.wait()

        task = asyncio.create_task(run())
        await order(bus, "tea")
        await begun.wait()
        task.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert seen == ["cancelled"]
        assert (await bus.admin.lag("orders", "billing")).waiting == 1


async def test_an_app_without_handlers_and_handlers_that_share_a_subscription() -> None:
    async def bill(order: Order) -> None: ...

    async def pack(order: Order) -> None: ...

    app = App("billing")
    async with bus_with() as bus:
        with pytest.raises(ConfigurationError, match="App 'billing' has no handler"):
            async with app.running(bus):
                pass
    app.handle("orders", bill)
    with pytest.raises(ConfigurationError, match=r"pack and .*bill.* share subscription 'billing'"):
        app.handle("orders", pack)
    app.handle("orders", pack, subscription="packing")


async def test_a_rate_is_shared_by_all_handlers_of_the_layer() -> None:
    times: list[float] = []

    async def bill(order: Order) -> None:
        times.append(asyncio.get_running_loop().time())

    app = App("billing", layers=[limit_rate(50)])
    app.handle("orders", bill, concurrency=10)
    app.handle("refunds", bill, concurrency=10)
    async with bus_with("orders", "refunds") as bus, app.running(bus):
        for number in range(10):
            await order(bus, str(number))
            await order(bus, str(number), topic="refunds")
        await eventually(lambda: len(times) == 20, 30)
    # An idle bucket holds a tenth of a second, five messages, and fifteen take 0.3 s.
    assert times[-1] - times[0] > 0.25


@dataclass
class Consumer:
    """:ivar calls: pauses and resumptions, in order."""

    calls: list[str] = field(default_factory=list[str])

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


async def test_a_circuit_opens_after_failures_in_a_row_and_tries_one_message() -> None:
    consumer, breaker = Consumer(), CircuitBreaker(failures=3, pause=0.05)
    breaker.guard(consumer)

    async def fails(message: Message[Any]) -> None:
        raise ConnectionError("no database")

    async def works(message: Message[Any]) -> None: ...

    message: Any = None

    async def failing(times: int) -> None:
        for _ in range(times):
            with pytest.raises(ConnectionError):
                await breaker(message, fails)

    await failing(2)
    await breaker(message, works)
    await failing(2)
    assert consumer.calls == []
    await failing(1)
    assert (consumer.calls, breaker.is_open) == (["pause"], True)
    await eventually(lambda: consumer.calls == ["pause", "resume"], 30)
    await failing(1)
    assert consumer.calls == ["pause", "resume", "pause"]
    await eventually(lambda: not breaker.is_open, 30)
    await breaker(message, works)
    await failing(2)
    assert not breaker.is_open
    breaker.release(consumer)


async def test_a_circuit_pauses_the_consumers_of_an_app() -> None:
    handled: list[str] = []
    down = True

    async def bill(order: Order) -> None:
        if down:
            raise ConnectionError("no database")
        handled.append(order.drink)

    app = App("billing", layers=[CircuitBreaker(failures=2, pause=0.2)])
    app.handle("orders", bill, retry=Retry(initial=0.05, maximum=0.05))
    async with bus_with("orders") as bus, app.running(bus) as running:
        consumer = running._consumers[0]
        await order(bus, "tea", "milk")
        await eventually(lambda: consumer.state == "paused", 30)
        assert running.trouble == ""
        down = False
        await eventually(lambda: len(handled) == 2, 30)
