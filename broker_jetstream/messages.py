"""The Message family on durable pull consumers.

Messages are pulled only as far as `fetch` asks: what was asked for and not yet sent is the credit of open pulls, and a
credit that no fetch stands behind for a moment is taken back, so that a slow consumer does not sit on what
others could do. What arrives late waits here with its lease renewed and is the next fetch's, or is given back
at close. Settling may run while a fetch does. After a reconnect the pulls are made again. The lease clock is ours:
a message held longer than the server grants is reported lost and not settled, because the server answers every
ack alike.

MERGED broker_jetstream.messages: What a consumer that died left behind, brought back into the order of the stream. Pure.

The server delivers again in the order in which leases end, and a lease that was renewed ends late: after a crash
the later messages of a key would come before its earlier ones. They all come before anything new, though, so a
key-ordered source gathers them when it opens, and sorts them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from broker import BackendError, BrokerError, Closed, Message, NotFound, Outcome
from broker.driver import Settlement, SourceListener, WaitingLeases, Waker, Warned
from broker_jetstream import subscriptions
from broker_jetstream.codec import NULL, MessageView, NativeMessage, deliveries_of, sequence_of, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.lost_deliveries import Swallowed
from broker_jetstream.pull_requests import Asking
from broker_jetstream.release_counts import GivenBack
from broker_jetstream.settling import Settler
from broker_jetstream.streams import Layout

__all__ = ["GATHER_SECONDS", "GATHER_STEP", "JetStreamMessageSource", "in_stream_order", "is_inherited"]


logger = logging.getLogger("broker")
VIEW: Final = MessageView()
PARK_SECONDS: Final = 0.1
"""How long a credit stays open that no fetch stands behind."""
CLOSE_SECONDS: Final = 1.0
_AGAIN: Final = frozenset({Outcome.NACK, Outcome.RELEASE})
_CERTAIN: Final = 0.9
"""How much of a lease is surely ours, whatever the message's way here took."""


