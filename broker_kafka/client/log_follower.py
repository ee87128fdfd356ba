"""`FollowerThread`: a client that reads assigned partitions without end, in no group.

*Concurrency.* As `OwnerThread`; the host is called on the loop. *Flow.* At most `_IN_FLIGHT` batches are handed over
and not taken; meanwhile librdkafka fetches ahead as far as its queue allows. *Failure.* Errors go to `host.failed`,
after the records before them; librdkafka continues by itself after retriable ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import Message as NativeRecord
from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, OffsetOutOfRange, TopicPartition
from broker_kafka.client.consumer import fetch_metadata, open_consumer
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import OwnerThread
from broker_kafka.codec.record_run import NativeRun, runs_of
from broker_kafka.errors import translate

__all__ = ["FollowerHost", "FollowerThread"]

_IN_FLIGHT: Final = 2
_LARGEST_BATCH: Final = 5000
_BATCH_BYTES: Final = 8 * 1024 * 1024
_POLL: Final = 0.1
_NOT_OURS: Final = frozenset({KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._MAX_POLL_EXCEEDED})


class FollowerHost(Protocol):
    """Whom a thread works for; everything is called on the loop, in the order of events."""

    def arrived(self, runs: Sequence[NativeRun], ends: Mapping[int, int]) -> None:
        """A batch came; answer with `FollowerThread.taken`.

        :param ends: by partition, the position where it ended for now, after these records.
        """
        ...

    def failed(self, error: BrokerError) -> None:
        """The client reports an error."""
        ...


class FollowerThread(OwnerThread[Consumer]):
    """Reads partitions of one topic.

    :param config: of the client, with `enable.partition.eof`.
    """

    def __init__(self, config: Mapping[str, Any], topic: str, host: FollowerHost) -> None:
        super().__init__("broker-kafka-log-follower", Rebootstrapper(config))
        self._config = config
        self._topic = topic
        self._host = host
        self._batch = _LARGEST_BATCH
        self._posted = self._taken = 0  # each is written by one side only, so that no lock is needed
        self._starving = False
        self._assigned: list[int] = []

    async def assign(self, positions: Mapping[int, int]) -> None:
        """Read these partitions, too, from these positions on."""

        def assign(client: Consumer) -> None:
            fetch_metadata(client, self._topic)
            try:
                client.incremental_assign(
                    [NativePartition(self._topic, number, position) for number, position in positions.items()]
                )
            except KafkaException as error:
                raise translate(error, f"Following {self._topic!r}") from error
            self._assigned += positions

        await self.call(assign)

    def taken(self) -> None:
        """A batch was taken: there is room for another."""
        self._taken += 1
        if self._starving:
            self._wake()

    def _open(self) -> Consumer:
        return open_consumer(self._config, self._rebootstrapper)

    def _shut(self, client: Consumer) -> None:
        self._rebootstrapper.unwatch()
        client.close()

    def _crashed(self, error: BrokerError) -> None:
        self._host.failed(error)

    def _turn(self, client: Consumer) -> None:
        if self._posted - self._taken >= _IN_FLIGHT:
            self._starving = True
            if self._posted - self._taken >= _IN_FLIGHT:
                self._serve(client, None)
            self._starving = False
            return
        messages = client.consume(self._batch, 0)
        if not messages:
            # With a timeout the library waits until the batch is full.
            message = client.poll(_POLL)
            if message is None:
                return
            messages = [message, *client.consume(self._batch, 0)]
        self._hand_over(messages)

    def _hand_over(self, messages: list[NativeRecord]) -> None:
        sole = (self._topic, self._assigned[0]) if len(self._assigned) == 1 else None
        runs = runs_of(messages, self._topic, sole)
        count = sum(map(len, runs))
        ends: dict[int, int] = {}
        failures: list[BrokerError] = []
        if count < len(messages):
            for message in messages:
                error = message.error()
                if error is None or error.code() in _NOT_OURS:
                    continue
                if error.code() == KafkaError._PARTITION_EOF:
                    ends[message.partition() or 0] = message.offset() or 0
                elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                    failures.append(self._lost(message))
                else:
                    failures.append(translate(error, f"Following {self._topic!r}"))
        if runs or ends:
            if count:
                # Bound the bytes of the next batch by the size of these records.
                size = sum([run.size for run in runs]) or 1
                self._batch = max(1, min(_LARGEST_BATCH, _BATCH_BYTES * count // size))
            self._posted += 1
            self._post(self._host.arrived, runs, ends)
        for failure in failures:
            self._post(self._host.failed, failure)

    def _lost(self, message: NativeRecord) -> OffsetOutOfRange:
        place = TopicPartition(self._topic, message.partition() or 0)
        return OffsetOutOfRange(
            f"The log of {place.topic!r}[{place.partition}] does not hold position {message.offset()} any more",
            native=KafkaException(message.error()),
            advice="Set a longer retention on the topic, or read faster",
        )
