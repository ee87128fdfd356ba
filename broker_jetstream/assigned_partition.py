"""One partition of a record group: owned by one member at a time, read in order, committed by its floor.

The durable of the partition is pinned by the server to one client. A member that is pinned resets the durable to
its committed position before it hands anything over, so that what a dead member had in its hands comes first and in
order. A pin is proven by the server's answers to keep-alive pulls; records are handed over, and commits sent, only
while the last proof is younger than `owner_timeout`, or after asking again: a member that was frozen meanwhile finds
out first. All runs on the event loop; callbacks of the connection neither raise nor block; `verify`, `commit` and
`seek` are serialised by a lock and may run during a fetch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from broker import BrokerError, LeaseLost, NotFound, Record, SettleError, TopicPartition
from broker_jetstream.codec import NULL, PIN, MessageView, NativeMessage, key_of, server_header, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.pull_requests import Pulls
from broker_jetstream.streams import Layout
from broker_jetstream.subscriptions import GROUP, Positions, is_marked, pinned_by

__all__ = ["Partition"]

logger = logging.getLogger("broker")
VIEW: Final = MessageView()


class Partition:
    """One partition that this member claims."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        number: int,
        consumer: str,
        wake: Callable[[], None],
        lost: Callable[[Partition], None],
    ) -> None:
        self.layout = layout
        self.number = number
        self.place = TopicPartition(layout.topic, number)
        self.what = f"Partition {number} of topic {layout.topic!r}"
        self.paused = False
        self.claimed = False
        self.claimed_at = 0.0
        self.told = False
        """Whether the core knows that we have it."""
        self.position: int | None = None
        """The next offset to hand over; None until it was read from the server."""
        self.failure: BrokerError | None = None
        self._connection = connection
        self._wake, self._lost = wake, lost
        self._path = f"{layout.stream}.{consumer}"
        self._lock = asyncio.Lock()
        self._buffer: deque[tuple[int, NativeMessage]] = deque()
        self._pulls = Pulls(connection, layout, consumer, self._arrived)
        self._pin = b""
        self._epoch, self._proven_until = -1, 0.0
        self._positions = Positions(connection, layout, number, consumer, self.what)
        self._busy = self._taking = False
        self._quiet = self._empty = self._held = False
        """As last seen: nothing is unacknowledged, so that the next record pins it; no record waits; it is pinned."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pinned(self) -> bool:
        """Whether the server said so, however long ago."""
        return bool(self._pin)

    @property
    def proven(self) -> bool:
        """Whether it is certainly ours at this moment."""
        return bool(self._pin) and time.monotonic() < self._proven_until and self._epoch == self._connection.epoch

    @property
    def settled(self) -> bool:
        """Whether nobody stands between us and its records: it is pinned to us, or to nobody for want of a record."""
        return bool(self._pin) or (self._quiet and self._empty)

    @property
    def is_coming(self) -> bool:
        """Whether it will be pinned to us at any moment."""
        return self.claimed and not self.settled and not self._held

    @property
    def buffered(self) -> int:
        """How many records wait to be handed over."""
        return len(self._buffer)

    # Reading.

    async def claim(self) -> None:
        """Begin to ask for it; it is ours as soon as the server pins it to us."""
        self.claimed = True
        self.claimed_at = time.monotonic()
        self._epoch = self._connection.epoch
        self._pulls.heard = time.monotonic()
        await self._stir()
        await self.request(1, 0)

    async def _stir(self) -> None:
        """What the former owner had and did not commit pins nobody: put the durable back as soon as nobody holds it."""
        if self._quiet or self._pin or self._busy or not self._connection.connected:
            return
        self._busy = True
        try:
            async with self._lock:
                info = await self._positions.info()
                self._held = bool(pinned_by(info))
                if self._held:
                    return
                if info.get("num_ack_pending") or is_marked(info):
                    info = await self._positions.reset(self.position)
                self._quiet, self._empty = True, not info.get("num_pending")
        except NotFound as error:
            self.failure = error
            self._drop()
        except LeaseLost:
            self._drop()
        except BrokerError as error:
            logger.debug("%s: waiting for it: %s", self.what, error)
        finally:
            self._busy = False

    async def request(self, number: int, max_bytes: int) -> None:
        """Have so many records on their way, at most."""
        connection = self._connection
        if not self.claimed or not connection.connected or self._busy or self._taking:
            return
        if self._epoch != connection.epoch:
            # Pulls and records of the broken connection are gone.
            self._epoch = connection.epoch
            self._pulls.credit = 0
            self._quiet = False
            if self._pin:
                self._pinned(self._pin)
                return
        credit = max(self._pulls.credit, 0)  # records of a pull that was given up count for nothing
        wanted = number - len(self._buffer) - credit if self._pin else 1 - credit
        if wanted > 0 and (not self._pin or credit * 2 <= number):
            await self._pulls.ask(wanted, max_bytes, self._pin)

    def _arrived(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        if not data and block[8:9] == b" " and not reply:
            self._status(subject, block)
            return
        if not self.claimed:
            return
        self._pulls.credit -= 1
        self._pulls.heard = time.monotonic()
        pin = server_header(block, PIN) or b""
        if pin != self._pin:
            self._pinned(pin)
            return
        fields = reply.split(b".")
        at = 4 if len(fields) == 9 else 6
        offset = self._positions.delivered(fields, at)
        if offset is None:
            # Somebody reset the durable, or something got lost on the way: begin again at the committed position.
            self._pinned(pin)
            return
        if self.position is None or offset >= self.position:
            self._buffer.append((offset, NativeMessage(subject, reply, data, block)))
            if len(self._buffer) == 1:
                self._wake()

    def _status(self, subject: bytes, block: bytes) -> None:
        if not self._pulls.is_mine(subject):
            return
        code, text = status_of(block)
        self._pulls.heard = now = time.monotonic()
        if code == 423:
            self._pulls.credit = 0
            self._spawn(self._look())
        elif (asked := self._pulls.kept(subject)) is not None:
            # An answer proves the pin only if the pin had not run out when it came; see `verify` for the rest.
            if code in {404, 408, 409} and now < self._proven_until:
                self._proven_until = max(self._proven_until, asked + self._connection.settings.owner_timeout)
        elif code == 409 and "deleted" in text.lower():
            self.failure = LeaseLost(f"{self.what} lost its durable: it was deleted")
            self._drop()
        elif code != 100:
            self._pulls.ended(block)
            self._wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pinned(self, pin: bytes) -> None:
        """The server pinned the durable to us, or something got lost: take over before anything is handed over."""
        if not self._taking:
            self._taking = True
            self._spawn(self._take_over(pin))

    async def _take_over(self, pin: bytes) -> None:
        begin, epoch = time.monotonic(), self._connection.epoch
        try:
            async with self._lock:
                await self._start_over()
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
            # What is in our hands is stale; the partition is claimed anew, from what was committed.
            self._drop()
            await self._unpin()
        except BrokerError as error:
            # The pin runs out by itself if this goes on; the next record begins it again.
            logger.debug("%s: taking over: %s", self.what, error)
        finally:
            self._taking = False
            self._wake()

    async def _look(self) -> None:
        """A pull was refused for its pin: somebody else is pinned, or nobody is any more."""
        try:
            owner = await self._owner()
            if not owner:
                self._pin, self._quiet = b"", False
            elif owner != self._pin and not self._taking:
                self._drop()
        except BrokerError as error:
            logger.debug("%s: looking for its owner: %s", self.what, error)
        finally:
            self._wake()

    async def _owner(self) -> bytes:
        """The pin of the moment; empty if nobody is pinned."""
        return pinned_by(await self._positions.info())

    async def _start_over(self) -> None:
        """Forget what was pulled; the next record that comes is the first after a reset."""
        self._buffer.clear()
        self._positions.forget()
        self._pin = b""
        await self._pulls.close()

    def _drop(self) -> None:
        """It is somebody else's."""
        had = self.claimed
        self.claimed = False
        self._pin = b""
        self._proven_until = 0.0
        self._buffer.clear()
        if had:
            # A pull left open might be pinned, and then take records that nobody reads.
            self._spawn(self._pulls.close())
            self._lost(self)

    async def keep(self) -> None:
        """Keep the pin alive; called several times within `owner_timeout`."""
        if not self.claimed or not self._connection.connected or self._busy or self._taking:
            return
        if self._pulls.are_silent() and not self._buffer:
            self._pulls.credit = 0
            self._pulls.heard = time.monotonic()
            self._wake()
        if self._pin:
            await self._pulls.stay(self._pin)
        else:
            await self._stir()

    async def verify(self) -> bool:
        """Whether it is ours, asking the server where the last proof is too old. Tells the loss if it is not."""
        if self.proven:
            return True
        if not self._pin or not self.claimed:
            return False
        async with self._lock:
            if self.proven:
                return True
            if not self._pin or self._taking or not self._connection.connected:
                return False
            begin = time.monotonic()
            await self._pulls.stay(self._pin)
            owner = await self._owner()
            if self._epoch != self._connection.epoch or not self._pin or self._taking:
                return False
            if owner == self._pin:
                self._proven_until = begin + self._connection.settings.owner_timeout
                return True
            if owner:
                self._drop()
            else:
                # It ran out and nobody was quicker: the next record pins it to somebody.
                await self._start_over()
                self._quiet = False
                self._wake()
            return False

    def take(self, most: int, max_bytes: int, into: list[Record[Any]]) -> int:
        """Hand over what is there, as far as it fits; the bytes that were taken."""
        topic, number, buffer, view = self.layout.topic, self.number, self._buffer, VIEW
        taken = 0
        offset = -1
        while buffer and most > 0:
            raw = buffer[0][1]
            size = len(raw.data) + len(raw.block)
            if taken + size > max_bytes and into:
                break
            offset, _ = buffer.popleft()
            data = None if not raw.data and NULL in raw.block else raw.data
            into.append(Record(topic, number, offset, key_of(raw.block), data, raw, view, size))
            taken += size
            most -= 1
        if offset >= 0:
            self.position = offset + 1
        return taken

    # Positions.

    async def commit(self, position: int) -> None:
        """Store the next position to read.

        :raises LeaseLost: it is not ours any more.
        :raises SettleError: the server did not confirm.
        """
        connection = self._connection
        deadline = time.monotonic() + connection.settings.settle_timeout
        confirmed = True
        while self.claimed and (left := deadline - time.monotonic()) > 0:
            await connection.wait_connected(left)
            if not self.proven:
                found = await self._positions.info()
                if self._taking:
                    # The pin may be ours: its record came before the answer.
                    await asyncio.wait(tuple(self._tasks))
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
                confirmed = await self._positions.store(position, self.position or position, by_ack=confirmed)
            if confirmed:
                return
            # Not answered: the connection broke, or the durable was reset and does not know what was acked.
            self._proven_until = 0.0
        if not self.claimed:
            raise LeaseLost(
                f"{self.what} belongs to another member now", advice="Its new owner reads what was not committed again"
            )
        raise SettleError(f"{self.what}: the server did not confirm the commit of {position}", retriable=True)

    async def seek(self, position: int | None) -> None:
        """Read on from `position`, or from the committed one."""
        async with self._lock:
            self._busy = True
            try:
                pin = self._pin
                await self._start_over()
                self.position = await self._positions.move(position)
                self._pin = pin
            finally:
                self._busy = False
        self._wake()

    # The end.

    async def release(self) -> None:
        """Let it go at once, so that another member need not wait for the pin to run out."""
        self.claimed = False
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        pinned = self.proven
        asked = not self._pin and self._quiet and self._pulls.credit > 0 and self._connection.connected
        await self._start_over()
        self._proven_until = 0.0
        if pinned or asked:
            await self._unpin(look_first=asked)

    async def _unpin(self, *, look_first: bool = False) -> None:
        try:
            # A pull whose records have not come may have been pinned by now, or not.
            if look_first and not await self._owner():
                return
            await self._connection.api(f"CONSUMER.UNPIN.{self._path}", {"group": GROUP}, what=self.what)
        except BrokerError as error:
            logger.debug("%s: letting go: %s", self.what, error)
