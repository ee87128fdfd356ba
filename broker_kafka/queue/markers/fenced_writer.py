"""`FencedWriter`: writes a batch of records whole or not at all, and nothing once another writer of its id is open.

*Concurrency.* A producer and its thread of its own; one `write` at a time. *Cancellation.* A write that was begun goes
on. *Failure.* Three outcomes are told apart: all of it is on the brokers; nothing of it is, nor will be (`NotWritten`);
or that is not known, or this writer has been fenced (`Doubtful`): then it is of no more use, and another of its id
settles what it left. *Stop.* Bounded, cut off from the brokers too: a write that is under way becomes doubtful. What it
began and did not commit is undone, if the brokers answer within a second, since it holds up who reads the log; else it
does so until they undo it by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError
from broker.driver import logger
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import OwnerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.config.oauth import with_oauth_token
from broker_kafka.errors import FENCED, configuration_error, kafka_error, translate
from broker_kafka.queue.markers.topic import LARGEST
from broker_kafka.queue.markers.wire import Headers

__all__ = ["Doubtful", "Entry", "FencedWriter", "NotWritten", "Positions"]

_SLICE: Final = 0.25
"""Seconds of one attempt, after which the thread looks whether it is to stop."""
_IDLE: Final = 1.0
_PAUSE: Final = 0.02
_PATIENCE: Final = 60.0
"""Seconds for which what the client calls retriable is repeated."""
_PURGE: Final = 0.5
_ABORT: Final = 1.0
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
"""Of records that the client dropped since their transaction has failed."""
_OF_TOPICS: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION})
"""Said of a transaction for one of the topics in it, without a word of which."""
_NEW_TOPIC_MS: Final = 1_000
"""How long a topic may be unknown before its records are refused."""


class Entry(NamedTuple):
    """A record to be written.

    :ivar partition: -1 has the key choose it.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int = -1


class Positions(NamedTuple):
    """Positions of a group that count with the records.

    :ivar metadata: of the member whose they are; the group's coordinator refuses those of a former generation.
    """

    offsets: list[NativePartition]
    metadata: Any


class NotWritten(BrokerError):
    """Nothing of the batch is on the brokers.

    :ivar refused: what was said of single records, by their place in the batch.
    """

    def __init__(self, message: str, *, refused: Mapping[int, BrokerError], native: BaseException | None) -> None:
        super().__init__(message, native=native, retriable=True)
        self.refused = refused


class Doubtful(BrokerError):
    """It is not known what of the batch is on the brokers, or will be, until another writer of the id is open.

    :ivar fenced: somebody opened one already.
    :ivar refused: what was said of single records, by their place in the batch, none of which is on the brokers.
    :ivar explained: whether the caller knows by these what to do otherwise the next time.
    """

    def __init__(
        self,
        message: str,
        *,
        fenced: bool = False,
        refused: Mapping[int, BrokerError] | None = None,
        native: BaseException | None = None,
    ) -> None:
        super().__init__(message, native=native, retriable=True)
        self.fenced = fenced
        self.refused: Mapping[int, BrokerError] = refused or {}
        self.explained = False


