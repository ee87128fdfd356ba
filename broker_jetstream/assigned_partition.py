"""One partition of a record group: owned by one member at a time, read in order, committed by its ack floor.

The server pins the partition's durable to one client. A newly pinned member resets the durable to its committed
position before it returns records, so the unfinished records of a dead member come first and in order. The answers to
keep-alive pulls prove the pin. Records are returned, and commits sent, only while the last proof is younger than
`owner_timeout`, or after a new check, so a member that was frozen notices its loss first. Each assignment is marked on
the durable, so a loss is noticed also if the partition is free again. All calls run on the event
loop. Callbacks of the connection neither raise nor block. `verify`, `commit` and `seek` exclude each other and may run
during a fetch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from broker import BrokerError, LeaseLost, NotAuthorized, NotFound, Record, SettleError, TopicPartition
from broker.driver import TaskSet, logger
from broker_jetstream.codec import NULL, PIN, MessageView, NativeMessage, key_of, server_header, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.pull_requests import PinnedPulls
from broker_jetstream.streams import Layout
from broker_jetstream.subscriptions import (
    GROUP,
    CommittedPosition,
    belongs_to_another,
    has_position_mark,
    pinned_by,
)

__all__ = ["AssignedPartition"]

VIEW: Final = MessageView()


class AssignedPartition:
    """One partition that this member claims."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        number: int,
        consumer: str,
        wake: Callable[[], None],
        lost: Callable[[AssignedPartition], None],
    ) -> None:
        self.layout = layout
        self.number = number
        self.topic_partition = TopicPartition(layout.topic, number)
        self.description = f"Partition {number} of topic {layout.topic!r}"
        self.paused = False
        self.claimed = False
        self.claimed_at = 0.0
        self.reported = False
        """Whether the assignment was reported to the core."""
        self.position: int | None = None
        """The next offset to return; None until it was read from the server."""
        self.failure: BrokerError | None = None
        self._connection = connection
        self._wake, self._lost = wake, lost
        self._path = f"{layout.stream}.{consumer}"
        self._lock = asyncio.Lock()
        self._buffer: deque[tuple[int, NativeMessage]] = deque()
        self._pulls = PinnedPulls(connection, layout, consumer, self._arrived)
        self._pin = b""
        self._epoch, self._proven_until = -1, 0.0
        self._positions = CommittedPosition(connection, layout, number, consumer, self.description)
        self._busy = self._taking_over = False
        self._clean = self._empty = self._pinned_elsewhere = False
        """Last known state: no record is unacknowledged; no record waits; another member is pinned."""
        self._tasks = TaskSet(
            "broker-jetstream-partition", lambda error: logger.error("%s: %r", self.description, error)
        )

    @property
    def pinned(self) -> bool:
        """Whether the server has pinned us, however long ago."""
        return bool(self._pin)

    @property
    def proven(self) -> bool:
        """Whether the partition is certainly ours now."""
        return bool(self._pin) and time.monotonic() < self._proven_until and self._epoch == self._connection.epoch

    @property
    def ready(self) -> bool:
        """Whether the next record will be ours: we are pinned, or the partition is empty and no member is pinned."""
        return bool(self._pin) or (self._clean and self._empty)

    @property
    def is_pending(self) -> bool:
        """Whether the server is about to pin us."""
        return self.claimed and not self.ready and not self._pinned_elsewhere

    @property
    def buffered(self) -> int:
        """How many records are waiting for `take`."""
        return len(self._buffer)

    # Reading.

    async def claim(self) -> None:
        """Request records; the partition is ours as soon as the server pins us."""
        self.claimed = True
        self.claimed_at = time.monotonic()
        self._epoch = self._connection.epoch
        self._pulls.last_heard = time.monotonic()
        await self._reset_if_free()
        await self.request(1, 0)

    async def _reset_if_free(self) -> None:
        """Reset the durable once no member is pinned: unacked records of the former owner would block the pin."""
        if self._clean or self._pin or self._busy or not self._connection.connected:
            return
        self._busy = True
        try:
            async with self._lock:
                info = await self._positions.info()
                self._positions.check(info, self.position)
                self._pinned_elsewhere = bool(pinned_by(info))
                if self._pinned_elsewhere:
                    return
                if info.get("num_ack_pending") or has_position_mark(info):
                    info = await self._positions.reset(self.position)
                self._clean, self._empty = True, not info.get("num_pending")
        except NotFound as error:
            self.failure = error
            self._drop()
        except LeaseLost:
            self._drop()
        except BrokerError as error:
            logger.debug("%s: waiting for the pin: %s", self.description, error)
        finally:
            self._busy = False

    async def request(self, number: int, max_bytes: int) -> None:
        """Keep up to `number` records requested or buffered."""
        connection = self._connection
        if not self.claimed or not connection.connected or self._busy or self._taking_over:
            return
        if self._epoch != connection.epoch:
            # Pulls and records were lost with the old connection.
            self._epoch = connection.epoch
            self._pulls.drop()
            self._clean = False
            if self._pin:
                self._begin_takeover(self._pin)
                return
        credit = self._pulls.credit
        wanted = number - len(self._buffer) - credit if self._pin else 1 - credit
        if wanted > 0 and (not self._pin or credit * 2 <= number):
            await self._pulls.request(wanted, max_bytes, self._pin)

    def _arrived(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        if not data and block[8:9] == b" " and not reply:
            self._status(subject, block)
            return
        if not self.claimed:
            return
        if (pull := self._pulls.open.get(subject)) is not None:
            pull[0] -= 1
        self._pulls.last_heard = time.monotonic()
        pin = server_header(block, PIN) or b""
        if pin != self._pin:
            self._begin_takeover(pin)
            return
        fields = reply.split(b".")
        at = 4 if len(fields) == 9 else 6
        offset = self._positions.delivered(fields, at)
        if offset is None:
            # The durable was reset or a record was lost: restart at the committed position.
            self._begin_takeover(pin)
            return
        if self.position is None or offset >= self.position:
            self._buffer.append((offset, NativeMessage(subject, reply, data, block)))
            if len(self._buffer) == 1:
                self._wake()

    def _status(self, subject: bytes, block: bytes) -> None:
        if not self._pulls.owns(subject):
            return
        code, text = status_of(block)
        self._pulls.last_heard = now = time.monotonic()
        if code == 423:
            self._pulls.drop()
            self._tasks.spawn(self._check_owner())
        elif (requested := self._pulls.keep_alive_sent(subject)) is not None:
            # An answer proves the pin only if it came before the pin expired; `verify` covers the rest.
            if code in {404, 408, 409} and now < self._proven_until:
                self._proven_until = max(self._proven_until, requested + self._connection.settings.owner_timeout)
        elif code == 409 and "deleted" in text.lower():
            self.failure = LeaseLost(f"{self.description}: its durable consumer was deleted")
            self._drop()
        elif code != 100:
            self._pulls.end(subject)
            self._wake()

    def _begin_takeover(self, pin: bytes) -> None:
        """Take over, in the background, before any record is returned: we were pinned, or a record was lost."""
        if not self._taking_over:
            self._taking_over = True
            self._tasks.spawn(self._take_over(pin))

    async def _take_over(self, pin: bytes) -> None:
        begin, epoch = time.monotonic(), self._connection.epoch
        try:
            async with self._lock:
                await self._discard_fetched()
                owner = pinned_by(await self._positions.reset(self.position))
                if owner == pin:
                    self._pin, self._epoch = pin, epoch
                    self._proven_until = begin + self._connection.settings.owner_timeout
                elif owner:
                    self._drop()
        except NotFound as error:
            self.failure = error
            self._drop()
        except LeaseLost:
            # The fetched records are stale; the partition is claimed again, from the committed position.
            self._drop()
            await self._unpin()
        except BrokerError as error:
            # The next record starts another takeover; without one, the durable is reset once the pin has expired.
            self._clean = False
            logger.debug("%s: taking over: %s", self.description, error)
        finally:
            self._taking_over = False
            self._wake()

    async def _check_owner(self) -> None:
        """The server refused a pull for its pin: another member is pinned, or the pin expired."""
        try:
            owner = await self._owner()
            if not owner:
                self._pin, self._clean = b"", False
            elif owner != self._pin and not self._taking_over:
                self._drop()
        except LeaseLost:
            self._drop()
        except BrokerError as error:
            logger.debug("%s: reading its owner: %s", self.description, error)
        finally:
            self._wake()

    async def _owner(self) -> bytes:
        """The current pin; empty if no member is pinned.

        :raises LeaseLost: no member is pinned, but another one has owned the partition.
        """
        found = await self._positions.info()
        if not (owner := pinned_by(found)):
            self._positions.check(found, self.position)
        return owner

    async def _discard_fetched(self) -> None:
        """Discard fetched records and pulls; the next record is the first after a reset."""
        self._buffer.clear()
        self._positions.forget()
        self._pin = b""
        await self._pulls.cancel()

    def _drop(self) -> None:
        """Another member owns the partition: report the loss."""
        was_claimed = self.claimed
        self.claimed = False
        self._pin = b""
        self._proven_until = 0.0
        self._buffer.clear()
        if was_claimed:
            # An open pull could be pinned, and receive records that are never read.
            self._tasks.spawn(self._pulls.cancel())
            self._lost(self)

    async def keep_alive(self) -> None:
        """Keep the pin alive; called four times within `owner_timeout`."""
        if not self.claimed or not self._connection.connected or self._busy or self._taking_over:
            return
        if self._pulls.silent and not self._buffer:
            self._pulls.drop()
            self._pulls.last_heard = time.monotonic()
            self._wake()
        if self._pin:
            await self._pulls.keep_alive(self._pin)
        else:
            await self._reset_if_free()

    async def verify(self) -> bool:
        """Whether the partition is ours; asks the server if the last proof is too old. Reports a loss."""
        if self.proven:
            return True
        if not self._pin or not self.claimed:
            return False
        async with self._lock:
            if self.proven:
                return True
            if not self._pin or self._taking_over or not self._connection.connected:
                return False
            begin = time.monotonic()
            await self._pulls.keep_alive(self._pin)
            try:
                owner = await self._owner()
            except LeaseLost:
                self._drop()
                return False
            if self._epoch != self._connection.epoch or not self._pin or self._taking_over:
                return False
            if owner == self._pin:
                self._proven_until = begin + self._connection.settings.owner_timeout
                return True
            if owner:
                self._drop()
            else:
                # The pin expired without a new owner: the next record pins a member.
                await self._discard_fetched()
                self._clean = False
                self._wake()
            return False

    async def check_loss(self) -> None:
        """Report a loss if another member has owned the partition since its assignment; asks the server."""
        if self._pin:
            await self.verify()
        else:
            self._clean = False
            await self._reset_if_free()

    async def mark_owned(self) -> bool:
        """Mark the partition as ours, before its assignment is reported; returns False if that failed."""
        try:
            await self._positions.mark_owned()
        except NotAuthorized as error:
            # Without the right a loss is noticed only while the new owner is there, or by its commits.
            logger.debug("%s: marking its owner: %s", self.description, error)
        except BrokerError as error:
            logger.debug("%s: marking its owner: %s", self.description, error)
            return False
        return True

    def take(self, most: int, max_bytes: int, into: list[Record[Any]]) -> int:
        """Append buffered records to `into`, as far as they fit; returns their bytes."""
        topic, number, buffer, view = self.layout.topic, self.number, self._buffer, VIEW
        added = 0
        offset = -1
        while buffer and most > 0:
            raw = buffer[0][1]
            size = len(raw.data) + len(raw.block)
            if added + size > max_bytes and into:
                break
            offset, _ = buffer.popleft()
            data = None if not raw.data and NULL in raw.block else raw.data
            into.append(Record(topic, number, offset, key_of(raw.block), data, raw, view, size))
            added += size
            most -= 1
        if offset >= 0:
            self.position = offset + 1
        return added

    # Positions.

    async def commit(self, position: int) -> None:
        """Store the next position to read.

        :raises LeaseLost: another member owns the partition.
        :raises SettleError: the server did not confirm.
        """
        connection = self._connection
        deadline = time.monotonic() + connection.settings.settle_timeout
        confirmed = True
        while self.claimed and (left := deadline - time.monotonic()) > 0:
            await connection.wait_connected(left)
            if not self.proven:
                found = await self._positions.info()
                if self._taking_over:
                    # The pin may be ours: its record arrived before this answer.
                    await asyncio.wait(self._tasks, timeout=left)
                    continue
                if pinned_by(found) not in {b"", self._pin}:
                    self._drop()
                    break
                try:
                    self._positions.check(found, self.position)
                except LeaseLost:
                    self._drop()
                    raise
            async with self._lock:
                confirmed = await self._positions.commit(position, self.position or position, by_ack=confirmed)
            if confirmed:
                return
            # No answer: the connection broke, or the durable was reset and does not know the acked record.
            self._proven_until = 0.0
        if not self.claimed:
            raise belongs_to_another(self.description)
        raise SettleError(f"{self.description}: the server did not confirm the commit of {position}", retriable=True)

    async def check_bounds(self, position: int) -> None:
        """:raises OffsetOutOfRange: the log does not hold `position`."""
        await self._positions.check_bounds(position)

    async def seek(self, position: int | None) -> None:
        """Continue reading at `position`, which must be in the log, or at the committed position.

        After another error than LeaseLost reading continues where it was.

        :raises LeaseLost: another member owns the partition.
        """
        async with self._lock:
            pin, self._busy = self._pin, True
            try:
                await self._discard_fetched()
                self.position = await self._positions.seek(position, pin)
            except LeaseLost:
                pin = b""
                self._drop()
                raise
            except BaseException:
                # The discarded records are unacked on the server: only a reset delivers them again.
                if pin:
                    self._begin_takeover(pin)
                raise
            finally:
                self._pin, self._busy = pin, False
        self._wake()

    # Releasing.

    async def release(self, *, contested: bool = False) -> None:
        """Unpin at once, so another member need not wait until the pin expires.

        :param contested: another member claims the partition too; if we are not pinned, that member may be.
        """
        self.claimed = False
        if self._tasks:
            await asyncio.wait(self._tasks)
        pinned = self.proven
        requested = (
            not contested and not self._pin and self._clean and self._pulls.credit > 0 and self._connection.connected
        )
        await self._discard_fetched()
        self._proven_until = 0.0
        if pinned or requested:
            await self._unpin(check_owner=requested)

    async def _unpin(self, *, check_owner: bool = False) -> None:
        try:
            # The open pull may have been pinned meanwhile.
            if check_owner and not await self._owner():
                return
            await self._connection.api(f"CONSUMER.UNPIN.{self._path}", {"group": GROUP}, what=self.description)
        except BrokerError as error:
            logger.debug("%s: unpinning: %s", self.description, error)
