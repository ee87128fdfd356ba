"""A function that cannot be called as the library calls it is refused when it is given, and costs no message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

import broker
import broker.blocking
from broker import ConfigurationError
from broker.checks import check_accepts, is_async
from broker_inmem import Broker


async def no_argument() -> None: ...
async def two_arguments(message: object, topic: object) -> None: ...
async def by_name(*, message: object) -> None: ...
async def generates(message: object) -> AsyncGenerator[int]:
    yield 1


def plain_no_argument() -> None: ...
def plain_two_arguments(message: object, topic: object) -> None: ...
def plain_generates(message: object) -> Generator[int]:
    yield 1


class Handlers:
    async def method(self, message: object) -> None: ...
    async def __call__(self, message: object) -> None: ...


async def with_topic(message: object, topic: object) -> None: ...


WRONG: list[Any] = [None, 5, no_argument, two_arguments, by_name, generates, Handlers.method]
WRONG_PLAIN: list[Any] = [None, 5, plain_no_argument, plain_two_arguments, plain_generates, no_argument]
ASYNC: list[Any] = [Handlers().method, Handlers(), partial(with_topic, topic=1)]
RIGHT: list[Callable[[Any], Any]] = [*ASYNC, lambda message: Handlers().method(message), [].append, print]


@pytest.fixture
async def bus(broker_bus: broker.Bus) -> broker.Bus:
    await broker_bus.admin.ensure_topic("orders", partitions=1)
    await broker_bus.topic("orders").publish(b"1")
    return broker_bus


@pytest.mark.parametrize("handler", WRONG)
async def test_a_handler_with_another_signature_is_refused(bus: broker.Bus, handler: Any):
    async with bus.messages("orders", subscription="billing", dead_letter=broker.DROP) as inbox:
        with pytest.raises(ConfigurationError, match="handler"):
            await inbox.receive(handler)
        with pytest.raises(ConfigurationError, match="handler"):
            await inbox.receive_batches(handler)
        with pytest.raises(ConfigurationError, match="handler"):
            inbox.handled_by(handler)
        message = await inbox.next_message(timeout=60)
        assert message is not None
        assert message.data == b"1"


@pytest.mark.parametrize("handler", [*WRONG_PLAIN, *ASYNC])
def test_a_plain_handler_with_another_signature_is_refused(inmem_broker: Broker, handler: Any):
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic("orders")
        bus.topic("orders").publish(b"1")
        with bus.messages("orders", subscription="billing", dead_letter=broker.DROP) as inbox:
            for call in (inbox.receive, inbox.receive_batches, inbox.handled_by):
                with pytest.raises(ConfigurationError, match="handler"):
                    call(handler)
            message = inbox.next_message(timeout=60)
            assert message is not None
            assert message.data == b"1"


@pytest.mark.parametrize("by", ["receive", "receive_batches"])
def test_a_plain_handler_that_returns_a_coroutine_acks_nothing(inmem_broker: Broker, by: str):
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic("orders")
        bus.topic("orders").publish(b"1")
        inbox = bus.messages("orders", subscription="billing", dead_letter=broker.DROP)
        with inbox, pytest.raises(ConfigurationError, match="returned a coroutine"):
            getattr(inbox, by)(lambda message: Handlers().method(message))
        assert bus.admin.lag("orders", "billing").waiting == 1


@pytest.mark.parametrize("function", [no_argument, two_arguments, generates, 5])
async def test_a_callback_of_records_is_refused(bus: broker.Bus, function: Any):
    with pytest.raises(ConfigurationError, match="on_revoking"):
        bus.records("orders", group="audit", on_revoking=function)


@pytest.mark.parametrize("function", [plain_no_argument, plain_two_arguments, plain_generates, no_argument, 5])
def test_a_plain_callback_of_records_is_refused(inmem_broker: Broker, function: Any):
    with pytest.raises(ConfigurationError, match="on_revoking"):
        broker.blocking.connect(inmem_broker.url).records("orders", group="audit", on_revoking=function)


@pytest.mark.parametrize("function", [plain_no_argument, plain_two_arguments, plain_generates, with_topic, 5])
async def test_callbacks_of_hooks_and_redrives_are_refused(bus: broker.Bus, function: Any):
    with pytest.raises(ConfigurationError, match="listener"):
        bus.hooks.listen(function)
    with pytest.raises(ConfigurationError, match="interceptor"):
        bus.hooks.around_handling(function)
    with pytest.raises(ConfigurationError, match="progress"):
        await bus.admin.redrive("orders.dead", to=["orders"], progress=function)
    with pytest.raises(ConfigurationError, match="interceptor"):
        bus.hooks.around_publishing(function)
    with pytest.raises(ConfigurationError, match="interceptor"):
        bus.hooks.around_batch(function)
    with pytest.raises(ConfigurationError, match="listeners are not awaited"):
        bus.hooks.listen(Handlers())


async def test_asynchronous_interceptors_are_refused(bus: broker.Bus):
    @asynccontextmanager
    async def around(subject: object) -> AsyncGenerator[None]:
        yield

    for hook in (bus.hooks.around_publishing, bus.hooks.around_handling, bus.hooks.around_batch):
        with pytest.raises(ConfigurationError, match="interceptors are not awaited"):
            hook(around)  # type: ignore[arg-type]


def test_the_error_names_the_function_its_signature_and_the_argument():
    with pytest.raises(ConfigurationError) as raised:
        check_accepts("handler", no_argument, "a message")
    assert raised.value.message == (
        "handler no_argument() cannot be called with a message: too many positional arguments"
    )
    assert raised.value.advice == "It is called with 1 positional argument"


@pytest.mark.parametrize("function", RIGHT)
def test_whatever_can_be_called_is_accepted(function: Callable[[Any], Any]):
    check_accepts("handler", function, "a message")


def test_coroutine_functions_are_told_from_others():
    assert all(is_async(function) for function in ASYNC)
    assert not any(is_async(function) for function in (print, plain_no_argument, lambda message: asyncio.sleep(0)))
