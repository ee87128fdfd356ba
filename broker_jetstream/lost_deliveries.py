"""Redelivery, in order, of messages that a broken connection lost.

The server counts a message as delivered once it is sent, and redelivers it when its lease ends, behind newer messages:
within a key the order would break. So a key-ordered source remembers the last delivery. After a break it naks every
message that the server has delivered since and that never arrived. The server redelivers those before anything else, in
the order of the naks.

This works only while no other consumer receives from the subscription, because its deliveries look the same:
deliveries are numbered, and a gap without a break belongs to another consumer. Used on one event loop. `nak_lost` may
be repeated after it failed or was cancelled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from time import monotonic
from typing import Any, Final

from broker import Message, NotAuthorized
from broker_jetstream import subscriptions
from broker_jetstream.codec import sequence_of
from broker_jetstream.connection import Connection
from broker_jetstream.pull_requests import MessagePulls
from broker_jetstream.transport import Outgoing

__all__ = ["LostDeliveries"]

_NAK: Final = b"-NAK"
_SHARED_SECONDS: Final = 600.0
"""How long another consumer counts as present after its last delivery."""
_MAX_NAKS: Final = 65_536
"""Far more messages than can be in flight."""
_QUIET_SECONDS: Final = 0.25
_LEASE_MARGIN: Final = 1.0


class LostDeliveries:
    """Follows the deliveries of one consumer.

    :param last: consumer and stream sequence of the last delivery before ours.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        name: str,
        lease_seconds: float,
        pulls: MessagePulls,
        last: tuple[int, int],
    ) -> None:
        self.unrecovered = False
        """The connection broke, and the lost messages have not been nakked."""
        self.last_number, self._sequence = last
        self.quiet_seconds = _QUIET_SECONDS
        """Seconds without an arrival, while a pull is open, after which no lost message is expected any more."""
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._name = name
        self._lease = lease_seconds
        self._pulls = pulls
        self._reply_fields = f"$JS.ACK.{stream}.{consumer}.1.1.1.0.0".encode().split(b".")
        self._epoch = connection.epoch
        self._before_break = last
        self._requested = 0
        self._shared_until = 0.0
        self._missing: OrderedDict[int, None] = OrderedDict()
        self._requeued = False
        self._out_of_order = False
        self._give_up_at = 0.0
        self._undisturbed = True
        """Nothing broke and nothing is missing: arrivals are only counted, and examined by `update`."""
        self._unread = 0
        self._last_reply = self._newest_reply = b""
        self._first_delivery = f"$JS.ACK.{stream}.{consumer}.1.".encode()

    def arrived(self, reply: bytes) -> bool:
        """Note a delivery; returns False for a duplicate, which must be dropped."""
        if self._undisturbed and self._connection.connected and self._epoch == self._connection.epoch:
            self._pulls.dropped = 0
            self._unread += 1
            self._last_reply = reply
            if reply.startswith(self._first_delivery):
                # First deliveries come in stream order.
                self._newest_reply = reply
            else:
                self._sequence = max(self._sequence, _ack_numbers(reply)[1])
            return True
        if self._epoch != self._connection.epoch or not self._connection.connected:
            self.connection_broke()
        deliveries, sequence, last_number = _ack_numbers(reply)
        self._reply_fields = reply.split(b".")
        if not self.unrecovered and last_number > self.last_number + 1:
            self._shared_until = monotonic() + _SHARED_SECONDS
        self.last_number = last_number
        self._sequence = max(self._sequence, sequence)
        self._undisturbed = self._undisturbed or not (self.unrecovered or self._missing)
        return not self._missing or self._is_expected(sequence, redelivered=deliveries > 1)

    def update(self) -> None:
        """Detect deliveries to other consumers since the last call."""
        if not self._unread:
            return
        last_number = _ack_numbers(self._last_reply)[2]
        if last_number > self.last_number + self._unread:
            self._shared_until = monotonic() + _SHARED_SECONDS
        self.last_number = last_number
        self._unread = 0
        if self._newest_reply:
            self._sequence = max(self._sequence, _ack_numbers(self._newest_reply)[1])
            self._newest_reply = b""
        self._reply_fields = self._last_reply.split(b".")

    def _is_expected(self, sequence: int, *, redelivered: bool) -> bool:
        if redelivered:
            # Redeliveries are ordered: an earlier one that is still missing will not come.
            while self._missing and next(iter(self._missing)) <= sequence:
                self._missing.popitem(last=False)
        elif sequence in self._missing:
            if not self._requeued:
                # It was in flight when it was nakked.
                return False
            del self._missing[sequence]
        elif self._requeued:
            # Redeliveries precede new messages.
            self._missing.clear()
        return True

    def connection_broke(self) -> None:
        """The connection was replaced; messages in flight may be lost."""
        self.update()
        self._undisturbed = False
        self._epoch = self._connection.epoch
        self._requeued = False
        if not self.unrecovered:
            self.unrecovered = self._out_of_order = True
            self._before_break = self.last_number, self._sequence
            self._requested = self._pulls.credit + self._pulls.dropped

    @property
    def sequence_limit(self) -> int | None:
        """Only messages below this sequence may be returned to the caller; None for all."""
        if self.unrecovered:
            return min(self._before_break[1] + 1, next(iter(self._missing), self._before_break[1] + 1))
        if self._missing and monotonic() > self._give_up_at:
            self._missing.clear()
        return next(iter(self._missing), None)

    @property
    def out_of_order(self) -> bool:
        """Whether arrivals must go through `split_ready`."""
        return self._out_of_order or self.unrecovered

    def split_ready(self, messages: Sequence[Message[Any]]) -> tuple[list[Message[Any]], list[Message[Any]]]:
        """Messages that may be returned, in order, and those that wait for earlier ones; drops expired leases."""
        sequence_limit, now = self.sequence_limit, monotonic()
        self._out_of_order = sequence_limit is not None
        known = [(sequence_of(m.raw.reply), index, m) for index, m in enumerate(messages) if m.raw.lease_until >= now]
        ordered = [(sequence, message) for sequence, _, message in sorted(known, key=itemgetter(0, 1))]
        ready = [message for sequence, message in ordered if sequence_limit is None or sequence < sequence_limit]
        return ready, [message for _, message in ordered[len(ready) :]]

    @property
    def awaiting(self) -> bool:
        """Whether a nakked message has not been redelivered yet."""
        return not self.unrecovered and self.sequence_limit is not None

    async def nak_lost(self, buffered: Iterable[int]) -> None:
        """Nak every message that the server has delivered since the break, or before, and that never arrived.

        :param buffered: stream sequences of messages that arrived and were not returned yet.
        :raises BrokerError: the server did not answer.
        """
        connection, begin = self._connection, monotonic()
        epoch = connection.epoch
        try:
            info = await subscriptions.info(connection, self._stream, self._consumer, self._name)
        except NotAuthorized:
            self._finish(epoch)
            return
        last_number, sequence = subscriptions.last_delivery(info)
        # Gaps up to here are ours; later gaps belong to another consumer.
        self.last_number = max(self.last_number, last_number)
        shared = monotonic() < self._shared_until or last_number - self._before_break[0] > self._requested
        if shared or not info.get("num_ack_pending"):
            self._finish(epoch)
            return
        delivered_since = range(max(self._before_break[1] + 1, sequence + 1 - _MAX_NAKS), sequence + 1)
        sequences = sorted({*self._missing, *delivered_since}.difference(buffered))
        self._missing = OrderedDict.fromkeys(sequences)
        if sequences:
            await self._nak(sequences, last_number)
        if connection.connected and connection.epoch == epoch:
            # Twice the time that the request and the naks took; the messages travel for half of that.
            self.quiet_seconds = max(_QUIET_SECONDS, 2 * (monotonic() - begin))
            self._give_up_at = monotonic() + self._lease + _LEASE_MARGIN
            self._epoch, self._requeued, self.unrecovered = epoch, True, False

    async def _nak(self, sequences: list[int], last_number: int) -> None:
        """Nak these; returns when the server has processed all of them."""
        fields = self._reply_fields[:]
        first = 4 if len(fields) == 9 else 6
        fields[first], fields[first + 2] = b"1", b"%d" % last_number
        lines: list[Outgoing] = []
        for sequence in sequences:
            fields[first + 1] = b"%d" % sequence
            lines.append(Outgoing(b".".join(fields), b"", b"", _NAK))
        last = lines.pop()
        with self._connection.inbox.expect(1, frozenset((last.subject,))) as replies:
            await self._connection.send([*lines, last._replace(reply=replies.subject(0))])
            await replies.wait(self._connection.settings.request_timeout)

    def stop_waiting(self) -> None:
        """Expect no further redelivery."""
        self._missing.clear()

    def _finish(self, epoch: int) -> None:
        if self._connection.epoch == epoch:
            self._epoch = epoch
            self.unrecovered = False
        self._missing.clear()


def _ack_numbers(reply: bytes) -> tuple[int, int, int]:
    """Number of deliveries, stream sequence and consumer sequence in an ack subject."""
    fields = reply.split(b".")
    first = 4 if len(fields) == 9 else 6
    return int(fields[first]), int(fields[first + 1]), int(fields[first + 2])
