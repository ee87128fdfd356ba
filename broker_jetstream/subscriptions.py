"""Durable consumers: their configuration for subscriptions and groups, and the committed position of a partition.

All calls may be repeated. Creating a consumer that exists leaves it unchanged, except that a lease too short or a
delivery limit too low is raised.

Before a member of a group is assigned a partition it writes its mark into the metadata of the partition's durable. So a
member that was frozen or cut off sees whether another has owned the partition since, also if it is free again.

A group's position is the ack floor of the partition's durable. Where the floor cannot express it (the group starts or
was sought elsewhere, or the server has forgotten the deliveries), it is stored in the durable's metadata, which takes
precedence. `CommittedPosition` does no locking: the partition calls it under its own lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from datetime import datetime
from secrets import token_hex
from typing import Any, Final

from broker import ConnectionFailed, LeaseLost, NotFound, OffsetOutOfRange, SubscriptionNotFound, Unsupported
from broker.driver import NativeName, Start, reads_answer
from broker_jetstream.codec import status_of
from broker_jetstream.connection import Connection
from broker_jetstream.log_reader import JetStreamLogReader
from broker_jetstream.names import group_consumer
from broker_jetstream.streams import Layout
from broker_jetstream.times import NANOSECONDS, server_time

__all__ = [
    "GROUP",
    "CommittedPosition",
    "belongs_to_another",
    "committed_position",
    "create",
    "delete",
    "ensure_group",
    "ensure_message_consumer",
    "has_position_mark",
    "info",
    "last_delivery",
    "pinned_by",
    "pull_request",
]


_EPHEMERAL_SECONDS: Final = 300
"""An ephemeral consumer of a dead process is deleted after this time."""
GROUP: Final = "owner"
"""The priority group of every pull of a record group."""
_POSITION_KEY: Final = "anybroker-position"
"""Metadata of a durable whose committed position is not its ack floor."""
_OWNER_KEY: Final = "anybroker-owner"
"""Metadata of a durable that was assigned to a member: what that assignment wrote."""
_FOREVER: Final = 3650 * 86_400 * NANOSECONDS
_MAX_WAITING: Final = 8192


def pull_request(connection: Connection, number: int, max_bytes: int, *, no_wait: bool = False) -> dict[str, Any]:
    """The body of a pull request.

    :param max_bytes: bytes including headers and subjects; the server ends the pull at a message that exceeds the rest.
    :param no_wait: the server answers at once, with a status if it has no message.
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


@reads_answer("The state of a consumer")
def pinned_by(info: Mapping[str, Any]) -> bytes:
    """The pin of a group's durable; empty if no member is pinned."""
    groups: list[dict[str, Any]] = info.get("priority_groups") or []
    return next((group.get("pinned_client_id") or "" for group in groups if group.get("group") == GROUP), "").encode()


async def create(
    connection: Connection, layout: Layout, name: str, config: dict[str, Any], *, what: str
) -> dict[str, Any]:
    """Create a durable consumer, or update it to this configuration."""
    body = {"stream_name": layout.stream, "config": {"name": name, "durable_name": name, **config}}
    subject = f"CONSUMER.CREATE.{layout.stream}.{name}"
    single = config.get("filter_subject")
    if single and single != ">":
        # The server checks permissions for the filter on this longer subject.
        subject += f".{single}"
    return await connection.api(subject, body, what=what)


async def info(connection: Connection, stream: str, name: str, what: str) -> dict[str, Any]:
    """CONSUMER.INFO.

    :raises SubscriptionNotFound, TopicNotFound: the consumer or its stream does not exist.
    """
    return await connection.api(f"CONSUMER.INFO.{stream}.{name}", what=what)


@reads_answer("The state of a consumer")
def last_delivery(info: Mapping[str, Any]) -> tuple[int, int]:
    """Consumer and stream sequence of a consumer's last delivery."""
    delivered: Mapping[str, Any] = info.get("delivered") or {}
    return int(delivered.get("consumer_seq") or 0), int(delivered.get("stream_seq") or 0)


