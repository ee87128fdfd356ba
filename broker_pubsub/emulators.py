"""What an emulator does that its address does not tell: tried out once, on names of its own that are deleted again.

Google's emulator gives a new subscription what its topic retains, as the service does by a seek; Google's pstest gives
it what comes from now on. Nothing that they say of themselves tells them apart for sure.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from secrets import token_hex
from typing import Final

import grpc

from broker import BrokerError
from broker_pubsub import subscriptions
from broker_pubsub.connection import Connection
from broker_pubsub.protocol import Methods, PublishRequest, PubsubMessage, PullRequest, Topic, request_of

__all__ = ["keeps_history"]

_WHAT: Final = "Trying out the emulator"
_RETENTION: Final = timedelta(minutes=10)
_BEFORE: Final = b"before"
_AFTER: Final = b"after"


async def keeps_history(connection: Connection) -> bool:
    """Whether a new subscription gets what was published before it; False too where that cannot be found out."""
    token = token_hex(8)
    topic = Topic(name=connection.names.temporary_topic(token))
    topic.message_retention_duration.FromTimedelta(_RETENTION)
    path = connection.names.temporary(token)
    try:
        async with asyncio.timeout(connection.settings.request_timeout):
            await connection.call(Methods.CREATE_TOPIC, topic, _WHAT)
            try:
                return await _comes(connection, topic.name, path)
            finally:
                await asyncio.shield(asyncio.ensure_future(_clean(connection, topic.name, path)))
    except (BrokerError, TimeoutError):
        return False


async def _comes(connection: Connection, topic: str, path: str) -> bool:
    async def publish(data: bytes) -> None:
        await connection.call(Methods.PUBLISH, PublishRequest(topic=topic, messages=[PubsubMessage(data=data)]), _WHAT)

    await publish(_BEFORE)
    made = request_of(Methods.CREATE_SUBSCRIPTION, name=path, topic=topic, ack_deadline_seconds=60)
    await connection.call(Methods.CREATE_SUBSCRIPTION, made, _WHAT)
    # What comes now comes to every subscription, and what was there before comes with it or ahead of it.
    await publish(_AFTER)
    while True:
        pulled = await connection.call(Methods.PULL, PullRequest(subscription=path, max_messages=10), _WHAT)
        seen = {received.message.data for received in pulled.received_messages}
        if seen:
            return _BEFORE in seen
        await asyncio.sleep(0)


async def _clean(connection: Connection, topic: str, path: str) -> None:
    for work in (
        subscriptions.delete(connection, path, _WHAT),
        connection.call(Methods.DELETE_TOPIC, request_of(Methods.DELETE_TOPIC, topic=topic), _WHAT),
    ):
        try:
            await work
        except (BrokerError, grpc.aio.AioRpcError):
            continue
