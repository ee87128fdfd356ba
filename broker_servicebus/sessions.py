"""The messages of an entity with sessions: several sessions at once, each in order and with one consumer.

A slot accepts the next free session, delivers its messages, and releases the session after `session_idle` seconds
without a message, once all are settled; then it accepts another. One slot more than there are sessions waits, up to
`max_sessions`, each with its own connection. Between an interruption and the next fetch no session is accepted, nothing
is received, and sessions without unsettled messages are released. A session's lock covers all of its messages: if it
ends, all of them are lost, and the next owner receives them in order. A cancelled `close` continues in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Final

from azure.servicebus import NEXT_AVAILABLE_SESSION
from azure.servicebus.aio import ServiceBusReceiver

from broker import BrokerError, Closed, LeaseLost, Message, NotFound, OperationTimeout, Outcome
from broker.driver import Backoff, Settlement, SourceListener, TaskSet, Waker, logger, take_from
from broker_servicebus import private_api
from broker_servicebus.connection import Connection
from broker_servicebus.errors import translate
from broker_servicebus.messages import as_messages
from broker_servicebus.receiving import ReceiverLink
from broker_servicebus.settling import FRESH_PART, SAFE_PART, Settler

__all__ = ["ServiceBusSessionSource"]

_ACCEPT_SECONDS: Final = 5.0
_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0
_MOST_PER_SESSION: Final = 64
_REDELIVERED: Final = frozenset({Outcome.NACK, Outcome.RELEASE})


class _Slot:
    """One accepted session; the lease handle of its messages."""

    def __init__(self, source: ServiceBusSessionSource, link: ReceiverLink, lock_seconds: float, name: str) -> None:
        self.link = link
        self.settler = Settler(source.connection, link, name, lock_seconds)
        self.lock_seconds = lock_seconds
        self.until = monotonic() + SAFE_PART * lock_seconds
        self.unsettled: dict[int, Message[Any]] = {}
        """Unsettled messages by id of the raw message, because a retry is another Message object."""
        self.lost = False
        self.changed = Waker()

    async def renew(self) -> BrokerError | None:
        """Renew the lock if it is not fresh; returns an error or None."""
        begin = monotonic()
        if self.lost:
            return LeaseLost("The session was lost")
        if self.until - begin > FRESH_PART * self.lock_seconds:
            return None

        async def renew(receiver: ServiceBusReceiver) -> None:
            await receiver.session.renew_lock()

        try:
            await self.link.run(renew)
        except BrokerError as error:
            return error
        self.until = begin + SAFE_PART * self.lock_seconds
        for message in self.unsettled.values():
            message.raw.until = self.until
        return None


class ServiceBusSessionSource:
    """Implements `MessageSource` and `ReportsLeaseLeft` over the sessions of one entity."""

    redelivers_in_order = True

    def __init__(
        self,
        connection: Connection,
        create: Callable[..., ServiceBusReceiver],
        topic: str,
        name: str,
        lock_seconds: float,
        missing: type[NotFound],
        listener: SourceListener,
        *,
        max_outstanding: int,
        at_close: Callable[[], Awaitable[None]] | None = None,
        on_close: Callable[[ServiceBusSessionSource], object],
    ) -> None:
        self.connection = connection
        self._create = create
        self._topic = topic
        self._name = name
        self._lock_seconds = lock_seconds
        self._missing = missing
        self._listener = listener
        self._at_close = at_close
        self._on_close = on_close
        sessions = connection.settings.max_sessions
        self._max_per_session = max(1, min(_MOST_PER_SESSION, max_outstanding // sessions))
        # A consumer with more sessions than outstanding messages would block keys for other consumers.
        self._max_slots = min(sessions, max(1, max_outstanding))
        self._arrivals: deque[Message[Any]] = deque()
        self._tasks = TaskSet("broker-servicebus-session", self._slot_failed)
        self._accepting = False
        """Whether a slot waits for a session."""
        self._opening: asyncio.Task[None] | None = None
        self._slots: set[_Slot] = set()
        self._waker = Waker()
        self._interrupted = False
        self._failure: BrokerError | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._start_slot()

    @property
    def closed(self) -> bool:
        """Whether `close` has finished."""
        return self._closing is not None and self._closing.done()

    # Fetching.

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        if self._interrupted:
            self._interrupted = False
            for slot in self._slots:
                slot.changed.wake()
        while True:
            if messages := take_from(self._arrivals, max_messages, max_bytes):
                return messages
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            self._start_slot()
            left = until - loop.time()
            if left <= 0 or self._interrupted:
                return []
            await self._waker.wait(left)
            self._check_open()

    def interrupt(self) -> None:
        self._interrupted = True
        self._waker.wake()
        if self._opening is not None:
            self._opening.cancel()
        for slot in self._slots:
            slot.link.interrupt()
            slot.changed.wake()

    # Sessions.

    def _start_slot(self) -> None:
        """Start a slot that waits for a session, unless there is one or the limit is reached."""
        if self._closed or self._interrupted or self._accepting or len(self._slots) >= self._max_slots:
            return
        self._accepting = True
        self._tasks.spawn(self._serve_slot())

    def _slot_failed(self, error: Exception) -> None:
        self._failure = translate(error, self._name, missing=self._missing)
        self._waker.wake()

    async def _serve_slot(self) -> None:
        try:
            slot = await self._accept()
        finally:
            self._accepting = False
        if slot is None:
            if self._failure is None:
                self._start_slot()  # It was interrupted, but a fetch may have started meanwhile.
            return
        self._slots.add(slot)
        self._start_slot()
        try:
            await self._run_slot(slot)
        except BrokerError as error:
            logger.debug("%s: a session ended: %s", self._name, error)
            # "No session is free" may arrive after the link was opened.
            if not isinstance(error, LeaseLost | OperationTimeout):
                self._failure = error
        finally:
            self._drop_slot(slot)
            try:
                await slot.link.close()
            finally:
                self._slots.discard(slot)
                self._start_slot()
                self._waker.wake()

    async def _accept(self) -> _Slot | None:
        """Accept the next free session; None at close, on interruption or after a permanent error."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        slot: _Slot | None = None
        while slot is None and not self._closed and not self._interrupted:
            link = ReceiverLink(
                self.connection,
                lambda: self._create(session_id=NEXT_AVAILABLE_SESSION, max_wait_time=_ACCEPT_SECONDS),
                self._name,
                self._missing,
                single_use=True,
                open_seconds=_ACCEPT_SECONDS,
            )
            try:
                if await self._try_open(link):
                    slot = _Slot(self, link, self._lock_seconds, self._name)
            except OperationTimeout:
                backoff.reset()  # no session is free
            except BrokerError as error:
                self._failure = error
                self._waker.wake()
                if not error.retriable:
                    break
                await asyncio.sleep(backoff.next())
            finally:
                if slot is None:
                    await link.close()
        return slot

    async def _try_open(self, link: ReceiverLink) -> bool:
        """Open a link; returns False if interrupted, after releasing its session."""
        self._opening = opening = asyncio.get_running_loop().create_task(link.open())
        try:
            await asyncio.wait({opening})
        finally:
            self._opening = None
            opening.cancel()
            # Also if this slot was cancelled: asyncio logs an error that is never retrieved.
            await asyncio.gather(opening, return_exceptions=True)
        if opening.cancelled():
            return False
        opening.result()
        return True

    async def _run_slot(self, slot: _Slot) -> None:
        idle = self.connection.settings.session_idle
        while not self._closed:
            # Without room nothing is received, so a loss must be checked here.
            if slot.lost or slot.until < monotonic():
                raise LeaseLost(f"{self._name}: the lock of a session ended")
            if self._interrupted:
                if self.connection.fast:
                    await slot.link.release_prefetched()
                if not slot.unsettled:
                    return
            room = self._max_per_session - len(slot.unsettled)
            if room > 0 and not self._interrupted:
                natives = await slot.link.receive(room, min(idle, slot.lock_seconds / 4))
                if slot.lost:
                    continue
                messages = as_messages(self._topic, natives, slot.lock_seconds, slot.link.receiver)
                for message in messages:
                    message.lease = slot
                    message.raw.until = slot.until
                    slot.unsettled[id(message.raw)] = message
                if messages:
                    self._arrivals += messages
                    self._waker.wake()
                    continue
                if not slot.unsettled:
                    return
            await slot.changed.wait(min(idle, slot.lock_seconds / 4))
            if any(message.lease is slot for message in self._arrivals) and (error := await slot.renew()) is not None:
                raise error

    def _drop_slot(self, slot: _Slot) -> None:
        """Drop a session; its unsettled messages are lost."""
        slot.lost = True
        slot.changed.wake()
        if not slot.unsettled:
            return
        waiting = {id(message.raw) for message in self._arrivals if message.lease is slot}
        self._arrivals = deque(message for message in self._arrivals if message.lease is not slot)
        lost_messages = [message for key, message in slot.unsettled.items() if key not in waiting]
        slot.unsettled.clear()
        for message in lost_messages:
            message.raw.until = 0.0
        if lost_messages and not self._closed:
            self._listener.lost(lost_messages)

    # Settling.

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        groups: dict[int, list[int]] = {}
        for index, settlement in enumerate(settlements):
            groups.setdefault(id(settlement.message.lease), []).append(index)
        results: list[BrokerError | None] = [None] * len(settlements)

        async def settle(indexes: list[int]) -> None:
            slot: _Slot = settlements[indexes[0]].message.lease
            errors = await self._settle(slot, [settlements[index] for index in indexes])
            for index, error in zip(indexes, errors, strict=True):
                results[index] = error

        await asyncio.gather(*(settle(indexes) for indexes in groups.values()))
        return results

    async def _settle(self, slot: _Slot, settlements: list[Settlement]) -> Sequence[BrokerError | None]:
        if slot.lost:
            return [LeaseLost(f"{self._name}: the session was lost") for _ in settlements]
        redelivers = any(settlement.outcome in _REDELIVERED for settlement in settlements)
        number = len(settlements)
        if redelivers:
            settlements = settlements + await self._stop_and_collect(slot)
        errors = await slot.settler.settle(settlements)
        if redelivers and self.connection.fast:
            with contextlib.suppress(BrokerError):  # the next receive raises it again
                await slot.link.release_prefetched(stopped=True)
        for settlement in settlements:
            slot.unsettled.pop(id(settlement.message.raw), None)
        slot.changed.wake()
        if any(error is not None for error in errors):
            # The message may still be locked; it is redelivered in order only after the session is released.
            self._drop_slot(slot)
        return errors[:number]

    async def _stop_and_collect(self, slot: _Slot) -> list[Settlement]:
        """Withdraw the credit, so no message overtakes a redelivered one; returns releases of buffered messages."""
        if self.connection.fast:
            try:
                await slot.link.run(private_api.withdraw_credit)
            except BrokerError:
                return []
        waiting = [message for message in self._arrivals if message.lease is slot]
        self._arrivals = deque(message for message in self._arrivals if message.lease is not slot)
        return [Settlement(message, Outcome.RELEASE) for message in waiting]

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        slots: dict[int, _Slot] = {id(message.lease): message.lease for message in messages}
        errors = dict(zip(slots, await asyncio.gather(*(slot.renew() for slot in slots.values())), strict=True))
        for number, error in errors.items():
            if isinstance(error, LeaseLost):
                self._drop_slot(slots[number])
        return [errors[id(message.lease)] for message in messages]

    def lease_left(self, message: Message[Any]) -> float:
        return message.raw.until - monotonic()

    # Closing.

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
            self._closing.add_done_callback(lambda _: self._on_close(self))
        # Shielded: a half-closed source would keep sessions locked.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if not self.connection.closed:
            waiting = list(self._arrivals)
            self._arrivals.clear()
            if waiting:
                await self.settle([Settlement(message, Outcome.RELEASE) for message in waiting])
        self._closed = True
        self._waker.wake()
        await self._tasks.wait(0)
        if self._at_close is not None and not self.connection.closed:
            await self._at_close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._name} was closed")
        self.connection.check_open()
