"""Finds the members of a group that settle its messages by markers, for a consumer of the same group that does not.

Such a member has a mark of its id stored beside the positions that it committed; if that id is in the group now, it
consumes now. What earlier members have left is no sign: nobody alive has their ids. *Failure.* What the brokers do not
tell is asked again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from broker.errors import BrokerError
from broker.group_admin import GroupMember
from broker.hooks import logger
from broker_kafka.connection import Connection
from broker_kafka.groups_admin import KafkaGroups
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.positions import partitions_of
from broker_kafka.queue.commit_texts import mark_in, mark_of

__all__ = ["rivals_of", "warn_of_rivals"]

_BROKERS_SESSION: Final = 60.0
"""Seconds, and more than brokers keep a member of KIP-848 that was killed, unless they are told to."""


async def warn_of_rivals(connection: Connection, topic: str, group: str, warn: Callable[[str], object]) -> None:
    """Look for such members now and then, until some are found or this is cancelled.

    A member that was killed before is forgotten by the first look, so that a group may change over.
    """
    settings = connection.settings
    session = settings.session_timeout_ms / 1000 if settings.group_protocol == "classic" else _BROKERS_SESSION
    while True:
        await asyncio.sleep(max(settings.topic_metadata_refresh_interval_ms / 1000, session))
        try:
            rivals = await rivals_of(connection, topic, group)
        except BrokerError as error:
            logger.debug("Who else consumes group %r is asked again: %s", group, error)
            continue
        if rivals:
            who = ", ".join(sorted({f"{member.client} at {member.host}" for member in rivals})[:3])
            warn(
                f"Subscription {group!r} of {topic!r} is consumed here with queue=offsets, and with queue=markers by "
                f"{who}: leases, delays, attempts and queue_id hold for a part of the messages only. Stop one of the "
                "two, or give it a subscription of its own"
            )
            return


async def rivals_of(connection: Connection, topic: str, group: str) -> list[GroupMember]:
    """The present members of the group that have committed with markers.

    :raises BrokerError: the brokers do not tell.
    """
    stored = await GroupOffsetStore(connection).fetch(group, await partitions_of(connection, topic))
    for position in stored.values():
        if isinstance(position, BrokerError):
            raise position
    marks = {mark_in(position.metadata) for position in stored.values() if isinstance(position, StoredOffset)} - {None}
    if not marks:
        return []
    info = await KafkaGroups(connection).state(group)
    return [member for member in info.members if mark_of(member.id) in marks] if info is not None else []
