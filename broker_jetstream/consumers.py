"""Durable consumers: what is asked of the server for subscriptions and groups, and checks of what is there.

All calls are requests to the server and may be repeated; creating what exists leaves it as it is, but for a lease
or a delivery limit that would break a promise, which is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from broker import SubscriptionNotFound, Unsupported
from broker.driver import NativeName, Start
from broker_jetstream.connection import Connection
from broker_jetstream.layout import Layout
from broker_jetstream.times import NANOSECONDS, server_time

__all__ = [
    "EPHEMERAL_SECONDS",
    "GROUP",
    "NANOSECONDS",
    "POSITION_KEY",
    "create",
    "delete",
    "ensure_message_consumer",
    "info",
    "last_delivery",
    "message_config",
    "partition_config",
    "pinned_by",
    "pull_request",
    "start_config",
]

EPHEMERAL_SECONDS: Final = 300
"""A subscription of one consumer's own, whose process died, goes after this time."""
GROUP: Final = "owner"
"""The priority group that every pull of a record group names."""
POSITION_KEY: Final = "anybroker-position"
"""Metadata of a durable whose committed position is not its floor: it starts, or was sought, somewhere else."""
_FOREVER: Final = 3650 * 86_400 * NANOSECONDS
_MAX_WAITING: Final = 8192


def partition_config(connection: Connection, layout: Layout, partition: int, position: int) -> dict[str, Any]:
    """The durable of one partition of a group."""
    # Every durable can go everywhere: one that began at a later message refuses to be reset before it.
    return {
        "ack_policy": "all",
        "ack_wait": _FOREVER,
        "max_deliver": -1,
        "max_ack_pending": -1,
        "deliver_policy": "all",
        "replay_policy": "instant",
        "filter_subject": layout.partition_filter(partition),
        "priority_groups": [GROUP],
        "priority_policy": "pinned_client",
        "priority_timeout": round(connection.settings.owner_timeout * NANOSECONDS),
        "metadata": {POSITION_KEY: str(position)} if position > 1 else {},
    }


def pull_request(connection: Connection, number: int, max_bytes: int, *, no_wait: bool = False) -> dict[str, Any]:
    """The body of a pull for so many messages.

    :param max_bytes: as the server counts them, with headers and subjects; it ends the pull at a message that is larger
        than what is left.
    :param no_wait: have it answered at once, with a status if there is nothing.
    """
    if no_wait:
        return {"batch": number, "no_wait": True}
    settings = connection.settings
    return {
        "batch": number,
        "expires": round(settings.pull_expires * NANOSECONDS),
        "idle_heartbeat": round(settings.pull_heartbeat * NANOSECONDS),
        "max_bytes": max_bytes,
    }


def pinned_by(info: Mapping[str, Any]) -> bytes:
    """The pin of a group's durable; empty if nobody is pinned."""
    groups: list[dict[str, Any]] = info.get("priority_groups") or []
    return next((group.get("pinned_client_id") or "" for group in groups if group.get("group") == GROUP), "").encode()


def start_config(start: Start) -> dict[str, Any]:
    """Where a new consumer begins, as the server spells it."""
    if isinstance(start, datetime):
        return {"deliver_policy": "by_start_time", "opt_start_time": server_time(start)}
    return {"deliver_policy": "all" if start == "earliest" else "new"}


def message_config(connection: Connection, layout: Layout, start: Start, *, ephemeral: bool) -> dict[str, Any]:
    """The configuration of a consumer for the Message family."""
    settings = connection.settings
    config: dict[str, Any] = {
        "ack_policy": "explicit",
        "ack_wait": round(settings.lease_seconds * NANOSECONDS),
        "max_deliver": -1,
        "max_ack_pending": settings.max_ack_pending,
        "max_waiting": _MAX_WAITING,
        "replay_policy": "instant",
        **start_config(start),
    }
    if layout.filter is not None:
        config["filter_subject"] = layout.filter
    if ephemeral:
        config["inactive_threshold"] = EPHEMERAL_SECONDS * NANOSECONDS
    return config


async def create(
    connection: Connection, layout: Layout, name: str, config: dict[str, Any], *, what: str
) -> dict[str, Any]:
    """Create a durable consumer, or update the one of this name to the configuration."""
    body = {"stream_name": layout.stream, "config": {"name": name, "durable_name": name, **config}}
    subject = f"CONSUMER.CREATE.{layout.stream}.{name}"
    single = config.get("filter_subject")
    if single and single != ">":
        # Servers check permissions on the filter by this longer subject.
        subject += f".{single}"
    return await connection.api(subject, body, what=what)


async def info(connection: Connection, stream: str, name: str, what: str) -> dict[str, Any]:
    """What the server says of a consumer.

    :raises SubscriptionNotFound, TopicNotFound: it does not exist, or its stream does not.
    """
    return await connection.api(f"CONSUMER.INFO.{stream}.{name}", what=what)


def last_delivery(info: Mapping[str, Any]) -> tuple[int, int]:
    """The number of a consumer's last delivery, and the place in the stream of the last message that it delivered."""
    delivered: Mapping[str, Any] = info.get("delivered") or {}
    return int(delivered.get("consumer_seq") or 0), int(delivered.get("stream_seq") or 0)


async def delete(connection: Connection, stream: str, name: str, what: str) -> None:
    """Delete a consumer; one that is not there is fine."""
    try:
        await connection.api(f"CONSUMER.DELETE.{stream}.{name}", what=what)
    except SubscriptionNotFound:
        return


async def ensure_message_consumer(
    connection: Connection,
    layout: Layout,
    subscription: str,
    name: str,
    *,
    start: Start,
    create_missing: bool = True,
    ephemeral: bool = False,
    max_deliveries: int | None = None,
) -> dict[str, Any]:
    """The consumer of a subscription, made if it is missing, with a lease and a delivery limit that keep our promises.

    :raises SubscriptionNotFound: it is missing and was not to be made.
    :raises Unsupported: it is somebody else's and does not ack each message, or would break a promise.
    """
    what = f"Subscription {subscription!r} of topic {layout.topic!r}"
    wanted = message_config(connection, layout, start, ephemeral=ephemeral)
    try:
        found = await info(connection, layout.stream, name, what)
    except SubscriptionNotFound:
        if not create_missing:
            raise
        return await create(connection, layout, name, wanted, what=what)
    config: dict[str, Any] = found["config"]
    if config.get("deliver_subject"):
        raise Unsupported(f"{what} is a push consumer", advice="Use a pull consumer")
    if config.get("ack_policy") != "explicit":
        raise Unsupported(
            f"{what} has the ack policy {config.get('ack_policy')!r}", advice="Use one with explicit acks"
        )
    limit = config.get("max_deliver", -1)
    limit_is_low = limit > 0 and (max_deliveries is None or limit <= max_deliveries)
    lease_is_short = config.get("ack_wait", 0) < wanted["ack_wait"] and not config.get("backoff")
    if not limit_is_low and not lease_is_short:
        return found
    if isinstance(subscription, NativeName) or isinstance(layout.topic, NativeName):
        raise Unsupported(
            f"{what} has max_deliver={limit} and ack_wait={config.get('ack_wait', 0) / NANOSECONDS:g} s",
            advice="Set max_deliver to -1 and ack_wait to lease_seconds on it, or lower lease_seconds",
        )
    kept = {**config, "max_deliver": -1, "ack_wait": max(config.get("ack_wait", 0), wanted["ack_wait"])}
    return await create(connection, layout, name, kept, what=what)
