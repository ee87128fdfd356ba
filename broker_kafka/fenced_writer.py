"""`FencedWriter`: writes a batch of records in one transaction, and fails once another writer of its id is open.

| outcome of a write | meaning |
|---|---|
| returns | all records are on the brokers |
| `NotWritten` | none is, nor will be |
| `OutcomeUnknown` | unknown, or this writer is fenced: open another writer of the id, which ends the transaction |

*Concurrency.* A producer with a thread of its own; one `write` at a time. *Cancellation.* A write that has begun
continues. *Stop.* Bounded, without brokers too; a write in progress gets an unknown outcome. An open transaction is
aborted if the brokers answer within a second, since it holds up the readers of the log; else the brokers abort it
later.
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
from broker_kafka.codec.headers import Headers
from broker_kafka.config.oauth import with_oauth_token
from broker_kafka.config.properties import LARGEST
from broker_kafka.errors import FENCED, configuration_error, kafka_error, translate

__all__ = ["FencedWriter", "NotWritten", "OutcomeUnknown", "OutgoingRecord", "Positions"]

_SLICE: Final = 0.25
"""Seconds of one attempt, after which the thread checks whether to stop."""
_IDLE: Final = 1.0
_PAUSE: Final = 0.02
_RETRY_SECONDS: Final = 60.0
"""For so long errors that the client calls retriable are retried."""
_PURGE: Final = 0.5
_ABORT: Final = 1.0
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
"""Errors of records that the client dropped because their transaction failed."""
_TOPIC_ERRORS: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION})
"""Errors of a whole transaction for one of its topics, which they do not name."""
_NEW_TOPIC_MS: Final = 1_000
"""How long a topic may be missing before its records are refused."""


class OutgoingRecord(NamedTuple):
    """A record to be written.

    :ivar partition: -1 lets the key choose.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int = -1


class Positions(NamedTuple):
    """Positions of a group, committed with the records.

    :ivar metadata: of the member; the coordinator refuses that of a former generation.
    """

    offsets: list[NativePartition]
    metadata: Any


class NotWritten(BrokerError):
    """No record of the batch is on the brokers.

    :ivar refused: the errors of single records, by index in the batch.
    """

    def __init__(self, message: str, *, refused: Mapping[int, BrokerError], native: BaseException | None) -> None:
        super().__init__(message, native=native, retriable=True)
        self.refused = refused


