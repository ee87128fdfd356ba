"""How partitions are given to a client, taken from it and moved, whichever way its group rebalances.

Incremental groups name what changes, the others all there is. Used in the thread that owns the client, also within its
callbacks. What the client refuses is raised as its KafkaException.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as NativePartition

from broker.errors import LeaseLost
from broker.spi import TopicPartition
from broker_kafka.consumer_host import native_partitions
from broker_kafka.errors import not_ours

__all__ = ["ClientAssignment"]


class ClientAssignment:
    """:param config: of the client."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._incremental = _is_incremental(config)
        self._group = str(config["group.id"])

    def add(self, client: Consumer, partitions: list[NativePartition]) -> None:
        """Read these, from the positions that they name."""
        if self._incremental:
            client.incremental_assign(partitions)
        else:
            client.assign(partitions)

    def remove(self, client: Consumer, partitions: list[NativePartition]) -> None:
        """Read these no more."""
        if self._incremental:
            # Those whose positions were not found were never read, and the client subtracts nothing that is not there.
            there = {(each.topic, each.partition) for each in client.assignment()}
            client.incremental_unassign([each for each in partitions if (each.topic, each.partition) in there])
        else:
            client.unassign()

    def move(
        self, client: Consumer, positions: Mapping[TopicPartition, int], owned: Collection[tuple[str, int]]
    ) -> tuple[list[TopicPartition], KafkaException | LeaseLost | None]:
        """Read partitions from other positions; which were moved, and why others were not."""
        moved: list[TopicPartition] = []
        failed: KafkaException | LeaseLost | None = None
        for partition, position in positions.items():
            try:
                self._move(client, NativePartition(*partition, position), owned)
            except KafkaException as error:
                # One that goes away meanwhile has nothing to be moved, and is no trouble of those that stay.
                failed = error if partition in owned else failed or not_ours(partition, self._group)
            else:
                moved.append(partition)
        return moved, failed

    def _move(self, client: Consumer, to: NativePartition, owned: Collection[tuple[str, int]]) -> None:
        try:
            client.seek(to)
        except KafkaException as error:
            place = (to.topic, to.partition)
            if error.args[0].code() != KafkaError._STATE or place not in owned:
                raise
            # After an error of its position a partition does not move, but can be taken over anew.
            if self._incremental:
                client.incremental_unassign([to])
                client.incremental_assign([to])
            else:
                rest = native_partitions([each for each in owned if each != place])
                client.assign([to, *client.position(rest)])


def _is_incremental(config: Mapping[str, Any]) -> bool:
    """Whether rebalances of a group with this configuration name what changes, and not all there is."""
    return (
        config.get("group.protocol", "classic") == "consumer"
        or "cooperative" in str(config.get("partition.assignment.strategy", "")).lower()
    )
