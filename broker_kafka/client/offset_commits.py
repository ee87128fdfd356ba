"""Commits of a polling thread: sent without waiting, answered when the client is polled.

*Order.* librdkafka carries a commit out again on its own when the coordinator was away, and then one that is newer may
come first and be undone. So of each partition one commit is under way at a time. What is asked for meanwhile is held,
the newest position of each partition alone, and its answer is that of all who asked. *Concurrency.* `Commits` lives in
the thread that owns the client, `ThreadOffsetStore` on the loop. To wait for an answer in the thread could wait for
ever: it may depend on a rebalance, whose callback the thread has to serve. Within a callback nothing is polled, so
there commits do wait, and `settle` repeats those that are under way. What they overtake by that is put right later.
*Cancellation.* A commit that was asked for is carried out, or a newer one of its partition instead. *Failure.* Each
partition has its own answer.
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

__all__ = ["Answer", "Commits", "split_owned"]

Answer = Mapping[TopicPartition, BrokerError | None]

_POLL: Final = 0.01
_LAST_SECONDS: Final = 1.0


class _Asked:
    """Who waits for the commit of some partitions; several requests may answer."""

    __slots__ = ("answer", "open", "waiter")

    def __init__(
        self,
        waiter: asyncio.Future[Answer],
        places: Iterable[TopicPartition],
        refused: Mapping[TopicPartition, BrokerError],
    ) -> None:
        self.waiter = waiter
        self.open = set(places)
        self.answer: dict[TopicPartition, BrokerError | None] = {**refused}


class _Wish(NamedTuple):
    """The position that a partition is to have, and who is told of it.

    :ivar alone: it is sent in a request of its own.
    """

    offset: NativePartition
    askers: list[_Asked]
    alone: bool = False

    def after(self, older: _Wish | None) -> _Wish:
        """This instead of an older one."""
        return self if older is None else _Wish(self.offset, [*older.askers, *self.askers], self.alone)


class _Sent:
    """A request that the client has not answered through its callback."""

    __slots__ = ("mends", "positions", "repairs", "wishes")

    def __init__(self, wishes: dict[TopicPartition, _Wish], mends: dict[TopicPartition, NativePartition]) -> None:
        self.positions = {place: wish.offset.offset for place, wish in wishes.items()}
        self.repairs = {place for place, offset in mends.items() if offset is wishes[place].offset}
        self.wishes = wishes
        self.mends = mends
        """The positions that it puts right, with these or newer ones."""


class Commits:
    """The commits that are under way or held.

    :param group: whose positions they are; errors name it.
    :param answer: gives an answer to who waits for it, from this thread.

    :ivar due: whether `go_on` has something to send.
    """

    def __init__(self, group: str, answer: Callable[[asyncio.Future[Answer], Answer], object]) -> None:
        self._group = group
        self._answer = answer
        self._sent: list[_Sent] = []
        self._held: dict[TopicPartition, _Wish] = {}
        self._overtaken: dict[TopicPartition, NativePartition] = {}
        """Positions that were waited for while an older commit was under way, which may undo them."""
        self.due = False

    def __len__(self) -> int:
        return len(self._sent) + len(self._held)

    def send(
        self,
        client: Consumer,
        offsets: list[NativePartition],
        waiter: asyncio.Future[Answer],
        *,
        owned: Container[tuple[str, int]] | None,
        wait: bool,
    ) -> None:
        """Send a commit; its answer comes while the client is polled, or at once if it is of nothing.

        :param owned: what is ours: the rest is refused; None if all is.
        :param wait: have it answered on return, as it must be within a callback of the client.
        """
        ours, refused = (offsets, {}) if owned is None else split_owned(offsets, owned, self._group)
        if not ours:
            self._answer(waiter, refused)
            return
        wishes = {TopicPartition(each.topic, each.partition): each for each in ours}
        asked = _Asked(waiter, wishes, refused)
        for place, offset in wishes.items():
            self._held[place] = _Wish(offset, [asked]).after(self._held.get(place))
        if wait:
            self._wait_for(client, {place: self._held.pop(place) for place in wishes})
        else:
            self.go_on(client)

    def go_on(self, client: Consumer) -> None:
        """Send what is held of partitions that have nothing under way."""
        self.due = False
        busy = self._busy()
        free = {place: wish for place, wish in self._held.items() if place not in busy}
        if not free:
            return
        for place in free:
            del self._held[place]
        together = {place: wish for place, wish in free.items() if not wish.alone}
        for wishes in (together, *({place: wish} for place, wish in free.items() if wish.alone)):
            if wishes:
                self._send(client, wishes)

    def settle(self, client: Consumer) -> None:
        """Repeat what is under way or held, waiting for it; at the begin of a callback that takes partitions away."""
        wishes: dict[TopicPartition, _Wish] = {}
        for sent in self._sent:
            wishes |= sent.wishes
            sent.wishes = {}
        for place in wishes.keys() & self._overtaken.keys():
            wishes[place] = _Wish(self._overtaken[place], []).after(wishes[place])
        for place, wish in self._held.items():
            wishes[place] = wish.after(wishes.get(place))
        self._held.clear()
        if wishes:
            self._wait_for(client, wishes)

    def answered(self, error: KafkaError | None, partitions: list[NativePartition]) -> None:
        """The client's callback: an answer to something that was sent; of what was waited for it tells nothing."""
        positions = _positions(partitions)
        sent = next((each for each in self._sent if each.positions == positions), None)
        if sent is None:
            return
        self._sent.remove(sent)
        outcomes = self._outcomes(partitions)
        if error is not None and not any(outcomes.values()):
            outcomes = self._failed(partitions, error)
        # The client tells one partition's error as that of all.
        singly = len(sent.wishes) > 1 and all(map(is_partition_error, outcomes.values()))
        # Stored since this was sent, so that nothing of it may be sent again.
        stored = dict(self._overtaken)
        for place, offset in sent.mends.items():
            refusal = outcomes.get(place)
            if refusal is not None and (singly or refusal.retriable or place not in sent.repairs):
                self._overtaken.setdefault(place, offset)
        if singly:
            for place, wish in sent.wishes.items():
                newer = self._held.get(place)
                alone = _Wish(stored.get(place, wish.offset), wish.askers, alone=True)
                self._held[place] = alone if newer is None else newer.after(wish)
        else:
            self._tell(sent.wishes, outcomes)
        self._put_right()

    def drop(self, places: Iterable[TopicPartition]) -> None:
        """These are not ours any more: nothing of them may be sent, or repeated, in a later assignment."""
        for place in places:
            for offsets in (*(sent.mends for sent in self._sent), self._overtaken):
                offsets.pop(place, None)
            for wishes in (*(sent.wishes for sent in self._sent), self._held):
                wish = wishes.pop(place, None)
                if wish is not None:
                    self._tell({place: wish}, {place: not_assigned(place, self._group)})

    def finish(self, client: Consumer) -> None:
        """Poll until nothing is held, for a second at most; a client that is closed carries out only what was sent."""
        until = monotonic() + _LAST_SECONDS
        while self._held and monotonic() < until:
            client.poll(_POLL)
            self.go_on(client)

    def close(self) -> None:
        """The client is closed: nothing will be answered any more."""
        sent, self._sent = self._sent, []
        held, self._held = self._held, {}
        for wishes in (*(each.wishes for each in sent), held):
            self._tell(wishes, dict.fromkeys(wishes, Closed("The consumer was closed")))

    def _busy(self) -> set[TopicPartition]:
        return {place for sent in self._sent for place in sent.positions}

    def _send(self, client: Consumer, wishes: dict[TopicPartition, _Wish]) -> None:
        offsets = [wish.offset for wish in wishes.values()]
        try:
            client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._tell(wishes, self._failed(offsets, error))
        else:
            mends = {place: self._overtaken.pop(place) for place in wishes if place in self._overtaken}
            self._sent.append(_Sent(wishes, mends))

    def _wait_for(self, client: Consumer, wishes: dict[TopicPartition, _Wish]) -> None:
        older = self._busy()
        outcomes = self._committed(client, wishes)
        for place, wish in wishes.items():
            if outcomes.get(place) is None:
                self._overtaken.pop(place, None)
                if place in older:
                    self._overtaken[place] = wish.offset
        self._tell(wishes, outcomes)
        self._put_right()

    def _put_right(self) -> None:
        """Hold what was overtaken by commits that are answered by now."""
        for place in self._overtaken.keys() - self._held.keys() - self._busy():
            self._held[place] = _Wish(self._overtaken[place], [])
        self.due = bool(self._held)

    def _committed(
        self, client: Consumer, wishes: dict[TopicPartition, _Wish]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        offsets = [wish.offset for wish in wishes.values()]
        try:
            answered: list[NativePartition] | None = client.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            outcomes = self._failed(offsets, error)
            if len(wishes) == 1 or not all(map(is_partition_error, outcomes.values())):
                return outcomes
            singly = [self._committed(client, {place: wish}) for place, wish in wishes.items()]
            return {place: outcome for each in singly for place, outcome in each.items()}
        return self._outcomes(answered or offsets)

    def _tell(
        self, wishes: Mapping[TopicPartition, _Wish], outcomes: Mapping[TopicPartition, BrokerError | None]
    ) -> None:
        for place, wish in wishes.items():
            for asked in wish.askers:
                asked.open.discard(place)
                if place in outcomes:
                    asked.answer[place] = outcomes[place]
                if not asked.open:
                    self._answer(asked.waiter, asked.answer)

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


def split_owned(
    offsets: Iterable[NativePartition], owned: Container[tuple[str, int]], group: str
) -> tuple[list[NativePartition], dict[TopicPartition, BrokerError]]:
    """Those of a commit that are ours, and the refusal of the others: a broker takes any of a present member."""
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