class OutcomeUnknown(BrokerError):
    """It is unknown which records of the batch are on the brokers, until another writer of the id is open.

    :ivar fenced: whether another one was opened already.
    :ivar refused: the errors of single records, by index in the batch; these are not on the brokers.
    :ivar refusals_handled: set by the caller if it handles `refused`.
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
        self.refusals_handled = False


class FencedWriter(OwnerThread[Producer]):
    """:param transactional_id: only the writer that was opened last may write, over all processes.
    :param timeout_ms: of a transaction, in milliseconds; None is `transaction_timeout_ms`.
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
        """Open it: every earlier writer of the id is fenced, and its open transaction is aborted.

        :raises BrokerError: no coordinator could be reached, or this user may not use the id.
        """
        await super().start()
        await self.call(self._begin)

    async def write(self, records: Sequence[OutgoingRecord], positions: Positions | None = None) -> None:
        """Write these records, and the positions with them.

        :raises NotWritten: no record was written. :raises OutcomeUnknown: this writer cannot be used any more.
        """
        await self.call(lambda producer: self._write(producer, records, positions))

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
            self._retry(producer, lambda: producer.init_transactions(_SLICE))
        except KafkaException as error:
            raise translate(error, f"Opening the writer of {self._id!r}") from error

    def _turn(self, client: Producer) -> None:
        self._serve(client, _IDLE)
        try:
            client.poll(0)
        except KafkaException as error:
            # The next write raises it too, and the last one may be about to.
            logger.info("The writer of %r failed: %s", self._id, error)

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
        """Abort the open transaction, unless it is being committed."""
        try:
            client.abort_transaction(_ABORT)
        except (KafkaException, SystemError) as error:
            logger.info("The brokers have to abort the open transaction of %r: %s", self._id, error)

    def _write(self, producer: Producer, records: Sequence[OutgoingRecord], positions: Positions | None) -> None:
        self._refused.clear()
        cause: BaseException | None = None
        topics = sorted({record.topic for record in records})
        try:
            producer.begin_transaction()
            self._begun = True
            for index, record in enumerate(records):
                self._produce(producer, index, record)
            self._retry(producer, lambda: self._flush(producer))
            if not self._refused:
                if positions is not None:
                    self._retry(producer, lambda: producer.send_offsets_to_transaction(*positions, _SLICE))
                self._retry(producer, lambda: self._commit(producer))
                self._begun = False
                return
        except (KafkaException, SystemError) as error:
            found = kafka_error(error)
            if found is None or self._stopping or not found.txn_requires_abort():
                raise self._unknown(error, self._refusals(topics)) from error
            cause = error
        self._abort_and_raise(producer, cause or self._cause(producer), topics)

    def _produce(self, producer: Producer, index: int, record: OutgoingRecord) -> None:
        headers = cast("list[tuple[str, str | bytes | None]]", list(record.headers))
        report = partial(self._reported, index)
        while True:
            try:
                producer.produce(
                    record.topic, record.value, record.key, record.partition, on_delivery=report, headers=headers
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
                # The client did not accept it.
                self._refused[index] = found
                return
            except (TypeError, ValueError) as error:
                # An invalid topic name.
                self._refused[index] = KafkaError(KafkaError._INVALID_ARG, str(error))
                return

    def _reported(self, index: int, error: KafkaError | None, _: object) -> None:
        self._missing -= 1
        if error is not None:
            self._refused[index] = error

    def _flush(self, producer: Producer) -> None:
        if producer.flush(_SLICE):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))

    def _commit(self, producer: Producer) -> None:
        producer.commit_transaction(_SLICE)

    def _cause(self, producer: Producer) -> KafkaException | None:
        """Why the transaction failed, if no call raised it: the client says so to a second begin."""
        try:
            producer.begin_transaction()
        except KafkaException as error:
            found = kafka_error(error)
            return error if found is not None and found.txn_requires_abort() else None
        return None

    def _refusals(self, topics: Sequence[str], cause: BaseException | None = None) -> dict[int, BrokerError]:
        """The errors of single records, by index.

        :param cause: why the transaction failed; an error of a topic is that of each record that the client dropped.
        """
        found = None if cause is None else kafka_error(cause)
        if found is not None and found.code() in _TOPIC_ERRORS and _all_purged(self._refused):
            self._refused = dict.fromkeys(self._refused, found)
        what = f"Writing for {self._id!r}"
        return {
            index: translate(error, what, resources=topics if error is found else ())
            for index, error in self._refused.items()
        }

    def _abort_and_raise(self, producer: Producer, cause: BaseException | None, topics: Sequence[str]) -> None:
        """Abort, and raise the refusals, or else the cause."""
        refused = self._refusals(topics, cause)
        # Errors of the client itself are below 0, such as those of records that the abort drops.
        exhausted = any(error.code() > 0 for error in self._refused.values())
        try:
            self._retry(producer, lambda: producer.abort_transaction(_SLICE))
            self._begun = False
        except (KafkaException, SystemError) as error:
            raise self._unknown(error, refused) from error
        if exhausted:
            # The sequence numbers of refused records are missing, and the broker refuses later ones.
            raise OutcomeUnknown(
                f"The transaction of {self._id!r} was aborted, and its producer cannot be used any more",
                refused=refused,
            )
        first = next(iter(refused.values()), None)
        if first is None and cause is not None:
            first = translate(cause, f"Writing for {self._id!r}")
        raise NotWritten(
            f"The transaction of {self._id!r} was aborted" + (f": {first.message}" if first else ""),
            refused=refused,
            native=None if first is None else first.native,
        )

    def _retry(self, producer: Producer, call: Callable[[], object]) -> None:
        """Retry the call until it succeeds or fails for good."""
        deadline = monotonic() + _RETRY_SECONDS
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

    def _unknown(self, error: BaseException, refused: Mapping[int, BrokerError]) -> OutcomeUnknown:
        found = kafka_error(error)
        fenced = found is not None and found.code() in FENCED
        reason = "was fenced: another writer of this id was opened" if fenced else f"failed: {found or error}"
        return OutcomeUnknown(f"The writer of {self._id!r} {reason}", fenced=fenced, refused=refused, native=error)


def _all_purged(refused: Mapping[int, KafkaError]) -> bool:
    """Whether the client dropped every record, and no other error is known."""
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
