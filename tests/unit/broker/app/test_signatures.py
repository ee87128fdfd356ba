"""Every mistake in the signature of a handler is found when it is registered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

import broker
from broker import ConfigurationError, OutboundMessage, OutboundPayload
from broker.app import App, BlockingContext, Context
from broker.app.signatures import read_signature


@dataclass
class Order:
    drink: str


@dataclass
class Refund:
    amount: float


async def takes_bytes(data: bytes) -> None: ...
async def takes_empty(data: bytes | None) -> None: ...
async def takes_text(text: str) -> None: ...
async def takes_json(orders: list[Order] | None) -> None: ...
def takes_a_context(order: Order, *, context: BlockingContext[int]) -> None: ...
async def has_defaults(order: Order, times: int = 3, *rest: int, **others: int) -> None: ...


class Biller:
    async def __call__(self, order: Order, context: Context) -> None: ...


@pytest.mark.parametrize(
    ("function", "codec", "context", "is_async"),
    [
        (takes_bytes, None, None, True),
        (takes_empty, None, None, True),
        (takes_text, broker.Text(), None, True),
        (takes_json, broker.Json(list[Order] | None), None, True),
        (takes_a_context, broker.Json(Order), "context", False),
        (has_defaults, broker.Json(Order), None, True),
        (Biller(), broker.Json(Order), "context", True),
    ],
)
def test_what_is_taken(function: Callable[..., Any], codec: object, context: str | None, is_async: bool) -> None:
    found = read_signature(function, None, None, None)
    assert (found.context, found.is_async, found.returns) == (context, is_async, False)
    assert type(found.codec) is type(codec)
    assert getattr(found.codec, "type", None) == getattr(codec, "type", None)


async def returns_json(order: Order) -> Order: ...
async def returns_some(order: Order) -> Order | None: ...
async def returns_fields(order: Order) -> OutboundPayload[Order] | None: ...
async def returns_bytes(order: Order) -> OutboundMessage: ...


@pytest.mark.parametrize(
    ("function", "kind"), [(returns_json, Order), (returns_some, Order), (returns_fields, Order), (returns_bytes, None)]
)
def test_what_is_returned(function: Callable[..., Any], kind: type | None) -> None:
    found = read_signature(function, None, "invoices", None)
    assert found.returns
    assert getattr(found.result_codec, "type", None) == kind


async def no_payload() -> None: ...
async def only_a_context(context: Context) -> None: ...
async def no_type(order) -> None: ...
async def one_too_many(order: Order, database: int) -> None: ...
async def two_contexts(order: Order, one: Context, two: Context) -> None: ...
async def blocking_in_async(order: Order, context: BlockingContext) -> None: ...
def context_in_thread(order: Order, context: Context) -> None: ...
async def yields(order: Order) -> AsyncIterator[int]:
    yield 1


async def unreadable(order: Missing) -> None: ...  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
async def no_codec(order: Order | Refund) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_payload, "Handler .*no_payload takes no payload. Write it as async def bill"),
        (only_a_context, "takes no payload"),
        (no_type, "Parameter order of handler .*no_type has no type. Annotate it: order: Order, or bytes"),
        (one_too_many, "Parameter database of handler .* gets no value"),
        (two_contexts, "has two contexts"),
        (blocking_in_async, "is `async def`. Annotate context: Context"),
        (context_in_thread, "runs in a thread. Annotate context: BlockingContext"),
        (yields, "yields. Return one value"),
        (unreadable, "annotations of handler .* cannot be read: name 'Missing' is not defined"),
        (no_codec, "Parameter order of handler .* is .*Order.*: Json does not support"),
        (returns_json, "returns Order, which goes nowhere. Give into= a topic"),
        (3, "The handler is 3"),
    ],
)
def test_mistakes(function: Any, says: str) -> None:
    app = App("billing")
    with pytest.raises(ConfigurationError, match=says):
        app.handle("orders", function)


def test_a_result_without_a_type() -> None:
    app = App("billing")
    with pytest.raises(ConfigurationError, match="into='invoices', and returns nothing by its annotation"):
        app.handle("orders", takes_text, into="invoices")
    app.handle("orders", takes_text, into="invoices", into_codec=broker.Text())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"subscription": "a b"}, "subscription name 'a b' is not portable"),
        ({"into": "a b", "into_codec": broker.Text()}, "topic name 'a b' is not portable"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        App("billing").handle("orders", takes_text, **arguments)


def test_a_wrong_app() -> None:
    with pytest.raises(ConfigurationError, match="app name 'a b' is not portable"):
        App("a b")
    with pytest.raises(ConfigurationError, match="drain is 0"):
        App("billing", drain=0)
