"""Requests of the admin client that any broker, or every broker, answers; and the retries that all requests share.

librdkafka sends a request to the broker of its last one for as long as that connection stands, even if the broker is
frozen. A new client only uses brokers that answered it. So a request that any broker can answer gets a share of its
time for each broker, and after each silent one a new client. Where one certain broker has to answer, the error names
the broker that did not, which is found out while the request waits.

*Concurrency.* Stateless; any number of requests at once. *Cancellation.* A cancelled request goes on at the broker.
*Failure.* A BrokerError. Retriable answers are retried until the request timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from math import inf
from time import monotonic
from typing import Any, Final, TypeVar

from confluent_kafka import TopicCollection
from confluent_kafka.admin import (
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from broker import BrokerError, ConnectionFailed, OperationTimeout, TopicNotFound
from broker.driver import Backoff, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.errors import translate

__all__ = [
    "RESTART_ADVICE",
    "TimeBudget",
    "broker_name",
    "cluster_id",
    "describe_topic",
    "is_no_response",
    "is_retriable",
    "no_response",
    "plain_str",
    "read_metadata",
    "request",
    "request_any_broker",
    "request_every_broker",
    "request_with_retries",
    "retry_until_answered",
    "retry_while",
    "while_waiting",
]

R = TypeVar("R")

RESTART_ADVICE: Final = "Resume or restart that broker, or retry after the cluster has failed over"
_LEAST_SECONDS: Final = 0.01
_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
_CONTROLLER_LOOKUPS: Final = 5
_CLIENT_START_SECONDS: Final = 0.1
_PROPAGATION_SECONDS: Final = 5.0
"""After so long, every broker knows a new topic."""


# -- time ----------------------------------------------------------------------------------------------------


class TimeBudget:
    """The time of a request, divided so that other brokers can be tried after a silent one.

    :param timeout: seconds.
    """

    SHARE: Final = 0.2
    """The part of the time that one broker gets."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._until = monotonic() + timeout

    @property
    def spent(self) -> bool:
        return monotonic() >= self._until

    @property
    def left(self) -> float:
        return max(_LEAST_SECONDS, self._until - monotonic())

    @property
    def per_broker(self) -> float:
        # In the second half one broker gets all that is left, because the whole cluster may be slow.
        left = self.left
        return left if left < self._timeout / 2 else self._timeout * self.SHARE


# -- requests ------------------------------------------------------------------------------------------------


async def request(connection: Connection, start: Callable[[Any], Any], what: str) -> Any:
    """Make a request with one answer; return the answer, or the BrokerError.

    :param start: calls the admin client and returns its futures.
    :param what: for the error: "Describing topic 'orders'".
    """
    (result,) = (await connection.outcomes(start, what)).values()
    return result


async def request_with_retries(
    connection: Connection,
    start: Callable[[Any], Any],
    what: str,
    *,
    how: Callable[[Connection, Callable[[Any], Any], str], Awaitable[Any]] = request,
) -> Any:
    """Make a request with one answer, and retry retriable errors until the request timeout.

    :param how: `request`, or another function of this package that makes one.
    :raises BrokerError: the request failed.
    """
    result = await retry_while(connection.settings.request_timeout, lambda: how(connection, start, what), is_retriable)
    if isinstance(result, BrokerError):
        raise result
    return result


async def request_any_broker(
    connection: Connection, start: Callable[[Any, float], Any], what: str, *, known: bool = False
) -> Any:
    """Make a request with one answer that any broker can give; try others after a silent one.

    :param start: gets the admin client and the seconds that this broker has; may be called several times.
    :param known: another broker has just reported the topic, so that TopicNotFound is retried.
    :raises BrokerError: the request failed.
    """
    budget = TimeBudget(connection.settings.request_timeout)
    propagated, backoff = monotonic() + _PROPAGATION_SECONDS, Backoff(_PAUSE, _LONGEST_PAUSE)
    while True:
        client, seconds = connection.client, budget.per_broker
        result = await request(connection, lambda admin, seconds=seconds: start(admin, seconds), what)
        if not isinstance(result, BrokerError):
            return result
        unknown_yet = known and isinstance(result, TopicNotFound) and monotonic() < propagated
        if not (is_retriable(result) or unknown_yet) or budget.spent:
            raise result
        if is_no_response(result):
            await _switch_client(connection, client)
            await _find_responsive_controller(connection, what, budget.left)
        else:
            await asyncio.sleep(min(backoff.next(), budget.left))


async def request_every_broker(connection: Connection, start: Callable[[Any], Any], what: str) -> Any:
    """`request` whose answer is made of one from each broker; without one of them it fails, and the error names it."""
    async with while_waiting(connection, lambda: _unresponsive_brokers(connection)) as unresponsive:
        found = await request(connection, start, what)
    if isinstance(found, BrokerError) or not found.errors:
        return found
    error, names = translate(found.errors[0], what), unresponsive()
    if names is None or not is_no_response(error):
        return error
    return no_response(f"{what}: every broker has to answer, and there was no answer from {names}", error)


# -- metadata ------------------------------------------------------------------------------------------------


async def read_metadata(connection: Connection, what: str, timeout: float, topic: str | None = None) -> Any:
    """confluent-kafka's metadata of the cluster and its topics, or of one topic, which may create that topic.

    :param what: for the error. :param timeout: seconds.
    :raises BrokerError: no broker answered in time.
    """
    only: Sequence[str] = () if topic is None else (topic,)
    budget = TimeBudget(timeout)
    while True:
        client, seconds = connection.client, budget.per_broker
        try:
            return await connection.call(lambda admin, seconds=seconds: admin.list_topics(*only, timeout=seconds), what)
        except BrokerError as error:
            if not is_no_response(error) or budget.spent:
                raise
        await _switch_client(connection, client)


