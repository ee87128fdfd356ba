"""Finds members of a group that settle the same messages differently: by markers and by offsets, or for other keys.

A consumer with markers stores a mark of its member id beside each position it commits (`commit_text`). A mark whose
member is in the group now belongs to a live consumer; marks of former members match no member id.

*Failure.* What the brokers do not answer is looked up again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from broker import BrokerError, ConfigurationError
from broker.driver import GroupMember, logger
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import positions_in
from broker_kafka.queue.markers.commit_text import key_mark_in, member_mark, member_mark_in

__all__ = ["conflicting_members", "refuse_conflicting_members", "watch_for_conflicting_members"]

_BROKER_SESSION: Final = 60.0
"""Seconds; brokers drop a killed member of a KIP-848 group earlier than this by default."""

_OFFSETS: Final = (
    "Subscription {group!r} of {topic!r} is consumed here with queue=offsets, and with queue=markers by {members}: "
    "leases, delays, attempts and queue_id apply to some of the messages only. Stop one of the two, or give it a "
    "subscription of its own"
)
_OTHER_KEYS: Final = (
    "Group {group!r} reads {topic!r} here and at {members} with different values of queue_id: each side skips the "
    "messages of the other for good"
)
_ADVICE: Final = "Stop one of the two, and give each queue_id a subscription of its own"


async def watch_for_conflicting_members(
    connection: Connection, topic: str, group: str, report: Callable[[str], object], *, key_mark: str | None = None
) -> None:
    """Look for conflicting members at intervals, until some are found or this is cancelled.

    The first look comes after a session timeout: by then a killed member has left, so a group may change over.

    :param report: called once, with what to do.
    :param key_mark: see `conflicting_members`.
    """
    settings = connection.settings
    session = settings.session_timeout_ms / 1000 if settings.group_protocol == "classic" else _BROKER_SESSION
    while True:
        await asyncio.sleep(max(settings.topic_metadata_refresh_interval_ms / 1000, session))
        try:
            members = await conflicting_members(connection, topic, group, key_mark=key_mark)
        except BrokerError as error:
            logger.debug("Conflicting members of group %r are looked up again later: %s", group, error)
            continue
        if members:
            text = _OFFSETS if key_mark is None else f"{_OTHER_KEYS}. {_ADVICE}"
            report(text.format(group=group, topic=topic, members=_names(members)))
            return


async def refuse_conflicting_members(connection: Connection, topic: str, group: str, *, key_mark: str) -> None:
    """Check a group before it is joined; `watch_for_conflicting_members` finds members that commit only later.

    :raises ConfigurationError: live members read the topic for other keys.
    """
    try:
        members = await conflicting_members(connection, topic, group, key_mark=key_mark)
    except BrokerError as error:
        logger.debug("Conflicting members of group %r are looked up later: %s", group, error)
        return
    if members:
        raise ConfigurationError(
            _OTHER_KEYS.format(group=group, topic=topic, members=_names(members)),
            advice=f"{_ADVICE}. A killed consumer counts as a member until its session ends (session_timeout_ms)",
        )


async def conflicting_members(
    connection: Connection, topic: str, group: str, *, key_mark: str | None = None
) -> list[GroupMember]:
    """The live members of the group that have committed with markers.

    :param key_mark: leaves out members whose commit text has the same mark of keys; None leaves out none.
    :raises BrokerError: the positions or members of the group cannot be read.
    """
    stored = positions_in(await GroupOffsetStore(connection).fetch(group, await partitions_of(connection, topic)))
    texts = [position.metadata for position in stored.values()]
    marks = {mark for text in texts if (mark := member_mark_in(text)) is not None and key_mark_in(text) != key_mark}
    if not marks:
        return []
    info = await KafkaGroups(connection).state(group)
    return [member for member in info.members if member_mark(member.id) in marks] if info is not None else []


def _names(members: Iterable[GroupMember]) -> str:
    return ", ".join(sorted({f"{member.client} at {member.host}" for member in members})[:3])
