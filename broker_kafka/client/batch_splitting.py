"""What follows when a broker refuses a batch as too large for its topic: only what is too large by itself fails.

The client fails all messages of such a batch alike, also those whose neighbour was too large, or that were too many. So
from its first refusal on, a topic's messages are given to the client in groups, one at a time: a group that is refused
is sent again in halves, down to single messages, and the refusal of a single message is its own. Topics whose
`max.message.bytes` is below the client's `batch.size` stay fast enough with it: a group for each round trip, of half of
what they take, at least.

*Order.* A group begins when the one before has all its outcomes, so nothing overtakes. At a topic's first refusal later
messages may be with the client already, which delivers them all the same. What was refused is not sent behind a later
message of its key, or of the partition that both name: it fails as retriable. It may come behind messages of other
keys; what has no key has no order. *Concurrency.* All of it lives in the producer's thread; nothing here raises,
because delivery reports call it. *Failure.* Each message has its own outcome.
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

_RECORD: Final = 24
"""Bytes of a record beside its key, body and attributes, about."""

_Place = tuple[PublishCall, int]
"""A message: its call, and its index there."""


class Group(PublishCall):
    """Messages of any calls for one topic, which are with the client alone.

    :ivar places: where its messages come from.
    """

    __slots__ = ("places",)

    def __init__(self, topic: str, places: Sequence[_Place]) -> None:
        messages = [call.messages[index] for call, index in places]
        super().__init__(topic, messages, None, receipts=True, deadline=places[-1][0].deadline)
        self.places = places


class _Topic:
    """A topic of which a batch was refused.

    :ivar draining: what the client had of it when that happened is still under way.
    :ivar calls: those that wait for this; finished ones too, since what they have written must not be overtaken.
    :ivar queue: messages to be sent, in their order.
    :ivar group: what is on its way.
    :ivar limit: the bytes of a group.
    """

    __slots__ = ("calls", "draining", "group", "limit", "queue")

    def __init__(self) -> None:
        self.draining = True
        self.calls: list[PublishCall] = []
        self.queue: deque[_Place] = deque()
        self.group: Group | None = None
        self.limit = 0


class Splitting:
    """:param send: gives a group to the client.
    :param ended: is given each call when all of its messages have their outcomes.
    :param late: the error of a message whose time was over before it was sent.
    :param batch: the most bytes of a batch of the client. A group of less is one batch for each partition, so that
        nothing of it is written behind what is refused; unless the thread stands still while it is handed over.
    """

    def __init__(
        self,
        send: Callable[[PublishCall], object],
        ended: Callable[[PublishCall], object],
        late: Callable[[str], BrokerError],
        *,
        batch: int,
    ) -> None:
        self._send = send
        self._ended = ended
        self._late = late
        self._batch = batch
        self.topics: dict[str, _Topic] = {}
        """The topics of which a batch was refused; nothing else here is to be called while there are none."""
        self.draining = 0
        """How many of them drain."""

    def failed(self, topic: str, error: KafkaError | BrokerError) -> None:
        """A message failed; if its batch was too large, the topic is sent in groups from now on."""
        if topic not in self.topics and _is_too_large(error):
            self.topics[topic] = _Topic()
            self.draining += 1

    def takes(self, call: PublishCall) -> bool:
        """Whether this call, which is to be produced, is sent in groups instead."""
        topic = self.topics.get(call.topic)
        if topic is None or isinstance(call, Group):
            return False
        if topic.draining:
            topic.calls.append(call)
        else:
            self._enqueue(topic, [call])
            self._next(call.topic, topic)
        return True

    def keeps(self, call: PublishCall) -> bool:
        """Whether this call, all of whose messages have outcomes, is not over yet."""
        topic = self.topics.get(call.topic)
        if topic is None:
            return False
        if isinstance(call, Group):
            self._answered(call, topic)
            return True
        if topic.draining:
            topic.calls.append(call)
        return topic.draining

    def drain(self, reports: Reports, backlog: deque[PublishCall]) -> None:
        """Begin with groups of the topics of which the client has nothing left; takes their calls from the backlog."""
        for name, topic in self.topics.items():
            if topic.draining and not reports.waits_for(name):
                topic.draining = False
                self.draining -= 1
                topic.calls += [call for call in backlog if call.topic == name]
                others = [call for call in backlog if call.topic != name]
                backlog.clear()
                backlog.extend(others)
                calls, topic.calls = sorted(topic.calls, key=lambda call: call.number), []
                refused = [_size_of((call, index)) for call in calls for index in _refused_of(call)]
                topic.limit = max(1, min(self._batch, sum(refused)) // 2)
                self._enqueue(topic, calls)
                self._next(name, topic)

    # -- inside --------------------------------------------------------------------------------------------

    def _enqueue(self, topic: _Topic, calls: Sequence[PublishCall]) -> None:
        """What was refused of these calls, and what was not given to the client, is to be sent."""
        produced = [(call, index) for call in calls for index in range(call.next)]
        again = set(self._not_overtaken(produced, [call.outcomes[index] for call, index in produced]))
        for call in calls:
            places = [
                (call, index) for index in range(len(call.messages)) if index >= call.next or (call, index) in again
            ]
            call.next = len(call.messages)
            call.left = len(places)
            topic.queue += places
            if not places:
                self._ended(call)

    def _not_overtaken(self, places: Sequence[_Place], outcomes: Sequence[Any]) -> list[_Place]:
        """Those that were refused and may be sent again, the last first; the others of them fail."""
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

    def _next(self, name: str, topic: _Topic) -> None:
        """Send the next group, unless one is on its way."""
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

    def _answered(self, group: Group, topic: _Topic) -> None:
        """All of a group have their outcomes."""
        topic.group = None
        places, outcomes = group.places, group.outcomes
        if len(places) == 1:
            if _is_too_large(outcomes[0]):
                topic.limit = min(topic.limit, _size_of(places[0]))
            self._settle(places[0], outcomes[0])
        else:
            again = self._not_overtaken(places, outcomes)
            if again:
                topic.limit = max(1, min(topic.limit, sum(map(_size_of, again))) // 2)
            topic.queue.extendleft(again)
            kept = set(again)
            for place, outcome in zip(places, outcomes, strict=True):
                if place not in kept:
                    told = place[0].outcomes[place[1]]
                    self._settle(place, told if isinstance(told, BrokerError) else outcome)
        self._next(group.topic, topic)

    def _settle(self, place: _Place, outcome: Any) -> None:
        call, index = place
        if isinstance(outcome, (KafkaError, BrokerError)):
            call.fail(index, outcome)
        else:
            call.outcomes[index] = outcome if call.receipts else None
        call.left -= 1
        if not call.left:
            self._ended(call)


def _is_too_large(outcome: object) -> bool:
    # What the client itself found too large is a BrokerError already.
    return isinstance(outcome, KafkaError) and outcome.code() in TOO_LARGE


def _refused_of(call: PublishCall) -> list[int]:
    return [index for index, outcome in enumerate(call.outcomes) if _is_too_large(outcome)] if call.failed else []


def _size_of(place: _Place) -> int:
    return message_size(_message(place)) + _RECORD


def _order_of(place: _Place) -> bytes | int | None:
    """What a message must not overtake, or be overtaken by: others of its partition, if it names one, or of its key."""
    message = _message(place)
    return message.key if message.partition is None else message.partition


def _message(place: _Place) -> OutboundMessage:
    return place[0].messages[place[1]]


def _overtaken(topic: str) -> BackendError:
    return BackendError(
        f"Publishing to {topic!r}: the broker refused its batch as too large, and has taken later messages of its key",
        retriable=True,
        advice="Publish it again if it may come behind those; what is too large by itself is told so then",
    )
