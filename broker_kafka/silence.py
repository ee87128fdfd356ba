"""Which broker did not answer, where no other one can: found out while it is waited for, so that it costs no time.

*Concurrency.* Stateless; any number at once. *Cancellation.* What was asked is answered to nobody. *Failure.* Where it
cannot be found out, the error goes without a name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from confluent_kafka.admin import (
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from broker.errors import BrokerError
from broker_kafka.any_broker import Patience, is_silence, read_metadata
from broker_kafka.connection import Connection

__all__ = ["MEND", "OFFSETS", "coordinator_named", "named", "silent_brokers_named"]

R = TypeVar("R")

OFFSETS: Final = "__consumer_offsets"
MEND: Final = "Resume or restart that broker, or do it again when the cluster has given its work to another"


def named(broker: Any) -> str:
    """A broker for people. :param broker: as the library tells of one."""
    return f"broker {broker.id} at {broker.host}:{broker.port}"


@asynccontextmanager
async def coordinator_named(connection: Connection, group: str) -> AsyncGenerator[Callable[[], str | None]]:
    """Within the block, which waits for a group's coordinator, find out which broker that is; a call tells it."""
    async with _meanwhile(connection, lambda: _coordinator(connection, group)) as told:
        yield told


@asynccontextmanager
async def silent_brokers_named(connection: Connection) -> AsyncGenerator[Callable[[], str | None]]:
    """Within the block, which waits for all brokers, find out which of them are silent; a call tells them."""
    async with _meanwhile(connection, lambda: _silent_brokers(connection)) as told:
        yield told


@asynccontextmanager
async def _meanwhile(
    connection: Connection, find: Callable[[], Coroutine[Any, Any, R]]
) -> AsyncGenerator[Callable[[], R | None]]:
    async def search() -> R | None:
        # Whoever is not silent has answered by then.
        await asyncio.sleep(connection.settings.request_timeout * Patience.SHARE)
        try:
            return await find()
        except BrokerError:
            return None

    task = asyncio.get_running_loop().create_task(search(), name="broker-kafka-silence")
    try:
        yield lambda: task.result() if task.done() and not task.cancelled() else None
    finally:
        task.cancel()


async def _coordinator(connection: Connection, group: str) -> str | None:
    """The leader of the partition that keeps the group's offsets."""
    found = await read_metadata(connection, "The coordinator", _time(connection))
    topic = found.topics.get(OFFSETS)
    if topic is None or not topic.partitions:
        return None
    partition = topic.partitions.get(abs(_java_hash(group)) % len(topic.partitions))
    leader = None if partition is None else found.brokers.get(partition.leader)
    return None if leader is None else named(leader)


async def _silent_brokers(connection: Connection) -> str | None:
    found = await read_metadata(connection, "The brokers", _time(connection))
    patience = connection.settings.request_timeout * Patience.SHARE / 2

    async def silent(number: int) -> bool:
        # What concerns a broker is asked of that one; that it may not be told is an answer too.
        resource = ConfigResource(ResourceType.BROKER, str(number))

        def start(client: Any) -> Any:
            return client.describe_configs([resource], request_timeout=patience)

        return any(map(is_silence, (await connection.outcomes(start, "A broker")).values()))

    numbers = sorted(found.brokers)
    silence = await asyncio.gather(*map(silent, numbers))
    names = [named(found.brokers[number]) for number, is_silent in zip(numbers, silence, strict=True) if is_silent]
    return ", ".join(names) or None


def _time(connection: Connection) -> float:
    return connection.settings.request_timeout / 2


def _java_hash(text: str) -> int:
    """`String.hashCode()`, by which brokers choose the partition of a group."""
    found = 0
    units = text.encode("utf-16-le")
    for at in range(0, len(units), 2):
        found = (31 * found + int.from_bytes(units[at : at + 2], "little")) & 0xFFFFFFFF
    return found - (1 << 32) if found >= 1 << 31 else found
