"""The library's producer, and what it knows of topics. Lives in the producer's thread; its calls block for a moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Producer

from broker_kafka.errors import translate
from broker_kafka.lifeline import Lifeline

__all__ = ["ProducerClient"]

_CONNECT: Final = 0.5
_FIRST_LOOK: Final = 0.1
_LONGEST_LOOK: Final = 10.0
_KNOWN: Final = 30.0


class ProducerClient:
    """
    :param make: makes the producer, and the next one when it was dropped.
    :param lifeline: holds the producer.
    :param changed: when this process last changed a topic, by `monotonic`; what was known of it before is forgotten.
    """

    def __init__(self, make: Callable[[], Producer], lifeline: Lifeline, changed: Mapping[str, float]) -> None:
        self._make = make
        self._lifeline = lifeline
        self._changed = changed
        self._connected = False
        self._look_for = _FIRST_LOOK
        self._known: dict[str, tuple[int, float]] = {}
        self.producer: Producer | None = None

    def get(self) -> Producer:
        """The producer; a new one if there is none."""
        if self.producer is None:
            self.producer = self._make()
            self._lifeline.hold(self.producer)
            self._connected = False
        return self.producer

    def refused(self) -> KafkaError | None:
        """Why the brokers refused what the open transaction writes to, so that it has to be undone, if they did."""
        try:
            # It does nothing within a transaction but to tell what is wrong with that one.
            self.get().begin_transaction()
        except KafkaException as error:
            found = error.args[0]
            return found if found.txn_requires_abort() else None
        return None

    def drop(self) -> Producer | None:
        """Have the next `get` make a new one; the old one."""
        self._lifeline.let_go()
        producer, self.producer = self.producer, None
        return producer

    def connect(self, topic: str) -> Producer:
        """The producer, which has asked for a topic: left alone, it connects to a broker half a second later."""
        producer = self.get()
        if not self._connected:
            self._connected = True
            with suppress(KafkaException):
                producer.list_topics(topic, timeout=_CONNECT)
        return producer

    def partitions(self, topic: str) -> int:
        """How many the topic has; asked for again after a while.

        :raises BrokerError, KafkaException: as `look_up`.
        """
        known = self._known.get(topic)
        if known is None or monotonic() >= known[1] + _KNOWN or known[1] <= self._changed.get(topic, 0.0):
            return self.look_up(topic)
        return known[0]

    def look_up(self, topic: str) -> int:
        """Ask the brokers for the topic's partitions.

        :raises TopicNotFound, NotAuthorized: what they say of it.
        :raises KafkaException: nobody answered; the next attempt waits longer.
        """
        asked = monotonic()
        try:
            found = self.get().list_topics(topic, timeout=self._look_for).topics[topic]
        except KafkaException:
            self._look_for = min(2 * self._look_for, _LONGEST_LOOK)
            raise
        self._look_for = _FIRST_LOOK
        if found.error is not None:
            raise translate(found.error, f"Publishing to {topic!r}")
        self._known[topic] = len(found.partitions), asked
        return len(found.partitions)
