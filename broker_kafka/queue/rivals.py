"""Finds the members of a group that are at odds with one of its consumers: they settle its messages by markers, and it
does not; or both do so, for other keys, and each passes over what is the other's.

Such a member has a mark of its id stored beside the positions that it committed; if that id is in the group now, it
consumes now. What earlier members have left is no sign: nobody alive has their ids. *Failure.* What the brokers do not
tell is asked again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from broker.errors import BrokerError, ConfigurationError
from broker.group_admin import GroupMember
from broker.hooks import logger
from broker_kafka.connection import Connection
from broker_kafka.groups_admin import KafkaGroups
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.positions import partitions_of
from broker_kafka.queue.commit_texts import keys_in, mark_in, mark_of

__all__ = ["refuse_rivals", "rivals_of", "watch_for_rivals"]

_BROKERS_SESSION: Final = 60.0
"""Seconds, and more than brokers keep a member of KIP-848 that was killed, unless they are told to."""

_OFFSETS: Final = (
    "Subscription {group!r} of {topic!r} is consumed here with queue=offsets, and with queue=markers by {who}: leases, "
    "delays, attempts and queue_id hold for a part of the messages only. Stop one of the two, or give it a "
    "subscription of its own"
)
_SHARED: Final = (
    "The messages of {topic!r} are shared by the group {group!r} with {who}, whose queue_id or queue_ids differs: what "
    "is read here and is not of a queue that is named here is passed over for good, and the same there"
)
_MEND: Final = (
    "Stop one of the two; give each queue_id a subscription of its own, and all processes of a queue_group the same "
    "queue_ids"
)
_OTHER_KEYS: Final = f"{_SHARED}. {_MEND}"


async def watch_for_rivals(
    connection: Connection, topic: str, group: str, tell: Callable[[str], object], *, keys: str | None = None
) -> None:
    """Look for such members now and then, until some are found or this is cancelled.

    A member that was killed before is forgotten by the first look, so that a group may change over.

    :param tell: given what to do, when some are found; a consumer that passes messages over is to stop then.
    :param keys: see `rivals_of`.
    """
    settings = connection.settings
    session = settings.session_timeout_ms / 1000 if settings.group_protocol == "classic" else _BROKERS_SESSION
    while True:
        await asyncio.sleep(max(settings.topic_metadata_refresh_interval_ms / 1000, session))
        try:
            rivals = await rivals_of(connection, topic, group, keys=keys)
        except BrokerError as error:
            logger.debug("Who else consumes group %r is asked again: %s", group, error)
            continue
        if rivals:
            tell((_OFFSETS if keys is None else _OTHER_KEYS).format(group=group, topic=topic, who=_named(rivals)))
            return


async def refuse_rivals(connection: Connection, topic: str, group: str, *, keys: str) -> None:
    """To be asked before the group is joined. Those that have committed nothing yet are found by `watch_for_rivals`.

    :raises ConfigurationError: present members read the topic for other keys.
    """
    try:
        rivals = await rivals_of(connection, topic, group, keys=keys)
    except BrokerError as error:
        logger.debug("Who else consumes group %r is asked later: %s", group, error)
        return
    if rivals:
        raise ConfigurationError(
            _SHARED.format(group=group, topic=topic, who=_named(rivals)),
            advice=f"{_MEND}. One that was killed is a member until its session is over (session_timeout_ms)",
        )


def _named(members: Iterable[GroupMember]) -> str:
    return ", ".join(sorted({f"{member.client} at {member.host}" for member in members})[:3])


async def rivals_of(connection: Connection, topic: str, group: str, *, keys: str | None = None) -> list[GroupMember]:
    """The present members of the group that have committed with markers.

    :param keys: what stands for the keys of who asks, and of whom it is not at odds with; None if it has no markers.
    :raises BrokerError: the brokers do not tell.
    """
    stored = await GroupOffsetStore(connection).fetch(group, await partitions_of(connection, topic))
    for position in stored.values():
        if isinstance(position, BrokerError):
            raise position
    texts = [position.metadata for position in stored.values() if isinstance(position, StoredOffset)]
    marks = {mark for text in texts if (mark := mark_in(text)) is not None and keys_in(text) != keys}
    if not marks:
        return []
    info = await KafkaGroups(connection).state(group)
    return [member for member in info.members if mark_of(member.id) in marks] if info is not None else []
