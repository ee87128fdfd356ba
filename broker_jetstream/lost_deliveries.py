"""What a broken connection swallowed, asked for again before anything newer is handed over.

The server counts as delivered what it sent into a connection that broke, and delivers it again when its lease ends,
behind all that is newer: within a key the later messages would come first. So a key-ordered source notes what came
last, and after a break gives back what the server has delivered since and what never came, on the subjects that would
have acked it. That comes before everything else, in the order in which it was given back.

It is done only where nobody else gets the subscription's messages, since theirs look the same: deliveries are numbered,
and a number that is missing while the connection held was somebody else's. Used on one event loop; `give_back` may be
repeated after it failed or was cancelled.
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
from broker_jetstream.pull_requests import Asking
from broker_jetstream.transport import Outgoing

__all__ = ["Swallowed"]

_NAK: Final = b"-NAK"
_SHARED_SECONDS: Final = 600.0
"""How long somebody else is taken to be there of whom nothing is seen any more."""
_MOST: Final = 65_536
"""How many messages are given back at most; far more than are ever under way."""
_SILENCE: Final = 0.25
_MARGIN: Final = 1.0


class Swallowed:
    """Follows the deliveries of one consumer.

    :param asking: its pulls.
    :param last: the last delivery before ours: its number, and its message's place in the stream.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        name: str,
        lease_seconds: float,
        asking: Asking,
        last: tuple[int, int],
    ) -> None:
        self.unsure = False
        """The connection broke, and what it swallowed has not been given back."""
        self.number, self._place = last
        self.silence = _SILENCE
        """Seconds after which nothing more of it is expected, while a pull is open."""
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._name = name
        self._lease = lease_seconds
        self._asking = asking
        self._fields = f"$JS.ACK.{stream}.{consumer}.1.1.1.0.0".encode().split(b".")
        self._epoch = connection.epoch
        self._before = last
        self._under_way = 0
        self._shared_until = 0.0
        self._missing: OrderedDict[int, None] = OrderedDict()
        self._asked = False
        self._disordered = False
        self._until = 0.0
        self._calm = True
        """Nothing broke, and nothing is missing."""
        self._count = 0
        self._last = self._newest = b""
        self._first = f"$JS.ACK.{stream}.{consumer}.1.".encode()

    def arrived(self, reply: bytes) -> bool:
        """Note a delivery; False for one that comes once more and is to be dropped."""
        # Called for every message: as long as nothing is amiss they are only counted, and read by `review`.
        if self._calm and self._connection.connected and self._epoch == self._connection.epoch:
            self._asking.given_up = 0
            self._count += 1
            self._last = reply
            if reply.startswith(self._first):
                # These come in the order of the stream.
                self._newest = reply
            else:
                self._place = max(self._place, _numbers(reply)[1])
            return True
        if self._epoch != self._connection.epoch or not self._connection.connected:
            self.broke()
        deliveries, place, number = _numbers(reply)
        self._fields = reply.split(b".")
        if not self.unsure and number > self.number + 1:
            self._shared_until = monotonic() + _SHARED_SECONDS
        self.number = number
        self._place = max(self._place, place)
        self._calm = self._calm or not (self.unsure or self._missing)
        return not self._missing or self._expected(place, again=deliveries > 1)

    def review(self) -> None:
        """See whether somebody else got messages meanwhile."""
        if not self._count:
            return
        number = _numbers(self._last)[2]
        if number > self.number + self._count:
            self._shared_until = monotonic() + _SHARED_SECONDS
        self.number = number
        self._count = 0
        if self._newest:
            self._place = max(self._place, _numbers(self._newest)[1])
            self._newest = b""
        self._fields = self._last.split(b".")

    def _expected(self, place: int, *, again: bool) -> bool:
        if again:
            # They come in their order: what has not come before this one does not come at all.
            while self._missing and next(iter(self._missing)) <= place:
                self._missing.popitem(last=False)
        elif place in self._missing:
            if not self._asked:
                # It was under way when it was given back.
                return False
            del self._missing[place]
        elif self._asked:
            # And all of them come before anything new.
            self._missing.clear()
        return True

    def broke(self) -> None:
        """The connection is another one; what was under way may be lost."""
        self.review()
        self._calm = False
        self._epoch = self._connection.epoch
        self._asked = False
        if not self.unsure:
            self.unsure = self._disordered = True
            self._before = self.number, self._place
            self._under_way = self._asking.credit + self._asking.given_up

    @property
    def limit(self) -> int | None:
        """Only what lies before this place in the stream may be handed over; None for all."""
        if self.unsure:
            return min(self._before[1] + 1, next(iter(self._missing), self._before[1] + 1))
        if self._missing and monotonic() > self._until:
            self._missing.clear()
        return next(iter(self._missing), None)

    @property
    def disordered(self) -> bool:
        """Whether what comes has to go through `hold_back`."""
        return self._disordered or self.unsure

    def hold_back(self, messages: Sequence[Message[Any]]) -> tuple[list[Message[Any]], list[Message[Any]]]:
        """Those that may be handed over, in order, and those that wait for earlier ones; without ended leases."""
        limit, now = self.limit, monotonic()
        self._disordered = limit is not None
        known = [(sequence_of(m.raw.reply), number, m) for number, m in enumerate(messages) if m.raw.held_until >= now]
        ordered = [(place, message) for place, _, message in sorted(known, key=itemgetter(0, 1))]
        ready = [message for place, message in ordered if limit is None or place < limit]
        return ready, [message for _, message in ordered[len(ready) :]]

    @property
    def waits(self) -> bool:
        """Whether something that was given back is still to come."""
        return not self.unsure and self.limit is not None

    async def give_back(self, here: Iterable[int]) -> None:
        """Have the server deliver again what it sent since the break, and what is missing from before, at once.

        :param here: places in the stream of what came and was not handed over.
        :raises BrokerError: the server could not be asked.
        """
        connection, begin = self._connection, monotonic()
        epoch = connection.epoch
        try:
            info = await subscriptions.info(connection, self._stream, self._consumer, self._name)
        except NotAuthorized:
            self._done(epoch)
            return
        number, place = subscriptions.last_delivery(info)
        # What is missing up to here is known; what goes missing from here on was somebody else's.
        self.number = max(self.number, number)
        shared = monotonic() < self._shared_until or number - self._before[0] > self._under_way
        if shared or not info.get("num_ack_pending"):
            self._done(epoch)
            return
        since = range(max(self._before[1] + 1, place + 1 - _MOST), place + 1)
        places = sorted({*self._missing, *since}.difference(here))
        self._missing = OrderedDict.fromkeys(places)
        if places:
            await self._refuse(places, number)
        if connection.connected and connection.epoch == epoch:
            # Twice the time that a question and the give-backs took: the messages are under way for half of it.
            self.silence = max(_SILENCE, 2 * (monotonic() - begin))
            self._until = monotonic() + self._lease + _MARGIN
            self._epoch, self._asked, self.unsure = epoch, True, False

    async def _refuse(self, places: list[int], number: int) -> None:
        """Returns when the server has taken them all back."""
        fields = self._fields[:]
        first = 4 if len(fields) == 9 else 6
        fields[first], fields[first + 2] = b"1", b"%d" % number
        lines: list[Outgoing] = []
        for place in places:
            fields[first + 1] = b"%d" % place
            lines.append(Outgoing(b".".join(fields), b"", b"", _NAK))
        last = lines.pop()
        replies = self._connection.inbox.expect(1, frozenset((last.subject,)))
        try:
            await self._connection.send([*lines, last._replace(reply=replies.subject(0))])
            await replies.wait(self._connection.settings.request_timeout)
        finally:
            replies.close()

    def give_up(self) -> None:
        """Nothing of it comes any more."""
        self._missing.clear()

    def _done(self, epoch: int) -> None:
        if self._connection.epoch == epoch:
            self._epoch = epoch
            self.unsure = False
        self._missing.clear()


def _numbers(reply: bytes) -> tuple[int, int, int]:
    """How often the message with this ack subject was delivered, its place in the stream, and the delivery's number."""
    fields = reply.split(b".")
    first = 4 if len(fields) == 9 else 6
    return int(fields[first]), int(fields[first + 1]), int(fields[first + 2])
