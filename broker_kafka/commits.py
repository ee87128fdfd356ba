"""Commits of a polling thread: sent without waiting, answered when the client is polled.

*Concurrency.* `Commits` lives in the thread that owns the client, `ThreadOffsetStore` on the loop. To wait for an
answer in the thread could wait for ever: it may depend on a rebalance, whose callback the thread has to serve. Within
a callback nothing is polled, so there commits do wait, and `settle` repeats those that are under way. *Cancellation.*
A commit that was asked for is carried out. *Failure.* Each partition has its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as NativePartition

from broker.errors import BrokerError, Closed
from broker.spi import TopicPartition
from broker_kafka.errors import not_ours, translate
from broker_kafka.offsets.arguments import check_commit
from broker_kafka.offsets.kafka import ConsumerClient, MemberOffsetStore
from broker_kafka.offsets.protocol import CommitResults, GroupMember, StoredOffset

__all__ = ["Answer", "Commits", "CommittingClient", "ThreadOffsetStore", "split_owned"]

Answer = Mapping[TopicPartition, BrokerError | None]


class _UnderWay:
    """A commit that was sent."""

    __slots__ = ("offsets", "positions", "waiter")

    def __init__(self, offsets: list[NativePartition], waiter: asyncio.Future[Answer]) -> None:
        self.offsets = offsets
        self.positions = _positions(offsets)
        self.waiter = waiter


class Commits:
    """The commits that are under way.

    :param group: whose positions they are; errors name it.
    :param answer: gives an answer to who waits for it, from this thread.
    """

    def __init__(self, group: str, answer: Callable[[asyncio.Future[Answer], Answer], object]) -> None:
        self._group = group
        self._answer = answer
        self._under_way: list[_UnderWay] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def send(
        self, client: Consumer, offsets: list[NativePartition], waiter: asyncio.Future[Answer], *, wait: bool
    ) -> None:
        """Send a commit; its answer comes while the client is polled, or at once if it is of nothing.

        :param wait: have it answered on return, as it must be within a callback of the client.
        """
        if not offsets:
            self._answer(waiter, {})
            return
        if wait:
            self._send_and_wait(client, offsets, waiter)
            return
        try:
            client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._answer(waiter, self._failed(offsets, error))
        else:
            self._under_way.append(_UnderWay(offsets, waiter))

    def _send_and_wait(self, client: Consumer, offsets: list[NativePartition], waiter: asyncio.Future[Answer]) -> None:
        try:
            answered: list[NativePartition] | None = client.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            self._answer(waiter, self._failed(offsets, error))
        else:
            self._answer(waiter, self._outcomes(answered or offsets))

    def settle(self, client: Consumer) -> None:
        """Repeat what is under way, waiting for the answers; at the begin of a callback that takes partitions away."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            self._send_and_wait(client, each.offsets, each.waiter)

    def answered(self, error: KafkaError | None, partitions: list[NativePartition]) -> None:
        """The client's callback: an answer to something that was sent, or to a commit that was waited for."""
        positions = _positions(partitions)
        for each in self._under_way:
            if each.positions == positions:
                self._under_way.remove(each)
                outcomes = self._outcomes(partitions)
                if error is not None and not any(outcomes.values()):
                    outcomes = self._failed(partitions, error)
                self._answer(each.waiter, outcomes)
                return

    def close(self) -> None:
        """The client is closed: nothing will be answered any more."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            self._answer(each.waiter, dict.fromkeys(_positions(each.offsets), Closed("The consumer was closed")))

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


def split_owned(
    offsets: Iterable[NativePartition], owned: Container[tuple[str, int]]
) -> tuple[list[NativePartition], dict[TopicPartition, BrokerError]]:
    """Those of a commit that are ours, and the refusal of the others: a broker takes any of a present member."""
    ours: list[NativePartition] = []
    refused: dict[TopicPartition, BrokerError] = {}
    for each in offsets:
        place = TopicPartition(each.topic, each.partition)
        if place in owned:
            ours.append(each)
        else:
            refused[place] = not_ours(place)
    return ours, refused


def _positions(offsets: Sequence[Any]) -> dict[TopicPartition, int]:
    return {TopicPartition(each.topic, each.partition): each.offset for each in offsets}
