"""`CommitQueue`: the commits of a polling thread, sent without waiting and answered when the client is polled.

*Order.* librdkafka repeats a commit on its own when the coordinator was away; a newer commit may then come first and be
undone. So one commit of each partition is in flight at a time. Commits that are requested meanwhile wait, the newest
position of each partition alone, and its answer goes to all who requested one.

*Concurrency.* In the thread that owns the client. Waiting for an answer in the thread could last forever: the answer
may depend on a rebalance, whose callback the thread has to serve. Within a callback nothing is polled, so there commits
do wait for their answers, and `settle` repeats those in flight. Positions that may be undone by an overtaken commit are
committed once more later. *Cancellation.* A requested commit is carried out, or a newer one of its partition instead.
*Failure.* Each partition has its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, Closed, TopicPartition
from broker_kafka.errors import is_partition_error, not_assigned, translate

__all__ = ["Answer", "CommitQueue"]

Answer = Mapping[TopicPartition, BrokerError | None]

_POLL: Final = 0.01
_LAST_SECONDS: Final = 1.0


class _Request:
    """A call that waits for the commits of some partitions; several commits may answer it."""

    __slots__ = ("answer", "missing", "waiter")

    def __init__(
        self,
        waiter: asyncio.Future[Answer],
        places: Iterable[TopicPartition],
        refused: Mapping[TopicPartition, BrokerError],
    ) -> None:
        self.waiter = waiter
        self.missing = set(places)
        self.answer: dict[TopicPartition, BrokerError | None] = {**refused}


class _Pending(NamedTuple):
    """The position to store of a partition, and the requests that its answer goes to.

    :ivar alone: sent in a commit of its own.
    """

    offset: NativePartition
    requests: list[_Request]
    alone: bool = False

    def replacing(self, older: _Pending | None) -> _Pending:
        """This position in place of an older one."""
        return self if older is None else _Pending(self.offset, [*older.requests, *self.requests], self.alone)


class _Sent:
    """A commit in flight.

    :ivar restored: overtaken positions that it stores again, with these or newer ones.
    :ivar repeated: those of them that it stores unchanged.
    """

    __slots__ = ("pending", "positions", "repeated", "restored")

    def __init__(
        self, pending: dict[TopicPartition, _Pending], restored: dict[TopicPartition, NativePartition]
    ) -> None:
        self.positions = {place: each.offset.offset for place, each in pending.items()}
        self.pending = pending
        self.restored = restored
        self.repeated = {place for place, offset in restored.items() if offset is pending[place].offset}


class CommitQueue:
    """The commits in flight, and those that wait.

    :param group: named in errors.
    :param answer: resolves the future of a request, from this thread.

    :ivar due: whether `go_on` has something to send.
    """

    def __init__(self, group: str, answer: Callable[[asyncio.Future[Answer], Answer], object]) -> None:
        self._group = group
        self._answer = answer
        self._sent: list[_Sent] = []
        self._waiting: dict[TopicPartition, _Pending] = {}
        self._overtaken: dict[TopicPartition, NativePartition] = {}
        """Positions that were stored while an older commit was in flight, which may undo them."""
        self.due = False

    def __len__(self) -> int:
        return len(self._sent) + len(self._waiting)

    def send(
        self,
        client: Consumer,
        offsets: list[NativePartition],
        waiter: asyncio.Future[Answer],
        *,
        owned: Container[tuple[str, int]] | None,
        wait: bool,
    ) -> None:
        """Send a commit; the answer comes when the client is polled, or at once if nothing is to be sent.

        :param owned: the assigned partitions, the others are refused; None for all.
        :param wait: return with the answer, as a callback of the client must.
        """
        ours, refused = (offsets, {}) if owned is None else _split_owned(offsets, owned, self._group)
        if not ours:
            self._answer(waiter, refused)
            return
        pending = {TopicPartition(each.topic, each.partition): each for each in ours}
        request = _Request(waiter, pending, refused)
        for place, offset in pending.items():
            self._waiting[place] = _Pending(offset, [request]).replacing(self._waiting.get(place))
        if wait:
            self._wait_for(client, {place: self._waiting.pop(place) for place in pending})
        else:
            self.go_on(client)

    def go_on(self, client: Consumer) -> None:
        """Send what waits of partitions without a commit in flight."""
        self.due = False
        busy = self._busy()
        free = {place: each for place, each in self._waiting.items() if place not in busy}
        if not free:
            return
        for place in free:
            del self._waiting[place]
        together = {place: each for place, each in free.items() if not each.alone}
        for pending in (together, *({place: each} for place, each in free.items() if each.alone)):
            if pending:
                self._send(client, pending)

    def settle(self, client: Consumer) -> None:
        """Repeat what is in flight or waits, and wait for it; at the start of a callback that revokes partitions."""
        pending: dict[TopicPartition, _Pending] = {}
        for sent in self._sent:
            pending |= sent.pending
            sent.pending = {}
        for place in pending.keys() & self._overtaken.keys():
            pending[place] = _Pending(self._overtaken[place], []).replacing(pending[place])
        for place, each in self._waiting.items():
            pending[place] = each.replacing(pending.get(place))
        self._waiting.clear()
        if pending:
            self._wait_for(client, pending)

    def answered(self, error: KafkaError | None, partitions: list[NativePartition]) -> None:
        """The client's callback: a sent commit was answered. It is not called for commits that were waited for."""
        positions = _positions(partitions)
        sent = next((each for each in self._sent if each.positions == positions), None)
        if sent is None:
            return
        self._sent.remove(sent)
        outcomes = self._outcomes(partitions)
        if error is not None and not any(outcomes.values()):
            outcomes = self._failed(partitions, error)
        # The client reports the error of one partition as that of all.
        singly = len(sent.pending) > 1 and all(map(is_partition_error, outcomes.values()))
        # Stored after this was sent: the positions of this commit must not be sent again.
        stored = dict(self._overtaken)
        for place, offset in sent.restored.items():
            refusal = outcomes.get(place)
            if refusal is not None and (singly or refusal.retriable or place not in sent.repeated):
                self._overtaken.setdefault(place, offset)
        if singly:
            for place, each in sent.pending.items():
                newer = self._waiting.get(place)
                alone = _Pending(stored.get(place, each.offset), each.requests, alone=True)
                self._waiting[place] = alone if newer is None else newer.replacing(each)
        else:
            self._answer_requests(sent.pending, outcomes)
        self._restore_overtaken()

    def drop(self, places: Iterable[TopicPartition]) -> None:
        """These are not assigned any more: nothing of them may be sent in a later assignment."""
        for place in places:
            for offsets in (*(sent.restored for sent in self._sent), self._overtaken):
                offsets.pop(place, None)
            for pending in (*(sent.pending for sent in self._sent), self._waiting):
                each = pending.pop(place, None)
                if each is not None:
                    self._answer_requests({place: each}, {place: not_assigned(place, self._group)})

    def finish(self, client: Consumer) -> None:
        """Poll until nothing waits, for a second at most: a client that closes completes only what was sent."""
        until = monotonic() + _LAST_SECONDS
        while self._waiting and monotonic() < until:
            client.poll(_POLL)
            self.go_on(client)

    def close(self) -> None:
        """The client is closed, and answers nothing any more."""
        sent, self._sent = self._sent, []
        waiting, self._waiting = self._waiting, {}
        for pending in (*(each.pending for each in sent), waiting):
            self._answer_requests(pending, dict.fromkeys(pending, Closed("The consumer was closed")))

    def _busy(self) -> set[TopicPartition]:
        return {place for sent in self._sent for place in sent.positions}

    def _send(self, client: Consumer, pending: dict[TopicPartition, _Pending]) -> None:
        offsets = [each.offset for each in pending.values()]
        try:
            client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._answer_requests(pending, self._failed(offsets, error))
        else:
            restored = {place: self._overtaken.pop(place) for place in pending if place in self._overtaken}
            self._sent.append(_Sent(pending, restored))

    def _wait_for(self, client: Consumer, pending: dict[TopicPartition, _Pending]) -> None:
        older = self._busy()
        outcomes = self._committed(client, pending)
        for place, each in pending.items():
            if outcomes.get(place) is None:
                self._overtaken.pop(place, None)
                if place in older:
                    self._overtaken[place] = each.offset
        self._answer_requests(pending, outcomes)
        self._restore_overtaken()

    def _restore_overtaken(self) -> None:
        """Queue the overtaken positions once the older commits are answered."""
        for place in self._overtaken.keys() - self._waiting.keys() - self._busy():
            self._waiting[place] = _Pending(self._overtaken[place], [])
        self.due = bool(self._waiting)

    def _committed(
        self, client: Consumer, pending: dict[TopicPartition, _Pending]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        offsets = [each.offset for each in pending.values()]
        try:
            answered: list[NativePartition] | None = client.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            outcomes = self._failed(offsets, error)
            if len(pending) == 1 or not all(map(is_partition_error, outcomes.values())):
                return outcomes
            singly = [self._committed(client, {place: each}) for place, each in pending.items()]
            return {place: outcome for each in singly for place, outcome in each.items()}
        return self._outcomes(answered or offsets)

    def _answer_requests(
        self, pending: Mapping[TopicPartition, _Pending], outcomes: Mapping[TopicPartition, BrokerError | None]
    ) -> None:
        for place, each in pending.items():
            for request in each.requests:
                request.missing.discard(place)
                if place in outcomes:
                    request.answer[place] = outcomes[place]
                if not request.missing:
                    self._answer(request.waiter, request.answer)

    def _outcomes(self, answered: Sequence[Any]) -> dict[TopicPartition, BrokerError | None]:
        return {
            TopicPartition(each.topic, each.partition): None if each.error is None else self._refusal(each, each.error)
            for each in answered
        }

    def _failed(
        self, offsets: Sequence[Any], error: KafkaError | BaseException
    ) -> dict[TopicPartition, BrokerError | None]:
        return {TopicPartition(each.topic, each.partition): self._refusal(each, error) for each in offsets}

    def _refusal(self, at: Any, error: KafkaError | BaseException) -> BrokerError:
        return translate(error, f"Committing {at.offset} of {at.topic!r}[{at.partition}] for group {self._group!r}")


def _split_owned(
    offsets: Iterable[NativePartition], owned: Container[tuple[str, int]], group: str
) -> tuple[list[NativePartition], dict[TopicPartition, BrokerError]]:
    """The assigned partitions of a commit, and the refusal of the others: brokers take any partition from a member."""
    ours: list[NativePartition] = []
    refused: dict[TopicPartition, BrokerError] = {}
    for each in offsets:
        place = TopicPartition(each.topic, each.partition)
        if place in owned:
            ours.append(each)
        else:
            refused[place] = not_assigned(place, group)
    return ours, refused


def _positions(offsets: Sequence[Any]) -> dict[TopicPartition, int]:
    return {TopicPartition(each.topic, each.partition): each.offset for each in offsets}
