"""The Message family on durable pull consumers.

*Credit.* Messages are pulled only as far as `fetch` asks. Pulls that no fetch waits for are cancelled after a moment,
so a slow consumer does not hold messages that others could process. Late arrivals wait here with their leases renewed;
the next `fetch` returns them, or `close` releases them. *Concurrency.* Settling may run during a fetch. *Failure.*
After a reconnect the pulls are requested again. The lease is measured by our own clock, because the server answers
every ack alike: a message held for longer is reported lost and not settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from broker import BackendError, BrokerError, Closed, Message, NotFound, Outcome
from broker.driver import LeaseRenewer, Settlement, SourceListener, TaskSet, Waker, Warned, logger, reads_answer
from broker_jetstream import subscriptions
from broker_jetstream.codec import NULL, MessageView, NativeMessage, deliveries_of, sequence_of, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.lost_deliveries import LostDeliveries
from broker_jetstream.pull_requests import MessagePulls
from broker_jetstream.release_counts import ReleaseCounts
from broker_jetstream.settling import Settler
from broker_jetstream.streams import Layout

__all__ = ["GATHER_STEP", "JetStreamMessageSource"]

VIEW: Final = MessageView()
CANCEL_AFTER_SECONDS: Final = 0.1
"""How long pulls stay open that no fetch waits for."""
CLOSE_SECONDS: Final = 1.0
_REDELIVERED: Final = frozenset({Outcome.NACK, Outcome.RELEASE})
_GATHER_SECONDS: Final = 0.25
"""Seconds without an arrival after which no further redelivery is expected."""
GATHER_STEP: Final = 64
"""Messages requested at a time, so that few new ones are taken from other consumers."""
_SAFE_PART: Final = 0.9
"""The part of a lease that is certainly ours, however long the message travelled."""


class JetStreamMessageSource:
    """Implements `MessageSource` and `ReportsLeaseLeft`."""

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
        redeliveries: int = 0,
        last_delivery: tuple[int, int] | None = None,
        on_close: Callable[[JetStreamMessageSource], object],
    ) -> None:
        """:param redeliveries: unsettled messages of the subscription, to be gathered and ordered by the first fetch.
        :param last_delivery: consumer and stream sequence of the last delivery; set to keep order per key.
        """
        self._connection = connection
        self._layout = layout
        self._consumer = consumer
        self._lease = lease_seconds
        self._listener = listener
        self._on_close = on_close
        self._name = name = f"Subscription {subscription!r} of topic {layout.topic!r}"
        self._settler = Settler(connection, name, lease_seconds, confirm=confirm_acks)
        self._release_counts = ReleaseCounts(connection, layout.stream, consumer, name, listener, alone=ephemeral)
        self._has_redelivered = False
        self._ephemeral = ephemeral
        self._expected_redeliveries = redeliveries
        self._topic = layout.topic
        # Prefix of the ack subject of a first delivery, outside of domains.
        self._first_delivery = f"$JS.ACK.{layout.stream}.{consumer}.1.".encode()
        self._buffer: list[Message[Any]] = []
        arrived = self._arrived if last_delivery is None else self._arrived_in_order
        self._pulls = MessagePulls(connection, layout, consumer, arrived)
        self._lost = (
            None
            if last_delivery is None
            else LostDeliveries(connection, layout.stream, consumer, name, lease_seconds, self._pulls, last_delivery)
        )
        self._open = self._pulls.open
        self._lease_until = 0.0
        self._idle_since = 0.0
        self._waker = Waker()
        self._interrupted = False
        self._fetching = False
        self._failure: BrokerError | None = None
        self._cancel_timer: asyncio.TimerHandle | None = None
        self._leases = LeaseRenewer(name, lease_seconds, lambda: self._buffer, self._settler.extend)
        self._tasks = TaskSet("broker-jetstream-consumer", lambda error: logger.error("%s: %r", name, error))
        self._closed = False
        self._remove_callback = connection.on_connected(self._reconnected)

    # Fetching.

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        self._fetching = True
        try:
            # The numbers in ack subjects are read without a check.
            with reads_answer(self._name):
                return await self._fetch(max_messages, max_bytes, wait)
        finally:
            self._fetching = self._interrupted = False
            self._idle()

    async def _fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        deadline = monotonic() + wait
        if (lost := self._lost) is not None:
            lost.update()
        if self._expected_redeliveries and self._connection.connected:
            await self._gather_redelivered(max_bytes)
        while True:
            if lost is not None and lost.unrecovered and self._connection.connected:
                await lost.nak_lost([sequence_of(message.raw.reply) for message in self._buffer])
            if self._failure is None and not (lost is not None and lost.unrecovered):
                await self._request(max_messages, max_bytes)
            while self._has_redelivered:
                self._has_redelivered = False
                await self._release_counts.mark(self._buffer[:])
            # No message may arrive between `split_ready` and `_take`: nothing is awaited.
            late: list[Message[Any]] = []
            if lost is not None and lost.out_of_order:
                self._buffer, late = lost.split_ready(self._buffer)
            ready = self._take(max_messages, max_bytes) if self._buffer else None
            self._buffer += late
            if ready:
                return ready
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            left = deadline - monotonic()
            if self._interrupted:
                return []
            if left <= 0:
                if not self._connection.connected:
                    # The subscription is not idle: it is unreachable.
                    raise self._connection.down_error()
                return []
            if lost is not None and lost.awaiting:
                await self._wait_for_lost(lost, left)
            else:
                await self._wait(left)
            self._check_open()

    async def _request(self, max_messages: int, max_bytes: int) -> None:
        buffer = self._buffer
        if self._lost is not None and (sequence_limit := self._lost.sequence_limit) is not None:
            # Messages that wait for earlier ones must not use up the room of those.
            buffer = [message for message in buffer if sequence_of(message.raw.reply) < sequence_limit]
        size = sum([message.size for message in self._buffer])
        number, number_bytes = self._pulls.next_request(
            max_messages - len(buffer), max_bytes - size, buffered=bool(buffer)
        )
        if number > 0:
            await self._pulls.request(number, number_bytes)

    async def _wait_for_lost(self, lost: LostDeliveries, left: float) -> None:
        last_number, begin = lost.last_number, monotonic()
        await self._wait(min(left, lost.quiet_seconds))
        if last_number == lost.last_number and self._pulls.credit and monotonic() - begin >= lost.quiet_seconds:
            # A pull is open and the server has nothing for it.
            lost.stop_waiting()

    async def _gather_redelivered(self, max_bytes: int) -> None:
        """Gather redelivered messages of an earlier consumer, and sort them into stream order."""
        expected, self._expected_redeliveries = self._expected_redeliveries, 0
        while len(self._buffer) < expected and not self._interrupted and self._failure is None:
            await self._request(len(self._buffer) + min(GATHER_STEP, expected - len(self._buffer)), max_bytes)
            before = len(self._buffer)
            await self._wait(_GATHER_SECONDS)
            if len(self._buffer) == before or not is_redelivered(self._buffer[-1]):
                break
        self._buffer = in_stream_order(self._buffer)

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def _arrived_in_order(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        assert self._lost is not None  # only then is this the handler
        if (data or block[8:9] != b" ") and not self._lost.arrived(reply):
            if (pull := self._pulls.open.get(subject)) is not None:
                pull[0] -= 1
            self._waker.wake()
            return
        self._arrived(subject, reply, data, block)

    def _arrived(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        # Called by the client's read loop for every message.
        if not data and block[8:9] == b" " and not reply:
            self._status(subject, block)
            return
        buffer = self._buffer
        if not buffer:
            # The clock is read once per burst, so a lease may only seem older than it is. The server counts from its
            # sending, so our lease ends a little earlier: a late ack must never be sent.
            self._lease_until = monotonic() + _SAFE_PART * self._lease
            if not self._fetching:
                self._leases.watch()
        raw = NativeMessage(subject, reply, data, block, self._lease_until, reply.startswith(self._first_delivery))
        if not raw.first:
            self._has_redelivered = True
        body = data if data or NULL not in block else None
        size = len(data) + len(block)
        buffer.append(Message(self._topic, body, raw, VIEW, None, size))
        if (pull := self._open.get(subject)) is not None:
            pull[0] -= 1
            pull[1] -= size
        if self._waker.waiter is not None:
            self._waker.wake()

    def _status(self, subject: bytes, block: bytes) -> None:
        code, text = status_of(block)
        self._pulls.last_heard = monotonic()
        if code == 100 or not self._pulls.owns(subject):
            return
        lowered = text.lower()
        self._pulls.end(subject, too_large=code == 409 and "message size" in lowered)
        if code == 409 and "deleted" in lowered:
            self._tasks.spawn(self._check_consumer("the consumer was deleted"))
        elif code == 503:
            self._tasks.spawn(self._check_consumer("no responders"))
        elif code not in {404, 408} and not any(
            known in lowered for known in ("maxbytes", "batch completed", "leadership", "shutdown", "exceeded max")
        ):
            self._failure = BackendError(f"The server refused a pull of {self._name}: {code} {text}")
        self._waker.wake()

    async def _check_consumer(self, reason: str) -> None:
        """Check whether the consumer still exists; the next fetch raises if not."""
        await asyncio.sleep(0.05)
        try:
            await subscriptions.info(self._connection, self._layout.stream, self._consumer, self._name)
        except NotFound as error:
            self._failure = error
        except BrokerError as error:
            logger.debug("%s: %s: %s", self._name, reason, error)
        finally:
            self._pulls.drop()
            self._waker.wake()

    def _take(self, max_messages: int, max_bytes: int) -> list[Message[Any]]:
        buffer = self._buffer
        if buffer[0].raw.lease_until < monotonic():
            # The process was suspended for longer than the lease: the server redelivers these.
            self._buffer = buffer = [message for message in buffer if message.raw.lease_until >= monotonic()]
            if not buffer:
                return []
        size = sum([message.size for message in buffer])
        self._pulls.note_size(len(buffer), size)
        if len(buffer) <= max_messages and size <= max_bytes:
            self._buffer = []
            return buffer
        count = size = 0
        for message in buffer[:max_messages]:
            size += message.size
            if size > max_bytes and count:
                break
            count += 1
        ready = buffer[:count]
        del buffer[:count]
        return ready

    async def _wait(self, seconds: float) -> None:
        await self._waker.wait(min(seconds, self._pulls.patience))
        if not self._buffer and self._pulls.silent:
            if self._connection.connected and self._connection.hooks.listening:
                self._listener.event(Warned(text=f"{self._name}: no heartbeat, renewing the pull request"))
            await self._pulls.cancel()

    # Between fetches.

    def _idle(self) -> None:
        if self._closed:
            return
        self._idle_since = monotonic()
        if self._pulls.credit and self._cancel_timer is None:
            self._cancel_timer = asyncio.get_running_loop().call_later(CANCEL_AFTER_SECONDS, self._cancel_pulls)
        if self._buffer:
            self._leases.watch()

    def _cancel_pulls(self) -> None:
        self._cancel_timer = None
        if self._fetching or not self._pulls.credit or self._closed:
            return
        left = self._idle_since + CANCEL_AFTER_SECONDS - monotonic()
        if left > 0:
            # A fetch ran meanwhile.
            self._cancel_timer = asyncio.get_running_loop().call_later(left, self._cancel_pulls)
        else:
            self._tasks.spawn(self._pulls.cancel())

    def _reconnected(self) -> None:
        # The pulls ended with the connection; a waiting fetch requests new ones.
        if self._lost is not None:
            self._lost.connection_broke()
        self._pulls.drop()
        self._waker.wake()

    # Settling.

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        if redelivered := [settlement for settlement in settlements if settlement.outcome in _REDELIVERED]:
            if self._pulls.credit > 0 and not self._fetching:
                # The server would redeliver these into a pull that no fetch waits for.
                await self._pulls.drain()
            await self._release_counts.add(s.message for s in redelivered if s.outcome is Outcome.RELEASE)
        return await self._settler.settle(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._settler.extend(messages)

    def lease_left(self, message: Message[Any]) -> float:
        return message.raw.lease_until - monotonic()

    # The end.

    async def close(self) -> None:
        if self._closed:
            return
        self._remove_callback()
        if self._cancel_timer is not None:
            self._cancel_timer.cancel()
        self._leases.close()
        if not self._connection.closed:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._pulls.drain()
                    await self._release_buffered()
            except (BrokerError, TimeoutError) as error:
                logger.debug("Releasing the buffered messages of %s failed: %s", self._name, error)
        self._closed = True
        self._waker.wake()
        self._tasks.cancel()
        self._on_close(self)

    async def _release_buffered(self) -> None:
        waiting, self._buffer = self._buffer, []
        if self._connection.connected:
            if not self._ephemeral:
                await self._release_counts.add(waiting)
            await self._settler.release(waiting)
            if self._ephemeral:
                await subscriptions.delete(self._connection, self._layout.stream, self._consumer, self._name)
            else:
                await self._connection.flush()

    def _check_open(self) -> None:
        if self._closed or self._connection.closed:
            raise Closed(f"{self._name} was closed")


def is_redelivered(message: Message[Any]) -> bool:
    """Whether an earlier delivery exists, even one that was released."""
    return not message.raw.first and deliveries_of(message.raw.reply) > 1


def in_stream_order(messages: Sequence[Message[Any]]) -> list[Message[Any]]:
    """Redelivered messages by stream sequence, then the others as they arrived."""
    redelivered = sorted(filter(is_redelivered, messages), key=lambda message: sequence_of(message.raw.reply))
    return [*redelivered, *(message for message in messages if not is_redelivered(message))]
