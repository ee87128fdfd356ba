"""Where keys go: the partition of a key, for `bus.partition_of`, and a publish target that sends keys there.

*Concurrency.* One event loop. Calls of one target are published in the order in which they were made. *Cancellation.*
A cancelled call has published nothing while it waits for the number of partitions. *Failure.* The error of a look-up is
raised, and the next call looks again. A message that has no partition has the error as its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Final, cast

from broker.driver.contract import Backend, PublishTarget
from broker.driver.optional import PartitionsKeys
from broker.errors import BrokerError
from broker.outbound import OutboundMessage
from broker.partitioners import Partitioner, partition_by
from broker.receipts import Receipt

__all__ = ["PartitionedTarget", "Partitions"]

_KNOWN_SECONDS: Final = 30.0


class _Count:
    """The number of partitions of one topic.

    :ivar until: when it has to be read again, by `monotonic`.
    """

    __slots__ = ("lock", "number", "until")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.number = 0
        self.until = 0.0


class Partitions:
    """The numbers of partitions of a bus's topics, and the partitions of keys.

    :param backend: has a log reader.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._counts: dict[str, _Count] = {}

    async def number(self, topic: str) -> int:
        """The number of partitions of a topic, read at most 30 seconds ago.

        :raises TopicNotFound: the topic does not exist.
        """
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = _Count()
        if monotonic() < count.until:
            return count.number
        async with count.lock:
            # Another call may have read it meanwhile.
            if monotonic() >= count.until:
                asked = monotonic()
                count.number = len(await self._backend.log_reader().partitions(topic))
                count.until = asked + _KNOWN_SECONDS
        return count.number

    def forget(self, topic: str) -> None:
        """Read the number of partitions of a topic again at the next call."""
        self._counts.pop(topic, None)

    async def of_key(self, topic: str, key: bytes, partitioner: Partitioner) -> int:
        """The partition of a key.

        :raises TopicNotFound: the topic does not exist.
        :raises InvalidMessage: the function raised, or returned no partition of the topic.
        :raises Unsupported: the backend spreads this key.
        """
        number = await self.number(topic)
        if partitioner != "broker":
            return partition_by(partitioner, topic, key, number)
        # `capabilities.publish.partition_of` says that the backend has it.
        return cast("PartitionsKeys", self._backend).partition_of(topic, key, number)


class PartitionedTarget:
    """Implements `PublishTarget`: sends each message with a key and no partition to the partition of the key.

    :param partitioner: not "broker".
    """

    def __init__(self, topic: str, target: PublishTarget, partitioner: Partitioner, partitions: Partitions) -> None:
        self._topic = topic
        self._target = target
        self._partitioner: Partitioner = partitioner
        self._partitions = partitions
        self._line = asyncio.Lock()
        """Calls that wait for the number of partitions pass in order, and before later calls."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        async with self._line:
            number = await self._partitions.number(self._topic)
        placed: list[OutboundMessage] = []
        refused: dict[int, BrokerError] = {}
        for index, message in enumerate(messages):
            try:
                placed.append(self._placed(message, number))
            except BrokerError as error:
                refused[index] = error
        outcomes: Sequence[Receipt | BrokerError | None] = []
        try:
            if placed:
                outcomes = await self._target.publish(placed, receipts=receipts)
        except BrokerError:
            self._partitions.forget(self._topic)
            raise
        if any(isinstance(outcome, BrokerError) for outcome in outcomes):
            # The topic may have been recreated with fewer partitions.
            self._partitions.forget(self._topic)
        if not refused:
            return outcomes
        rest = iter(outcomes)
        return [refused[index] if index in refused else next(rest) for index in range(len(messages))]

    async def close(self) -> None:
        await self._target.close()

    def _placed(self, message: OutboundMessage, partitions: int) -> OutboundMessage:
        key = message.key
        if key is None or message.partition is not None:
            return message
        partition = partition_by(self._partitioner, self._topic, key, partitions)
        # Most messages have nothing else, and `replace` takes four times as long.
        return (
            OutboundMessage(message.data, key, partition=partition)
            if message.plain
            else message.replace(partition=partition)
        )
