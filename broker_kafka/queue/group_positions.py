"""`GroupPositions`: whether the group of a message's readers has committed a position behind it.

A worker writes the START of a message first and commits its position then. If it dies in between, the log hands the
message out to another, and a tracker that sent it again would double it. *Concurrency.* Used on the loop; questions
are asked for all partitions of a group at once. *Failure.* What the brokers do not tell counts as not committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Final

from confluent_kafka import TopicPartition as NativePartition

from broker.errors import BrokerError
from broker.hooks import logger
from broker.spi import TopicPartition
from broker_kafka.admin_requests import committed
from broker_kafka.connection import Connection
from broker_kafka.queue.wire import MessageId

__all__ = ["GroupPositions"]

_AGE: Final = 0.5
"""Seconds for which an answer is not asked for again. One that says that a position is behind a message stays true."""


class GroupPositions:
    """:param subscription: the group of messages whose markers name no queue."""

    def __init__(self, connection: Connection, subscription: str) -> None:
        self._connection = connection
        self._subscription = subscription
        self._known: dict[tuple[str, TopicPartition], tuple[int, float]] = {}

    async def behind(self, messages: Iterable[MessageId]) -> set[MessageId]:
        """Those of the messages that the readers' position has passed; V1's, which name no topic, count as passed."""
        found: set[MessageId] = set()
        waiting: dict[str, dict[TopicPartition, list[MessageId]]] = {}
        now = monotonic()
        for message in messages:
            group, place = self._place(message)
            position, until = self._known.get((group, place), (-1, 0.0))
            if not message.topic or position > message.offset:
                found.add(message)
            elif until < now:
                waiting.setdefault(group, {}).setdefault(place, []).append(message)
        for group, places in waiting.items():
            await self._ask(group, list(places))
            for place, asked in places.items():
                position = self._known[group, place][0]
                found.update([message for message in asked if position > message.offset])
        return found

    def _place(self, message: MessageId) -> tuple[str, TopicPartition]:
        return message.queue or self._subscription, TopicPartition(message.topic, message.partition)

    async def _ask(self, group: str, places: list[TopicPartition]) -> None:
        answer = await committed(self._connection, group, [NativePartition(*place) for place in places])
        until = monotonic() + _AGE
        for place in places:
            self._known[group, place] = -1, until
        if isinstance(answer, BrokerError):
            logger.info("The positions of group %r are asked for again: %s", group, answer)
            return
        for each in answer:
            if each.error is None:
                self._known[group, TopicPartition(each.topic, each.partition)] = each.offset, until