class FencedWriter(OwnerThread[Producer]):
    """:param transactional_id: of which at most one writer is good at a time, over all processes.
    :param timeout_ms: of a transaction, in milliseconds; None is that of the settings.
    """

    def __init__(self, connection: Connection, transactional_id: str, timeout_ms: int | None = None) -> None:
        self._id = transactional_id
        self._config = _config(connection, transactional_id, timeout_ms)
        super().__init__(f"Kafka transactions of {transactional_id!r}", Rebootstrapper(self._config))
        self._refused: dict[int, KafkaError] = {}
        self._missing = 0
        self._begun = False
        """Whether a transaction may be open."""

    # -- for the loop --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open it. From then on every earlier writer of the id is fenced, and what it left open is undone.

        :raises BrokerError: no coordinator could be reached, or the id is not ours to use.
        """
        await super().start()
        await self.call(self._begin)

    async def write(self, entries: Sequence[Entry], positions: Positions | None = None) -> None:
        """Write these, and the positions with them.

        :raises NotWritten: nothing of them is there. :raises Doubtful: who knows; this writer is of no more use.
        """
        await self.call(lambda producer: self._write(producer, entries, positions))

    # -- the thread ----------------------------------------------------------------------------------------

    def _open(self) -> Producer:
        try:
            producer = Producer(with_oauth_token(self._config))
        except (KafkaException, TypeError, ValueError) as error:
            raise configuration_error(error, "Opening a producer", self._config) from error
        self._rebootstrapper.watch(producer)
        return producer

    def _begin(self, producer: Producer) -> None:
        try:
            self._repeat(producer, lambda: producer.init_transactions(_SLICE))
        except KafkaException as error:
            raise translate(error, f"Opening the writer of {self._id!r}") from error

    def _turn(self, client: Producer) -> None:
        self._serve(client, _IDLE)
        try:
            client.poll(0)
        except KafkaException as error:
            # Whoever writes next is told as well; who wrote last may be about to hear why it has failed.
            logger.info("The writer of %r has failed: %s", self._id, error)

    def _shut(self, client: Producer) -> None:
        self._rebootstrapper.unwatch()
        if self._begun:
            self._abort(client)
        if self._missing:
            client.purge(blocking=False)
            until = monotonic() + _PURGE
            while self._missing and monotonic() < until:
                client.poll(0.01)

    def _abort(self, client: Producer) -> None:
        """Undo what is open, if that is not being committed."""
        try:
            client.abort_transaction(_ABORT)
        except (KafkaException, SystemError) as error:
            logger.info("What %r began is left to the brokers to undo: %s", self._id, error)

    def _write(self, producer: Producer, entries: Sequence[Entry], positions: Positions | None) -> None:
        self._refused.clear()
        cause: BaseException | None = None
        topics = sorted({entry.topic for entry in entries})
        try:
            producer.begin_transaction()
            self._begun = True
            for place, entry in enumerate(entries):
                self._produce(producer, place, entry)
            self._repeat(producer, lambda: self._flush(producer))
            if not self._refused:
                if positions is not None:
                    self._repeat(producer, lambda: producer.send_offsets_to_transaction(*positions, _SLICE))
                self._repeat(producer, lambda: self._commit(producer))
                self._begun = False
                return
        except (KafkaException, SystemError) as error:
            found = kafka_error(error)
            if found is None or self._stopping or not found.txn_requires_abort():
                raise self._doubt(error, self._told(topics)) from error
            cause = error
        self._undo(producer, cause or self._cause(producer), topics)

    def _produce(self, producer: Producer, place: int, entry: Entry) -> None:
        headers = cast("list[tuple[str, str | bytes | None]]", list(entry.headers))
        report = partial(self._reported, place)
        while True:
            try:
                producer.produce(
                    entry.topic, entry.value, entry.key, entry.partition, on_delivery=report, headers=headers
                )
                self._missing += 1
                return
            except BufferError:
                producer.poll(_SLICE)
                if self._stopping:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
            except KafkaException as error:
                found = kafka_error(error)
                if found is None or found.fatal() or found.code() == KafkaError._STATE:
                    raise
                # What is refused here never was with the client.
                self._refused[place] = found
                return
            except (TypeError, ValueError) as error:
                # Of a name that no topic can have.
                self._refused[place] = KafkaError(KafkaError._INVALID_ARG, str(error))
                return

    def _reported(self, place: int, error: KafkaError | None, _: object) -> None:
        self._missing -= 1
        if error is not None:
            self._refused[place] = error

    def _flush(self, producer: Producer) -> None:
        if producer.flush(_SLICE):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))

    def _commit(self, producer: Producer) -> None:
        producer.commit_transaction(_SLICE)

    def _cause(self, producer: Producer) -> KafkaException | None:
        """Why the transaction has failed, if it has and nobody was told: the client answers so to a second begin."""
        try:
            producer.begin_transaction()
        except KafkaException as error:
            found = kafka_error(error)
            return error if found is not None and found.txn_requires_abort() else None
        return None

    def _told(self, topics: Sequence[str], cause: BaseException | None = None) -> dict[int, BrokerError]:
        """What was said of single records, by their place.

        :param cause: why the transaction has failed. What is said of a topic holds for each record that was dropped.
        """
        found = None if cause is None else kafka_error(cause)
        if found is not None and found.code() in _OF_TOPICS and _all_purged(self._refused):
            self._refused = dict.fromkeys(self._refused, found)
        what = f"Writing for {self._id!r}"
        return {
            place: translate(error, what, resources=topics if error is found else ())
            for place, error in self._refused.items()
        }

    def _undo(self, producer: Producer, cause: BaseException | None, topics: Sequence[str]) -> None:
        """Abort, and tell why: what was refused, or else the cause."""
        told = self._told(topics, cause)
        # The client's own codes are below 0. What is dropped by the abort is refused for that alone.
        spent = any(error.code() > 0 for error in self._refused.values())
        try:
            self._repeat(producer, lambda: producer.abort_transaction(_SLICE))
            self._begun = False
        except (KafkaException, SystemError) as error:
            raise self._doubt(error, told) from error
        if spent:
            # The numbers of what a broker refused are missing, and it refuses what would come after.
            raise Doubtful(f"The transaction of {self._id!r} was undone, and its producer is spent", refused=told)
        first = next(iter(told.values()), None)
        if first is None and cause is not None:
            first = translate(cause, f"Writing for {self._id!r}")
        raise NotWritten(
            f"The transaction of {self._id!r} was undone" + (f": {first.message}" if first else ""),
            refused=told,
            native=None if first is None else first.native,
        )

    def _repeat(self, producer: Producer, call: Callable[[], object]) -> None:
        """Call until it is done, or cannot be."""
        deadline = monotonic() + _PATIENCE
        while True:
            try:
                call()
                return
            except KafkaException as error:
                found = kafka_error(error)
                if found is None or found.fatal() or not found.retriable() or self._stopping or monotonic() >= deadline:
                    raise
                if found.code() != KafkaError._TIMED_OUT:
                    producer.poll(_PAUSE)

    def _doubt(self, error: BaseException, refused: Mapping[int, BrokerError]) -> Doubtful:
        found = kafka_error(error)
        fenced = found is not None and found.code() in FENCED
        reason = "was fenced: another writer of this id was opened" if fenced else f"has failed: {found or error}"
        return Doubtful(f"The writer of {self._id!r} {reason}", fenced=fenced, refused=refused, native=error)


def _all_purged(refused: Mapping[int, KafkaError]) -> bool:
    """Whether nothing is said of any record but that the client dropped it."""
    return all(error.code() in _PURGED for error in refused.values())


def _config(connection: Connection, transactional_id: str, timeout_ms: int | None) -> dict[str, Any]:
    return {
        "topic.metadata.propagation.max.ms": _NEW_TOPIC_MS,
        **connection.transactional_config(transactional_id, timeout_ms),
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": 0,
        "message.max.bytes": LARGEST,
    }