async def describe_topic(connection: Connection, topic: str, *, known: bool = False, rights: bool = False) -> Any:
    """confluent-kafka's description of a topic. Never creates the topic, as `read_metadata` may.

    :param known: as of `request_any_broker`.
    :param rights: include the operations that this user may do.
    :raises TopicNotFound: the topic does not exist.
    """
    return await request_any_broker(
        connection,
        lambda client, seconds: client.describe_topics(
            TopicCollection([plain_str(topic)]), include_authorized_operations=rights, request_timeout=seconds
        ),
        f"Topic {topic!r}",
        known=known,
    )


async def cluster_id(connection: Connection) -> str:
    """:raises BrokerError: no broker returned the id."""
    found = await request_any_broker(
        connection,
        lambda client, seconds: {"": client.describe_cluster(request_timeout=seconds)},
        "Reading the cluster id",
    )
    return found.cluster_id


def plain_str(name: str) -> str:
    """Convert a subclass of str, such as `NativeName`, for which confluent-kafka 2.16 reads freed memory."""
    return str(name)


async def _switch_client(connection: Connection, client: object) -> None:
    """Replace this admin client, which waits for a broker that does not answer."""
    if not connection.down:
        await connection.replace_client(client)
    await asyncio.sleep(_PAUSE)


async def _find_responsive_controller(connection: Connection, what: str, timeout: float) -> None:
    """Read metadata until the client takes the broker that answered for the controller, to which it sends requests.

    A KRaft broker reports a random broker as the controller, even a frozen one that still counts as alive.

    :raises BrokerError: no broker answered in time.
    """
    budget = TimeBudget(timeout)
    # A new client reads metadata by itself as soon as it connects.
    await asyncio.sleep(_CLIENT_START_SECONDS)
    for _ in range(_CONTROLLER_LOOKUPS):
        found = await read_metadata(connection, what, budget.left)
        if found.controller_id == found.orig_broker_id:
            return


# -- unresponsive brokers ------------------------------------------------------------------------------------


def is_no_response(result: object) -> bool:
    """Whether this is the error of a broker that did not answer."""
    return isinstance(result, OperationTimeout | ConnectionFailed)


def no_response(text: str, error: BrokerError) -> OperationTimeout:
    """The error of a broker that is known by name and did not answer."""
    return OperationTimeout(text, native=error.native, advice=RESTART_ADVICE)


def broker_name(broker: Any) -> str:
    """:param broker: confluent-kafka's metadata of a broker."""
    return f"broker {broker.id} at {broker.host}:{broker.port}"


@asynccontextmanager
async def while_waiting(
    connection: Connection, find: Callable[[], Coroutine[Any, Any, R]]
) -> AsyncGenerator[Callable[[], R | None]]:
    """While the block waits for brokers, find out which of them do not answer; the yielded call returns the result."""

    async def search() -> R | None:
        # A responsive broker has answered by then.
        await asyncio.sleep(connection.settings.request_timeout * TimeBudget.SHARE)
        try:
            return await find()
        except BrokerError:
            return None

    task = asyncio.get_running_loop().create_task(search(), name="broker-kafka-unresponsive")
    try:
        yield lambda: task.result() if task.done() and not task.cancelled() else None
    finally:
        task.cancel()


async def _unresponsive_brokers(connection: Connection) -> str | None:
    timeout = connection.settings.request_timeout
    found = await read_metadata(connection, "The brokers", timeout / 2)

    async def is_unresponsive(number: int) -> bool:
        # The client sends a request about a broker to that broker; any answer will do, also a refusal.
        resource = ConfigResource(ResourceType.BROKER, str(number))

        def start(client: Any) -> Any:
            return client.describe_configs([resource], request_timeout=timeout * TimeBudget.SHARE / 2)

        return any(map(is_no_response, (await connection.outcomes(start, "A broker")).values()))

    numbers = sorted(found.brokers)
    unresponsive = await asyncio.gather(*map(is_unresponsive, numbers))
    names = [broker_name(found.brokers[number]) for number, yes in zip(numbers, unresponsive, strict=True) if yes]
    return ", ".join(names) or None


# -- retries -------------------------------------------------------------------------------------------------


def is_retriable(result: object) -> bool:
    """Whether this is an error that passes: a coordinator that loads, a leader election."""
    return isinstance(result, BrokerError) and result.retriable


async def retry_while(timeout: float, attempt: Callable[[], Awaitable[R]], again: Callable[[R], bool]) -> R:
    """Repeat an attempt while `again(result)` is true, for at most `timeout` seconds; return the last result."""
    deadline, backoff = monotonic() + timeout, Backoff(_PAUSE, _LONGEST_PAUSE)
    while True:
        result = await attempt()
        if not again(result) or (left := deadline - monotonic()) <= 0:
            return result
        await asyncio.sleep(min(backoff.next(), left))


async def retry_until_answered(
    attempt: Callable[[], Awaitable[R]], wanted: Callable[[], bool], *, within: float = inf
) -> R | None:
    """Repeat an attempt while it raises a retriable error and `wanted()` is true; None once it is not.

    :param within: seconds in which the last attempt begins.
    :raises BrokerError: an error that is not retriable, or the last one.
    """
    until = monotonic() + within
    backoff = Backoff(_PAUSE, _LONGEST_PAUSE)
    while wanted():
        try:
            answer = await attempt()
        except BrokerError as error:
            pause = backoff.next()
            if not error.retriable or monotonic() + pause > until:
                raise
            logger.info("Retrying in %.2f s: %s", pause, error)
            await asyncio.sleep(pause)
        else:
            return answer if wanted() else None
    return None