class JetStreamMessageSource:
    """The messages of one subscription of one topic."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        subscription: str,
        consumer: str,
        lease_seconds: float,
        listener: SourceListener,
        *,
        confirm_acks: bool,
        ephemeral: bool,
        inherited: int = 0,
        last: tuple[int, int] | None = None,
    ) -> None:
        """:param inherited: how many unsettled messages the subscription has that must come in order, if they come.
        :param last: keep order per key; number and place in the stream of the last delivery that there was.
        """
        self._connection = connection
        self._layout = layout
        self._consumer = consumer
        self._lease = lease_seconds
        self._listener = listener
        self._name = name = f"Subscription {subscription!r} of topic {layout.topic!r}"
        self._settler = Settler(connection, name, lease_seconds, confirm=confirm_acks)
        self._given_back = GivenBack(connection, layout.stream, consumer, name, listener, alone=ephemeral)
        self._repeated = False
        self._ephemeral = ephemeral
        self._inherited = inherited
        self._topic = layout.topic
        # How the ack subject of a first delivery begins, outside of domains.
        self._first = f"$JS.ACK.{layout.stream}.{consumer}.1.".encode()
        self._buffer: list[Message[Any]] = []
        arrived = self._arrived if last is None else self._arrived_in_order
        self._asking = Asking(connection, layout, consumer, arrived)
        self._swallowed = (
            None
            if last is None
            else Swallowed(connection, layout.stream, consumer, name, lease_seconds, self._asking, last)
        )
        # The hot path counts by itself.
        self._open = self._asking.open
        self._until = 0.0
        self._idle_since = 0.0
        self._waker = Waker()
        self._interrupted = False
        self._fetching = False
        self._failure: BrokerError | None = None
        self._parking: asyncio.TimerHandle | None = None
        self._leases = WaitingLeases(name, lease_seconds, lambda: self._buffer, self._settler.extend)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._remove_callback = connection.on_connected(self._reconnected)

    # Fetching.

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        self._fetching = True
        try:
            return await self._fetch(max_messages, max_bytes, wait)
        finally:
            self._fetching = False
            self._interrupted = False
            self._idle()

    async def _fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        deadline = monotonic() + wait
        if (swallowed := self._swallowed) is not None:
            swallowed.review()
        if self._inherited and self._connection.connected:
            await self._inherit(max_bytes)
        while True:
            if swallowed is not None and swallowed.unsure and self._connection.connected:
                await swallowed.give_back([sequence_of(message.raw.reply) for message in self._buffer])
            if self._failure is None and not (swallowed is not None and swallowed.unsure):
                await self._ask(max_messages, max_bytes)
            while self._repeated:
                self._repeated = False
                await self._given_back.mark(self._buffer[:])
            # Nothing may come between what is held back and what is taken.
            late: list[Message[Any]] = []
            if swallowed is not None and swallowed.disordered:
                self._buffer, late = swallowed.hold_back(self._buffer)
            taken = self._take(max_messages, max_bytes) if self._buffer else None
            self._buffer += late
            if taken:
                return taken
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            left = deadline - monotonic()
            if self._interrupted:
                return []
            if left <= 0:
                if not self._connection.connected:
                    # Nothing came, but that is no idleness.
                    raise self._connection.broken()
                return []
            if swallowed is not None and swallowed.waits:
                await self._wait_for_swallowed(swallowed, left)
            else:
                await self._wait(left)
            self._check_open()

    async def _ask(self, max_messages: int, max_bytes: int) -> None:
        buffer = self._buffer
        if self._swallowed is not None and (limit := self._swallowed.limit) is not None:
            # What is held back must not keep that from coming which it waits for.
            buffer = [message for message in buffer if sequence_of(message.raw.reply) < limit]
        size = sum([message.size for message in self._buffer])
        number, number_bytes = self._asking.want(max_messages - len(buffer), max_bytes - size, holding=bool(buffer))
        if number > 0:
            await self._asking.ask(number, number_bytes)

    async def _wait_for_swallowed(self, swallowed: Swallowed, left: float) -> None:
        number, begin = swallowed.number, monotonic()
        await self._wait(min(left, swallowed.silence))
        if number == swallowed.number and self._credit and monotonic() - begin >= swallowed.silence:
            # A pull is open, and the server has nothing for it.
            swallowed.give_up()

    async def _inherit(self, max_bytes: int) -> None:
        """Gather what an earlier consumer left, as far as the server delivers it now, and put it in order."""
        expected, self._inherited = self._inherited, 0
        while len(self._buffer) < expected and not self._interrupted and self._failure is None:
            await self._ask(len(self._buffer) + min(GATHER_STEP, expected - len(self._buffer)), max_bytes)
            came = len(self._buffer)
            await self._wait(GATHER_SECONDS)
            if len(self._buffer) == came or not is_inherited(self._buffer[-1]):
                break
        self._buffer = in_stream_order(self._buffer)

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def _arrived_in_order(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        assert self._swallowed is not None  # only then is this the handler
        if (data or block[8:9] != b" ") and not self._swallowed.arrived(reply):
            if (pull := self._asking.open.get(subject)) is not None:
                pull[0] -= 1
            self._waker.wake()
            return
        self._arrived(subject, reply, data, block)

    def _arrived(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        # The hot path: called by the client's read loop for every message.
        if not data and block[8:9] == b" " and not reply:
            self._status(subject, block)
            return
        buffer = self._buffer
        if not buffer:
            # The clock is read once per burst: what follows may count as older than it is, never as younger.
            # The server counts from its sending, so that ours ends a little before: a late ack must never be sent.
            self._until = monotonic() + _CERTAIN * self._lease
            if not self._fetching:
                self._leases.watch()
        raw = NativeMessage(subject, reply, data, block, self._until, reply.startswith(self._first))
        if not raw.first:
            self._repeated = True
        body = data if data or NULL not in block else None
        size = len(data) + len(block)
        buffer.append(Message(self._topic, body, raw, VIEW, None, size))
        if (pull := self._open.get(subject)) is not None:
            pull[0] -= 1
            pull[1] -= size
        if self._waker.waiter is not None:
            self._waker.wake()

    @property
    def _credit(self) -> int:
        """How many messages were asked for and have not come."""
        return self._asking.credit

    def _status(self, subject: bytes, block: bytes) -> None:
        code, text = status_of(block)
        self._asking.heard = monotonic()
        if code == 100 or not self._asking.is_mine(subject):
            return
        lowered = text.lower()
        self._asking.ended(subject, too_large=code == 409 and "message size" in lowered)
        if code == 409 and "deleted" in lowered:
            self._look("the consumer was deleted")
        elif code == 503:
            self._look("nobody answers for the consumer")
        elif code not in {404, 408} and not any(
            known in lowered for known in ("maxbytes", "batch completed", "leadership", "shutdown", "exceeded max")
        ):
            self._fail(BackendError(f"The server refused a pull of {self._name}: {code} {text}"))
        self._waker.wake()

    def _look(self, reason: str) -> None:
        """Find out whether the consumer is still there; the next fetch says so if it is not."""
        self._spawn(self._find_out(reason))

    async def _find_out(self, reason: str) -> None:
        await asyncio.sleep(0.05)
        try:
            await subscriptions.info(self._connection, self._layout.stream, self._consumer, self._name)
        except NotFound as error:
            self._fail(error)
        except BrokerError as error:
            logger.debug("%s: %s: %s", self._name, reason, error)
        finally:
            self._asking.drop()
            self._waker.wake()

    def _fail(self, error: BrokerError) -> None:
        self._failure = error
        self._waker.wake()

    def _take(self, max_messages: int, max_bytes: int) -> list[Message[Any]]:
        buffer = self._buffer
        if buffer[0].raw.held_until < monotonic():
            # The process stood still for longer than the lease: these come again, to whoever asks.
            self._buffer = buffer = [message for message in buffer if message.raw.held_until >= monotonic()]
            if not buffer:
                return []
        size = sum([message.size for message in buffer])
        self._asking.took(len(buffer), size)
        if len(buffer) <= max_messages and size <= max_bytes:
            self._buffer = []
            return buffer
        number = size = 0
        for message in buffer[:max_messages]:
            size += message.size
            if size > max_bytes and number:
                break
            number += 1
        taken = buffer[:number]
        del buffer[:number]
        return taken

    async def _wait(self, seconds: float) -> None:
        # Two missed heartbeats mean that the pull is gone.
        patience = self._asking.patience
        await self._waker.wait(min(seconds, patience))
        if self._credit and not self._buffer and monotonic() - self._asking.heard > patience:
            if self._connection.connected and self._connection.hooks.listening:
                self._listener.event(Warned(text=f"{self._name}: the server is silent, asking again"))
            await self._asking.renew()

    # Between fetches.

    def _idle(self) -> None:
        if self._closed:
            return
        self._idle_since = monotonic()
        if self._credit and self._parking is None:
            self._parking = asyncio.get_running_loop().call_later(PARK_SECONDS, self._park)
        if self._buffer:
            self._leases.watch()

    def _park(self) -> None:
        self._parking = None
        if self._fetching or not self._credit or self._closed:
            return
        left = self._idle_since + PARK_SECONDS - monotonic()
        if left > 0:
            # There was a fetch meanwhile.
            self._parking = asyncio.get_running_loop().call_later(left, self._park)
        else:
            self._spawn(self._asking.renew())

    def _reconnected(self) -> None:
        # Pulls of the broken connection are gone; a fetch that waits makes new ones.
        if self._swallowed is not None:
            self._swallowed.broke()
        self._asking.drop()
        self._waker.wake()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Settling.

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        if again := [settlement for settlement in settlements if settlement.outcome in _AGAIN]:
            if self._credit > 0 and not self._fetching:
                # The server would deliver these into a pull that nobody waits for, and that a close is about to drop.
                await self._asking.let_go()
            await self._count_give_backs([s.message for s in again if s.outcome is Outcome.RELEASE])
        return await self._settler.settle(settlements)

    async def _count_give_backs(self, messages: Sequence[Message[Any]]) -> None:
        await self._given_back.add(sequence_of(message.raw.reply) for message in messages)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._settler.extend(messages)

    # The end.

    async def close(self) -> None:
        if self._closed:
            return
        self._remove_callback()
        if self._parking is not None:
            self._parking.cancel()
        self._leases.close()
        if not self._connection.closed:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._asking.let_go()
                    await self._give_back()
            except (BrokerError, TimeoutError) as error:
                logger.debug("Giving back what %s had fetched: %s", self._name, error)
        self._closed = True
        self._waker.wake()
        for task in tuple(self._tasks):
            task.cancel()

    async def _give_back(self) -> None:
        waiting, self._buffer = self._buffer, []
        if self._connection.connected:
            if not self._ephemeral:
                await self._count_give_backs(waiting)
            await self._settler.give_back(waiting)
            if self._ephemeral:
                await subscriptions.delete(self._connection, self._layout.stream, self._consumer, self._name)
            else:
                await self._connection.flush()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._name} was closed")
        self._connection.check_open()


GATHER_SECONDS: Final = 0.25
"""Silence after which nothing more is expected to come again now."""
GATHER_STEP: Final = 64
"""Messages asked for at a time, so that little that is new is taken from other consumers."""


def is_inherited(message: Message[Any]) -> bool:
    """Whether it was delivered before, be it only to be given back."""
    return not message.raw.first and deliveries_of(message.raw.reply) > 1


def in_stream_order(messages: Sequence[Message[Any]]) -> list[Message[Any]]:
    """Those that were delivered before by their place in the stream, then the others as they came."""
    again = sorted(filter(is_inherited, messages), key=lambda message: sequence_of(message.raw.reply))
    return [*again, *(message for message in messages if not is_inherited(message))]
