"""Where a record group stands in one partition: its committed position, and how it is stored on the server.

The position is the ack floor of the partition's durable. Where the floor cannot tell it (the group starts or was
sought elsewhere, or the server does not know any more what was delivered), it is written beside it, in the durable's
metadata, and counts before the floor. Nothing here is serialised: the partition calls under its lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from broker import ConnectionFailed, LeaseLost, NotFound, OffsetOutOfRange
from broker.driver import Start
from broker_jetstream import consumers
from broker_jetstream.connection import Connection
from broker_jetstream.consumers import POSITION_KEY
from broker_jetstream.fastpath import Outgoing
from broker_jetstream.headers import status_of
from broker_jetstream.layout import Layout
from broker_jetstream.log_reader import JetStreamLogReader
from broker_jetstream.names import group_consumer

__all__ = ["Positions", "committed_of", "ensure_group", "is_marked"]

COMMIT_SECONDS: Final = 1.0
"""How long one commit waits for the server; it answers only what it delivered since the last reset."""


def committed_of(info: dict[str, Any]) -> int | None:
    """The committed position that a durable's state tells; None if there is none."""
    position = _metadata(info).get(POSITION_KEY, "")
    if position.isdecimal():
        return int(position)
    acked: dict[str, Any] = info.get("ack_floor") or {}
    floor = int(acked.get("stream_seq") or 0)
    return floor + 1 if floor else None


def is_marked(info: dict[str, Any]) -> bool:
    """Whether the committed position stands beside the floor."""
    return POSITION_KEY in _metadata(info)


async def ensure_group(
    connection: Connection, log: JetStreamLogReader, layout: Layout, group: str, start: Start, *, ephemeral: bool
) -> None:
    """Make the durables of a group that are missing; those begin at `start`."""
    positions: Mapping[int, int] | None = None
    for number in range(layout.partitions):
        name, what = group_consumer(group, number), f"Group {group!r} on topic {layout.topic!r}"
        try:
            await consumers.info(connection, layout.stream, name, what)
        except NotFound:
            if positions is None:
                positions = await _start_positions(log, layout.topic, start)
            config = consumers.partition_config(connection, layout, number, positions.get(number, 1))
            if ephemeral:
                config["inactive_threshold"] = consumers.EPHEMERAL_SECONDS * consumers.NANOSECONDS
            await consumers.create(connection, layout, name, config, what=what)


async def _start_positions(log: JetStreamLogReader, topic: str, start: Start) -> Mapping[int, int]:
    if isinstance(start, datetime):
        return await log.position_at(topic, start)
    if start == "latest":
        return {number: bounds.next for number, bounds in (await log.bounds(topic)).items()}
    return {}


