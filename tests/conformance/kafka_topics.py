"""A pool of topics, which are created and deleted several at once, at a third of the cost."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.cimpl import NewTopic

from tests.servers.kafka_client import SECONDS, RawAdmin, wait_for

__all__ = ["TopicPool"]

_AT_ONCE: Final = 8


class TopicPool:
    """Empty, unused topics of one broker. Blocking; for one thread at a time."""

    def __init__(self, bootstrap: str) -> None:
        self._admin = RawAdmin(bootstrap)
        self._ready: defaultdict[int, list[str]] = defaultdict(list)
        self._used: list[str] = []

    def ready(self, partitions: int) -> bool:
        """Whether `take` returns without creating topics."""
        return bool(self._ready[partitions])

    def take(self, partitions: int) -> str:
        """A topic with a unique name; every partition has a leader."""
        ready = self._ready[partitions]
        if not ready:
            # Fewer tests need topics with more partitions.
            ready += self._make(partitions, max(1, _AT_ONCE // partitions))
        return ready.pop()

    def give_back(self, names: Sequence[str]) -> None:
        """Delete these topics, together with those of other tests."""
        self._used += names
        if len(self._used) >= _AT_ONCE:
            used, self._used = self._used, []
            # Not awaited: a test may have deleted the topic itself, and the broker may be restarting.
            self._admin.client.delete_topics(used, operation_timeout=SECONDS)

    def _make(self, partitions: int, count: int) -> list[str]:
        names = [f"kit-topic-{uuid.uuid4().hex[:12]}" for _ in range(count)]
        new = [NewTopic(name, partitions, -1) for name in names]

        def made() -> bool:
            # A broker that was just killed may not be the controller yet.
            answers = self._admin.client.create_topics(new, operation_timeout=SECONDS).values()
            return all(map(_there, answers))

        def led() -> bool:
            try:
                found: Any = self._admin.client.list_topics(timeout=SECONDS).topics
            except KafkaException:
                return False
            places = [place for name in names if name in found for place in found[name].partitions.values()]
            return len(places) == count * partitions and all(place.leader >= 0 for place in places)

        wait_for(made)
        wait_for(led)
        return names


def _there(answer: Future[None]) -> bool:
    try:
        answer.result()
    except KafkaException as error:
        return error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    return True