async def delete(connection: Connection, stream: str, name: str, what: str) -> None:
    """Delete a consumer if it exists."""
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
    """The consumer of a subscription, created if missing; raises a lease or delivery limit that is too low.

    :raises SubscriptionNotFound: it is missing, and `create_missing` is False.
    :raises Unsupported: a foreign consumer with settings that this backend cannot use.
    """
    what = f"Subscription {subscription!r} of topic {layout.topic!r}"
    wanted = _message_config(connection, layout, start, ephemeral=ephemeral)
    try:
        found = await info(connection, layout.stream, name, what)
    except SubscriptionNotFound:
        if not create_missing:
            raise
        return await create(connection, layout, name, wanted, what=what)
    with reads_answer(what):
        config: dict[str, Any] = found["config"]
        if config.get("deliver_subject"):
            raise Unsupported(f"{what} is a push consumer", advice="Name a pull consumer")
        if config.get("ack_policy") != "explicit":
            raise Unsupported(
                f"{what} has the ack policy {config.get('ack_policy')!r}", advice="Name a consumer with explicit acks"
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
    updated = {**config, "max_deliver": -1, "ack_wait": max(config.get("ack_wait", 0), wanted["ack_wait"])}
    return await create(connection, layout, name, updated, what=what)


def _message_config(connection: Connection, layout: Layout, start: Start, *, ephemeral: bool) -> dict[str, Any]:
    """The configuration of a consumer for the Message family."""
    settings = connection.settings
    config: dict[str, Any] = {
        "ack_policy": "explicit",
        "ack_wait": round(settings.lease_seconds * NANOSECONDS),
        "max_deliver": -1,
        "max_ack_pending": settings.max_ack_pending,
        "max_waiting": _MAX_WAITING,
        "replay_policy": "instant",
        **_start_config(start),
    }
    if layout.filter is not None:
        config["filter_subject"] = layout.filter
    if ephemeral:
        config["inactive_threshold"] = _EPHEMERAL_SECONDS * NANOSECONDS
    return config


def _start_config(start: Start) -> dict[str, Any]:
    """The start of a new consumer, as the server spells it."""
    if isinstance(start, datetime):
        return {"deliver_policy": "by_start_time", "opt_start_time": server_time(start)}
    return {"deliver_policy": "all" if start == "earliest" else "new"}


COMMIT_SECONDS: Final = 1.0
"""How long one commit waits; the server answers only acks of records delivered since the last reset."""


@reads_answer("The state of a consumer")
def committed_position(info: dict[str, Any]) -> int | None:
    """The committed position in a durable's state; None if there is none."""
    position = _metadata(info).get(_POSITION_KEY, "")
    if position.isdecimal():
        return int(position)
    acked: dict[str, Any] = info.get("ack_floor") or {}
    floor = int(acked.get("stream_seq") or 0)
    return floor + 1 if floor else None


def has_position_mark(info: dict[str, Any]) -> bool:
    """Whether the committed position is stored in the metadata."""
    return _POSITION_KEY in _metadata(info)


async def ensure_group(
    connection: Connection, log: JetStreamLogReader, layout: Layout, group: str, start: Start, *, ephemeral: bool
) -> None:
    """Create the missing durables of a group, starting at `start`."""
    positions: Mapping[int, int] | None = None
    for number in range(layout.partitions):
        name, what = group_consumer(group, number), f"Group {group!r} on topic {layout.topic!r}"
        try:
            await info(connection, layout.stream, name, what)
        except NotFound:
            if positions is None:
                positions = await _start_positions(log, layout.topic, start)
            config = _partition_config(connection, layout, number, positions.get(number, 1))
            if ephemeral:
                config["inactive_threshold"] = _EPHEMERAL_SECONDS * NANOSECONDS
            await create(connection, layout, name, config, what=what)


async def _start_positions(log: JetStreamLogReader, topic: str, start: Start) -> Mapping[int, int]:
    if isinstance(start, datetime):
        return await log.position_at(topic, start)
    if start == "latest":
        return {number: bounds.next for number, bounds in (await log.bounds(topic)).items()}
    return {}


def _partition_config(connection: Connection, layout: Layout, partition: int, position: int) -> dict[str, Any]:
    """The durable of one partition of a group."""
    # "all", because a durable that starts later refuses to be reset before its start.
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
        "metadata": {_POSITION_KEY: str(position)} if position > 1 else {},
    }