class Positions:
    """The committed position of one durable, and what was delivered since its last reset."""

    def __init__(self, connection: Connection, layout: Layout, number: int, consumer: str, what: str) -> None:
        self.sequence = 0
        """How many records came since the last reset; the server numbers them from 1."""
        self._connection = connection
        self._layout = layout
        self._number = number
        self._consumer = consumer
        self._what = what
        self._path = f"{layout.stream}.{consumer}"
        self._offsets: list[int] = []
        self._base = 0
        self._committed: int | None = None
        self._marked = False
        self._reply: tuple[bytes, bytes] = (b"", b"")

    def delivered(self, reply: list[bytes], at: int) -> int | None:
        """Note a record by its ack subject's tokens; its offset, or None if it is not the next one.

        :param at: where the token with the number of deliveries is.
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
        """A reset follows: what was delivered counts no more."""
        self._offsets.clear()
        self._base = self.sequence = 0

    async def info(self) -> dict[str, Any]:
        """The durable's state."""
        return await consumers.info(self._connection, self._layout.stream, self._consumer, self._what)

    def check(self, found: dict[str, Any], position: int | None) -> None:
        """Make sure that nobody else had the partition since our last look.

        :param position: the next offset that we would hand over.
        :raises LeaseLost: others have committed beyond it. Going on from there would undo their commits.
        """
        committed = committed_of(found)
        if position is None or committed is None or committed == self._committed:
            return
        if committed > position:
            raise LeaseLost(
                f"{self._what} was another member's meanwhile", advice="Its records are read from what was committed"
            )

    async def reset(self, position: int | None) -> dict[str, Any]:
        """Put the durable back to its committed position, or to `position` where that lies before; its state.

        :raises LeaseLost: the group went on without us, see `check`.
        """
        found = await self.info()
        self.check(found, position)
        self._marked, self._committed = is_marked(found), committed_of(found)
        start: dict[str, Any] = {"seq": self._committed} if self._marked else {}
        if position is not None and (self._committed is None or position < self._committed):
            start = {"seq": position}
        return await self._connection.api(f"CONSUMER.RESET.{self._path}", start, what=self._what)

    async def move(self, position: int | None) -> int:
        """Reset the durable to a position, or to the committed one, without committing it; where it stands then.

        :raises OffsetOutOfRange: the log does not hold that position.
        """
        if position is not None:
            await self._check_bounds(position)
        found = await self.info()
        self._marked, self._committed = is_marked(found), committed_of(found)
        committed = self._committed or 1
        target = committed if position is None else max(position, 1)
        if target != committed and not self._marked:
            # The reset moves the floor; what was committed must outlive a crash before the next commit.
            await self._mark(committed)
        await self._connection.api(f"CONSUMER.RESET.{self._path}", {"seq": target}, what=self._what)
        return target

    async def store(self, position: int, handed_over: int, *, by_ack: bool) -> bool:
        """Commit a position; False if the server does not answer, or refuses.

        :param handed_over: the next offset to be handed over.
        :param by_ack: by the floor if possible; else it is written beside it.
        """
        if self._committed == position and not self._marked:
            return True
        index = bisect_left(self._offsets, position)
        # After a reset the server delivers again; until it has come as far, the floor cannot say it.
        behind = index == 0 or (index == len(self._offsets) and self._offsets[-1] + 1 < min(position, handed_over))
        if not by_ack or behind or (self._committed is not None and position < self._committed):
            await self._mark(position)
            self._committed = position
            return True
        head, tail = self._reply
        reply = b"%b.1.%d.%d.%b" % (head, self._offsets[index - 1], self._base + index, tail)
        replies = self._connection.inbox.expect(1, frozenset((reply,)))
        try:
            await self._connection.send((Outgoing(reply, replies.subject(0), b"", b"+ACK"),))
            if not await replies.wait(COMMIT_SECONDS) or (answer := replies.answers[0]) is None:
                return False
            if status_of(answer[0])[0]:
                # Nobody is there who could take it, or this user may not send it.
                return False
        except ConnectionFailed:
            return False
        finally:
            replies.close()
        # The last one stays, so that its position can be committed once more.
        del self._offsets[: index - 1]
        self._base += index - 1
        self._committed = position
        if self._marked:
            await self._mark(None)
        return True

    async def _mark(self, position: int | None) -> None:
        """Write the committed position down beside the durable, or remove the mark."""
        found = await self.info()
        metadata = {name: value for name, value in _metadata(found).items() if name != POSITION_KEY}
        if position is not None:
            metadata[POSITION_KEY] = str(position)
        config: dict[str, Any] = {**found["config"], "metadata": metadata}
        await consumers.create(self._connection, self._layout, self._consumer, config, what=self._what)
        self._marked = position is not None

    async def _check_bounds(self, position: int) -> None:
        info = await self._connection.api(f"STREAM.INFO.{self._layout.stream}", what=self._what)
        first, last = int(info["state"].get("first_seq") or 0), int(info["state"].get("last_seq") or 0)
        if position > last + 1:
            raise OffsetOutOfRange(f"{self._what} ends at {last + 1}, and {position} lies beyond")
        if position < first and first > 1:
            raise OffsetOutOfRange(f"{self._what} begins at {first}: retention removed what followed {position}")


def _metadata(info: dict[str, Any]) -> dict[str, str]:
    return info["config"].get("metadata") or {}
