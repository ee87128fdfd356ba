"""Requests of administration that several modules make, over the one admin client of a `Connection`.

*Concurrency.* Any number may be under way. *Cancellation.* A cancelled request goes on at the broker. *Failure.* Every
error is one of `broker.errors`; what the brokers say will work in a moment is asked again, until the request timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from confluent_kafka import TopicCollection

from broker.errors import BrokerError
from broker_kafka.connection import Connection

__all__ = ["ask", "ask_one", "describe", "passing", "settled"]

R = TypeVar("R")

_PAUSE: Final = 0.05


async def ask(connection: Connection, start: Callable[[Any], Any], what: str) -> Any:
    """Make a request with one answer; that, or the BrokerError."""
    (result,) = (await connection.outcomes(start, what)).values()
    return result


async def ask_one(connection: Connection, start: Callable[[Any], Any], what: str) -> Any:
    """Make a request with one answer, again while that says that it will be another in a moment.

    :raises BrokerError: it failed.
    """
    result = await settled(connection.settings.request_timeout, lambda: ask(connection, start, what), passing)
    if isinstance(result, BrokerError):
        raise result
    return result


async def describe(connection: Connection, topic: str) -> Any:
    """The library's description of a topic. It never creates the topic, as asking for its metadata may.

    :raises TopicNotFound: there is none.
    """
    timeout = connection.settings.request_timeout
    return await ask_one(
        connection,
        lambda client: client.describe_topics(TopicCollection([topic]), request_timeout=timeout),
        f"Topic {topic!r}",
    )


def passing(result: object) -> bool:
    """Whether this is an error that ends by itself: a coordinator that loads, a leader that is being chosen."""
    return isinstance(result, BrokerError) and result.retriable


async def settled(timeout: float, attempt: Callable[[], Awaitable[R]], again: Callable[[R], bool]) -> R:
    """Repeat an attempt while `again` says that its result will change by itself; at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        result = await attempt()
        if not again(result) or time.monotonic() >= deadline:
            return result
        await asyncio.sleep(_PAUSE)