class CommittedPosition:
    """The committed position of one durable, and the deliveries since its last reset."""

    def __init__(self, connection: Connection, layout: Layout, number: int, consumer: str, what: str) -> None:
        self.sequence = 0
        """Records delivered since the last reset; the server numbers them from 1."""
        self._connection = connection
        self._layout = layout
        self._number = number
        self._consumer = consumer
        self._what = what
        self._path = f"{layout.stream}.{consumer}"
        self._offsets: list[int] = []
        self._base = 0
        self._committed: int | None = None
        self._has_mark = False
        self._owner = ""
        self._reply: tuple[bytes, bytes] = (b"", b"")

    def delivered(self, reply: list[bytes], at: int) -> int | None:
        """Note a record by the tokens of its ack subject; returns its offset, or None if a record is missing before it.

        :param at: index of the token with the number of deliveries.
        """
        offset, sequence = int(reply[at + 1]), int(reply[at + 2])
        if sequence != self.sequence + 1:
            return None
        if sequence == 1:
            self._reply = (b".".join(reply[:at]), b".".join((b"0", b"0", *reply[at + 5 :])))
        self.sequence = sequence
        self._offsets.append(offset)
        return offset

    def forget(self) -> None:
        """Forget the deliveries, before a reset."""
        self._offsets.clear()
        self._base = self.sequence = 0

    async def info(self) -> dict[str, Any]:
        """The durable's state."""
        return await info(self._connection, self._layout.stream, self._consumer, self._what)

    def check(self, found: dict[str, Any], position: int | None) -> None:
        """Check that no other member had the partition meanwhile.

        :param position: the next offset that we would return.
        :raises LeaseLost: the partition was assigned to another member, or another member has committed beyond the
            position; continuing would undo its work.
        """
        committed = committed_position(found)
        owned = bool(self._owner) and _metadata(found).get(_OWNER_KEY) != self._owner
        if not owned and position is not None and committed is not None and committed != self._committed:
            owned = committed > position
        if owned:
            raise LeaseLost(
                f"{self._what} belonged to another member meanwhile",
                advice="Its records are read from the committed position",
            )

    async def mark_owned(self) -> None:
        """Write that the partition is assigned to us: from now on `check` sees whether another member was its owner."""
        mark = token_hex(8)
        await self._write_metadata(_OWNER_KEY, mark)
        self._owner = mark

    async def reset(self, position: int | None) -> dict[str, Any]:
        """Reset the durable to its committed position, or to `position` if that is lower; returns its state.

        :raises LeaseLost: see `check`.
        """
        found = await self.info()
        self.check(found, position)
        self._has_mark, self._committed = has_position_mark(found), committed_position(found)
        start: dict[str, Any] = {"seq": self._committed} if self._has_mark else {}
        if position is not None and (self._committed is None or position < self._committed):
            start = {"seq": position}
        return await self._connection.api(f"CONSUMER.RESET.{self._path}", start, what=self._what)

    async def seek(self, position: int | None, pin: bytes) -> int:
        """Reset the durable to a position, or to the committed one, without committing; returns the new position.

        :param pin: our last pin; empty if we were not pinned.
        :raises LeaseLost: another member is pinned, and would read on at the position; or see `check`.
        """
        found = await self.info()
        if pin and pinned_by(found) not in {b"", pin}:
            raise belongs_to_another(self._what)
        self.check(found, None)
        self._has_mark, self._committed = has_position_mark(found), committed_position(found)
        committed = self._committed or 1
        target = committed if position is None else max(position, 1)
        if target != committed and not self._has_mark:
            # The reset moves the floor, and the committed position must survive a crash before the next commit.
            await self._mark(committed)
        await self._connection.api(f"CONSUMER.RESET.{self._path}", {"seq": target}, what=self._what)
        return target

    async def commit(self, position: int, next_offset: int, *, by_ack: bool) -> bool:
        """Commit a position; returns False if the server does not answer, or refuses.

        :param next_offset: the next offset that the partition returns.
        :param by_ack: move the ack floor if possible, else write the metadata.
        """
        if self._committed == position and not self._has_mark:
            return True
        index = bisect_left(self._offsets, position)
        # After a reset the floor cannot express the position until the server has redelivered that far.
        behind = index == 0 or (index == len(self._offsets) and self._offsets[-1] + 1 < min(position, next_offset))
        if not by_ack or behind or (self._committed is not None and position < self._committed):
            await self._mark(position)
            self._committed = position
            return True
        head, tail = self._reply
        reply = b"%b.1.%d.%d.%b" % (head, self._offsets[index - 1], self._base + index, tail)
        try:
            answer = await self._connection.request_once(reply, b"", b"+ACK", COMMIT_SECONDS)
        except ConnectionFailed:
            return False
        if answer is None or status_of(answer[0])[0]:
            # The status says that there are no responders, or no permission.
            return False
        # Keep the last one, so its position can be committed again.
        del self._offsets[: index - 1]
        self._base += index - 1
        self._committed = position
        if self._has_mark:
            await self._mark(None)
        return True

    async def _mark(self, position: int | None) -> None:
        """Write the committed position into the durable's metadata, or remove it."""
        await self._write_metadata(_POSITION_KEY, None if position is None else str(position))
        self._has_mark = position is not None

    async def _write_metadata(self, key: str, value: str | None) -> None:
        found = await self.info()
        metadata = {name: each for name, each in _metadata(found).items() if name != key}
        if value is not None:
            metadata[key] = value
        config: dict[str, Any] = {**found["config"], "metadata": metadata}
        await create(self._connection, self._layout, self._consumer, config, what=self._what)

    async def check_bounds(self, position: int) -> None:
        """:raises OffsetOutOfRange: the log does not hold that position."""
        info = await self._connection.api(f"STREAM.INFO.{self._layout.stream}", what=self._what)
        with reads_answer(self._what):
            first, last = int(info["state"].get("first_seq") or 0), int(info["state"].get("last_seq") or 0)
        if position > last + 1:
            raise OffsetOutOfRange(f"{self._what} ends at {last + 1}; position {position} is beyond the end")
        if position < first and first > 1 and not self._layout.compacted:
            raise OffsetOutOfRange(
                f"{self._what} begins at {first}; retention removed the records from position {position} on"
            )


def belongs_to_another(what: str) -> LeaseLost:
    """The error of a call for a partition to which another member is pinned."""
    return LeaseLost(f"{what} belongs to another member now", advice="The new owner reads uncommitted records again")


@reads_answer("The state of a consumer")
def _metadata(info: dict[str, Any]) -> dict[str, str]:
    return {**(info["config"].get("metadata") or {})}
