"""Commits of a polling thread: sent without waiting, answered when the client is polled.

*Concurrency.* `Commits` lives in the thread that owns the client, `ThreadOffsetStore` on the loop. To wait for an
answer in the thread could wait for ever: it may depend on a rebalance, whose callback the thread has to serve. Within
a callback nothing is polled, so there commits do wait, and `settle` repeats those that are under way. *Cancellation.*
A commit that was asked for is carried out. *Failure.* Each partition has its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as NativePartition

from broker.errors import BrokerError, Closed
from broker.spi import TopicPartition
from broker_kafka.errors import not_ours, translate
from broker_kafka.offsets.arguments import check_commit
from broker_kafka.offsets.kafka import ConsumerClient, MemberOffsetStore
from broker_kafka.offsets.protocol import CommitResults, GroupMember, StoredOffset

__all__ = ["Answer", "Commits", "CommittingClient", "ThreadOffsetStore"]

Answer = Mapping[TopicPartition, BrokerError | None]


class _UnderWay:
    """A commit that was sent."""

    __slots__ = ("gone", "offsets", "positions", "waiter")

    def __init__(self, offsets: list[NativePartition], waiter: asyncio.Future[Answer], gone: Answer) -> None:
        self.offsets = offsets
        self.gone = gone
        """The answers of those that were not sent."""
        self.positions = _positions(offsets)
        self.waiter = waiter


class Commits:
    """The commits that are under way.

    :param answer: gives an answer to who waits for it, from this thread.
    """

    def __init__(self, answer: Callable[[asyncio.Future[Answer], Answer], object]) -> None:
        self._answer = answer
        self._under_way: list[_UnderWay] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def send(
        self,
        client: Consumer,
        offsets: list[NativePartition],
        waiter: asyncio.Future[Answer],
        owned: Container[tuple[str, int]],
    ) -> None:
        """Send a commit of what is owned; its answer comes while the client is polled.

        A broker takes the commit of every present member, for whatever partition.
        """
        gone = {place: not_ours(place) for place in _positions(offsets) if place not in owned}
        offsets = [each for each in offsets if (each.topic, each.partition) not in gone]
        if not offsets:
            self._answer(waiter, gone)
            return
        try:
            client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._answer(waiter, {**_failed(offsets, error), **gone})
        else:
            self._under_way.append(_UnderWay(offsets, waiter, gone))

    def send_and_wait(
        self,
        client: Consumer,
        offsets: list[NativePartition],
        waiter: asyncio.Future[Answer],
        gone: Answer = MappingProxyType({}),
    ) -> None:
        """Carry a commit out, within a callback of the client.

        :param gone: the answers of others that were asked for along with it.
        """
        try:
            answered: list[NativePartition] | None = client.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            self._answer(waiter, {**_failed(offsets, error), **gone})
        else:
            self._answer(waiter, {**_outcomes(answered or offsets), **gone})

    def settle(self, client: Consumer) -> None:
        """Repeat what is under way, waiting for the answers; at the begin of a callback that takes partitions away."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            self.send_and_wait(client, each.offsets, each.waiter, each.gone)

    def answered(self, error: KafkaError | None, partitions: list[NativePartition]) -> None:
        """The client's callback: an answer to something that was sent, or to a commit that was waited for."""
        positions = _positions(partitions)
        for each in self._under_way:
            if each.positions == positions:
                self._under_way.remove(each)
                outcomes = _outcomes(partitions)
                if error is not None and not any(outcomes.values()):
                    outcomes = _failed(partitions, error)
                self._answer(each.waiter, {**outcomes, **each.gone})
                return

    def close(self) -> None:
        """The client is closed: nothing will be answered any more."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            closed = dict.fromkeys(_positions(each.offsets), Closed("The consumer was closed"))
            self._answer(each.waiter, {**closed, **each.gone})


class CommittingClient(ConsumerClient, Protocol):
    """The thread, as the store sees it."""

    async def commit(self, offsets: list[NativePartition]) -> Answer: ...


class ThreadOffsetStore(MemberOffsetStore):
    """Kafka's own offsets of the group that a thread's client is a member of."""

    def __init__(self, thread: CommittingClient, *, timeout: float) -> None:
        super().__init__(thread, timeout=timeout)
        self._thread = thread

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        """Kafka takes positions in either direction, with and without `rewind`."""
        check_commit(owner, positions)
        if not positions:
            return {}
        answer = await self._thread.commit(
            [NativePartition(*place, position.offset, position.metadata) for place, position in positions.items()]
        )
        missing = BrokerError("The broker did not answer for this partition", retriable=True)
        return await self._told_apart(owner, positions, {place: answer.get(place, missing) for place in positions})


def _positions(offsets: Sequence[Any]) -> dict[TopicPartition, int]:
    return {TopicPartition(each.topic, each.partition): each.offset for each in offsets}


def _outcomes(answered: Sequence[Any]) -> dict[TopicPartition, BrokerError | None]:
    return {
        TopicPartition(each.topic, each.partition): (
            None
            if each.error is None
            else translate(each.error, f"Committing {each.offset} of {each.topic!r}[{each.partition}]")
        )
        for each in answered
    }


def _failed(offsets: Sequence[Any], error: KafkaError | BaseException) -> dict[TopicPartition, BrokerError | None]:
    return {place: translate(error, "Committing", resources=[place.topic]) for place in _positions(offsets)}
