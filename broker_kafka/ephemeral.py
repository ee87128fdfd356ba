"""The end of a group that was one consumer's own. A failure is not one of the consumer: what stays behind expires."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka.admin import AdminClient

from broker.errors import BrokerError
from broker.hooks import logger
from broker_kafka.connection import NEVER, Connection

__all__ = ["delete_group"]

_DELETE_SECONDS: Final = 2.0


async def delete_group(connection: Connection, group: str) -> None:
    """Delete a group that has no members any more."""

    def delete(client: AdminClient) -> dict[str, Future[Any]]:
        return client.delete_consumer_groups([group], request_timeout=NEVER)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    try:
        outcome = (await connection.coordinated(delete, f"Deleting group {group!r}", _DELETE_SECONDS))[group]
    except BrokerError as error:
        outcome = error
    if isinstance(outcome, BrokerError):
        logger.debug("Group %r stays until its positions expire: %s", group, outcome)
