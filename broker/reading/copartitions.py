"""`Copartitions`: holds the partitions of a number together, for a consumer whose topics are partitioned alike.

A number is whole when this member is assigned the partition of that number of every topic. Only whole numbers are
reported to the application. So a number never has two owners, also while a group moves the partitions of its topics one
after the other. Pure, except for `check_counts`, which asks the broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from broker.driver.contract import Backend, TopicPartition
from broker.errors import ConfigurationError

__all__ = ["GROWTH_SECONDS", "Copartitions", "check_counts", "counts_differ", "partition_counts"]

GROWTH_SECONDS = 30.0
"""How long the numbers of partitions may differ while topics grow one after the other."""


class Copartitions:
    """The assigned partitions by number."""

    def __init__(self, topics: Iterable[str]) -> None:
        self.topics = tuple(dict.fromkeys(topics))
        self._assigned: dict[int, set[str]] = {}

    @property
    def held(self) -> Sequence[TopicPartition]:
        """The assigned partitions whose numbers are not whole."""
        return [
            TopicPartition(topic, number)
            for number, topics in sorted(self._assigned.items())
            if len(topics) < len(self.topics)
            for topic in sorted(topics)
        ]

    def add(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """These were assigned; return the partitions of the numbers that became whole."""
        whole: list[TopicPartition] = []
        for topic, number in partitions:
            topics = self._assigned.setdefault(number, set())
            if topic not in topics:
                topics.add(topic)
                if len(topics) == len(self.topics):
                    whole += [TopicPartition(each, number) for each in self.topics]
        return whole

    def remove(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """These are taken away; return the partitions of the numbers that were whole."""
        broken: list[TopicPartition] = []
        for topic, number in partitions:
            topics = self._assigned.get(number, set())
            if topic in topics:
                if len(topics) == len(self.topics):
                    broken += [TopicPartition(each, number) for each in self.topics]
                topics.discard(topic)
                if not topics:
                    del self._assigned[number]
        return broken


async def partition_counts(backend: Backend, topics: Iterable[str]) -> dict[str, int]:
    """How many partitions each topic has.

    :raises TopicNotFound: a topic does not exist.
    """
    reader = backend.log_reader()
    return {topic: len(await reader.partitions(topic)) for topic in topics}


def counts_differ(counts: Mapping[str, int], group: str) -> ConfigurationError:
    """The error for topics that cannot be copartitioned."""
    shown = ", ".join(f"{topic!r} has {count}" for topic, count in sorted(counts.items()))
    return ConfigurationError(
        f"Group {group!r} is copartitioned, and the numbers of partitions of its topics differ: {shown}",
        advice="Give the topics equal numbers with bus.admin.ensure_topic(..., partitions=), or omit copartitioned",
    )


async def check_counts(backend: Backend, topics: Iterable[str], group: str) -> None:
    """:raises ConfigurationError: the topics have different numbers of partitions."""
    counts = await partition_counts(backend, topics)
    if len(set(counts.values())) > 1:
        raise counts_differ(counts, group)
