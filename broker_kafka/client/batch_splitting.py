"""Sends a batch that a broker rejected as too large again in smaller groups, so that only too large messages fail.

The client fails every message of such a batch, also those whose neighbour was too large. So from the first rejection
on, the messages of that topic go to the client in groups, one group at a time. A rejected group is sent again in
halves, down to single messages; the rejection of a single message is final. A topic whose `max.message.bytes` is below
the client's `batch.size` stays fast: each round trip carries at least half of what the topic takes.

*Order.* A group starts after every outcome of the last one, so that no message overtakes another. At the first
rejection later messages of the topic may be with the client already, which delivers them. A rejected message is not
sent again behind a later message of its key, or of the partition that both name: it fails as retriable. It may come
behind messages of other keys; messages without a key have no order. *Concurrency.* Runs in the producer's thread.
Nothing here raises, because delivery reports call it. *Failure.* Each message has its own outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from confluent_kafka import KafkaError

from broker import BackendError, BrokerError, OutboundMessage
from broker.driver import message_size
from broker_kafka.client.delivery_reports import TOO_LARGE, PublishCall, Reports

__all__ = ["Group", "Splitting"]

_RECORD_OVERHEAD: Final = 24
"""Bytes of a record besides key, body and attributes, about."""

_Place = tuple[PublishCall, int]
"""A message: its call, and its index in the call."""


class Group(PublishCall):
    """Messages of any calls for one topic, sent alone.

    :ivar places: the origin of each message.
    """

    __slots__ = ("places",)

    def __init__(self, topic: str, places: Sequence[_Place]) -> None:
        messages = [call.messages[index] for call, index in places]
        super().__init__(topic, messages, None, receipts=True, deadline=places[-1][0].deadline)
        self.places = places


class Splitting:
    """:param send: produces a group.
    :param on_complete: called with each call when each of its messages has an outcome.
    :param late: makes the error of a message whose time passed before it was sent, from the topic.
    :param batch: the client's `batch.size`. A smaller group is one batch per partition, so that none of its messages
        is written behind a rejected one, unless the thread is suspended while it produces the group.
    """

    def __init__(
        self,
        send: Callable[[PublishCall], object],
        on_complete: Callable[[PublishCall], object],
        late: Callable[[str], BrokerError],
        *,
        batch: int,
    ) -> None:
        self._send = send
        self._on_complete = on_complete
        self._late = late
        self._batch = batch
        self.topics: dict[str, _Topic] = {}
        """The topics with a rejected batch. While empty, only `failed` may be called."""
        self.draining = 0
        """The number of topics that drain."""

    def failed(self, topic: str, error: KafkaError | BrokerError) -> None:
        """Send this topic in groups from now on if the error is that of a batch that is too large."""
        if topic not in self.topics and _is_too_large(error):
            self.topics[topic] = _Topic()
            self.draining += 1

    def intercept(self, call: PublishCall) -> bool:
        """Take over a call that is about to be produced, if its topic is sent in groups; returns whether it was."""
        topic = self.topics.get(call.topic)
        if topic is None or isinstance(call, Group):
            return False
        if topic.draining:
            topic.calls.append(call)
        else:
            self._enqueue(topic, [call])
            self._send_next(call.topic, topic)
        return True

    def retain(self, call: PublishCall) -> bool:
        """Keep a call whose messages all have outcomes if some may be sent again; returns whether it is kept."""
        topic = self.topics.get(call.topic)
        if topic is None:
            return False
        if isinstance(call, Group):
            self._group_complete(call, topic)
            return True
        if topic.draining:
            topic.calls.append(call)
        return topic.draining

    def drain(self, reports: Reports, backlog: deque[PublishCall]) -> None:
        """Start the groups of topics that the client has drained, with their calls from the backlog."""
        for name, topic in self.topics.items():
            if topic.draining and not reports.awaits(name):
                topic.draining = False
                self.draining -= 1
                topic.calls += [call for call in backlog if call.topic == name]
                others = [call for call in backlog if call.topic != name]
                backlog.clear()
                backlog.extend(others)
                calls, topic.calls = sorted(topic.calls, key=lambda call: call.number), []
                rejected = [_size_of((call, index)) for call in calls for index in _rejected_in(call)]
                topic.limit = max(1, min(self._batch, sum(rejected)) // 2)
                self._enqueue(topic, calls)
                self._send_next(name, topic)

    # -- groups --------------------------------------------------------------------------------------------

    def _enqueue(self, topic: _Topic, calls: Sequence[PublishCall]) -> None:
        """Queue the rejected messages of these calls, and those that were not produced yet."""
        produced = [(call, index) for call in calls for index in range(call.next)]
        again = set(self._to_resend(produced, [call.outcomes[index] for call, index in produced]))
        for call in calls:
            places = [
                (call, index) for index in range(len(call.messages)) if index >= call.next or (call, index) in again
            ]
            call.next = len(call.messages)
            call.left = len(places)
            topic.queue += places
            if not places:
                self._on_complete(call)

    def _to_resend(self, places: Sequence[_Place], outcomes: Sequence[Any]) -> list[_Place]:
        """The rejected messages that may be sent again, last first; fails those that a later message has overtaken."""
        again: list[_Place] = []
        written: set[bytes | int] = set()
        for place, outcome in zip(reversed(places), reversed(outcomes), strict=True):
            order = _order_of(place)
            if not isinstance(outcome, (KafkaError, BrokerError)):
                if order is not None:
                    written.add(order)
            elif _is_too_large(outcome):
                if order in written:
                    place[0].fail(place[1], _overtaken(place[0].topic))
                else:
                    again.append(place)
        return again

    def _send_next(self, name: str, topic: _Topic) -> None:
        """Send the next group, unless one is in flight."""
        if topic.group is not None:
            return
        queue, size, now = topic.queue, 0, monotonic()
        places: list[_Place] = []
        while queue:
            place = queue[0]
            if place[0].deadline < now:
                self._settle(queue.popleft(), self._late(name))
                continue
            size += _size_of(place)
            if places and size > topic.limit:
                break
            places.append(queue.popleft())
        if places:
            topic.group = Group(name, places)
            self._send(topic.group)

    def _group_complete(self, group: Group, topic: _Topic) -> None:
        """Every message of a group has an outcome."""
        topic.group = None
        places, outcomes = group.places, group.outcomes
        if len(places) == 1:
            if _is_too_large(outcomes[0]):
                topic.limit = min(topic.limit, _size_of(places[0]))
            self._settle(places[0], outcomes[0])
        else:
            again = self._to_resend(places, outcomes)
            if again:
                topic.limit = max(1, min(topic.limit, sum(map(_size_of, again))) // 2)
            topic.queue.extendleft(again)
            kept = set(again)
            for place, outcome in zip(places, outcomes, strict=True):
                if place not in kept:
                    known = place[0].outcomes[place[1]]
                    self._settle(place, known if isinstance(known, BrokerError) else outcome)
        self._send_next(group.topic, topic)

    def _settle(self, place: _Place, outcome: Any) -> None:
        call, index = place
        if isinstance(outcome, (KafkaError, BrokerError)):
            call.fail(index, outcome)
        else:
            call.outcomes[index] = outcome if call.receipts else None
        call.left -= 1
        if not call.left:
            self._on_complete(call)


class _Topic:
    """A topic with a rejected batch.

    :ivar draining: the client still has messages from before the rejection.
    :ivar calls: calls that wait for that, complete ones too, whose delivered messages must not be overtaken.
    :ivar queue: messages to send, in order.
    :ivar group: the group in flight.
    :ivar limit: bytes of a group.
    """

    __slots__ = ("calls", "draining", "group", "limit", "queue")

    def __init__(self) -> None:
        self.draining = True
        self.calls: list[PublishCall] = []
        self.queue: deque[_Place] = deque()
        self.group: Group | None = None
        self.limit = 0


def _is_too_large(outcome: object) -> bool:
    # A message that the client itself rejects as too large is a BrokerError already.
    return isinstance(outcome, KafkaError) and outcome.code() in TOO_LARGE


def _rejected_in(call: PublishCall) -> list[int]:
    return [index for index, outcome in enumerate(call.outcomes) if _is_too_large(outcome)] if call.failed else []


def _size_of(place: _Place) -> int:
    return message_size(_message(place)) + _RECORD_OVERHEAD


def _order_of(place: _Place) -> bytes | int | None:
    """The sequence in which a message keeps its order: its partition, if it names one, else its key."""
    message = _message(place)
    return message.key if message.partition is None else message.partition


def _message(place: _Place) -> OutboundMessage:
    return place[0].messages[place[1]]


def _overtaken(topic: str) -> BackendError:
    return BackendError(
        f"Publishing to {topic!r}: the batch was too large, and the broker has stored later messages of this key",
        retriable=True,
        advice="Publish the message again if it may come after those; if it is too large itself, that call says so",
    )
