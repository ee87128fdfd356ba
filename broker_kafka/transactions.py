"""Transactions of Kafka: messages and positions that are committed together.

*Concurrency.* One producer with its own thread per transactional id, one transaction at a time; any number of `publish`
calls at once within it. *Cancellation.* A cancelled call leaves what has begun to the thread. *Failure.*

| what happened | error | the publisher afterwards |
| --- | --- | --- |
| a retriable error | retried for three times `request_timeout`, or the transaction's timeout if longer | goes on |
| the transaction must be aborted | `TransactionAborted`, or an error after which `abort` succeeds | goes on |
| another producer of the id has fenced this one, or a transaction was open too long | `TransactionFatal` | is dead |

The broker reports a timeout and a fence alike. So a publisher never takes its id back: it might be that of a newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as NativePartition

from broker import (
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    LeaseLost,
    Message,
    OperationTimeout,
    OutboundMessage,
    Receipt,
    TopicPartition,
    TransactionAborted,
    TransactionFatal,
    Unsupported,
)
from broker.driver import Backoff, MessageSource, RecordsAsMessages, RecordSource, logger
from broker_kafka.client.delivery_reports import TOO_LARGE, PublishCall, batch_too_large, explain_purged
from broker_kafka.client.producer import ProducerClient, ProducerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.requests import cluster_id
from broker_kafka.errors import FENCED, kafka_error, translate
from broker_kafka.queue.consumer.lease_manager import LeaseManager
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.records import KafkaRecordSource
from broker_kafka.share.messages import ShareMessageSource

__all__ = ["KafkaTransaction"]

_ATTEMPT_SECONDS: Final = 0.5  # the thread has to poll between attempts
_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 0.5
_RETRY_TIMEOUTS: Final = 3
"""Retriable errors are retried for this many times `request_timeout`, or the transaction's timeout if longer."""
_ABORT_SECONDS: Final = 3.0
_CLOSE_SECONDS: Final = 5.0


class KafkaTransaction:
    """Implements `TransactionSpi`, and `TransactionalAcks` and `ChecksConsumers`.

    :param on_close: called after the close.
    :param on_old: as of `ProducerThread`.
    """

    def __init__(
        self,
        connection: Connection,
        transactional_id: str,
        on_close: Callable[[KafkaTransaction], object],
        on_old: Callable[[str, Sequence[int]], object] | None = None,
    ) -> None:
        self._on_old = on_old
        self._connection = connection
        self._on_close = on_close
        self._id = transactional_id
        self._timeout = connection.settings.transaction_timeout_ms / 1000
        self._thread: _TransactionThread | None = None
        self._dead: TransactionFatal | None = None
        self._since: float | None = None
        """When the open transaction began, by `monotonic`."""
        self._begun: _TransactionThread | None = None
        """The thread whose client has already begun the next transaction."""
        self._positions: tuple[list[NativePartition], Any] | None = None
        """Positions to commit, and the metadata of the group member."""
        self._closed = False
        self._same_cluster: Connection | None = None
        """Another connection that is known to be to this cluster."""

    async def open(self) -> None:
        """Open the producer, which fences an older one of the id and aborts its open transaction.

        :raises NotAuthorized: this user may not use the id. :raises BrokerError: no coordinator answered.
        """
        await self._open_producer()

    async def check_consumer(self, source: RecordSource) -> None:
        other = source.connection if isinstance(source, KafkaRecordSource) else None
        if other is not self._connection and (other is None or not await self._is_same_cluster(other)):
            raise ConfigurationError(
                f"The consumer reads another cluster than {self._connection.servers}, the cluster of transactional id "
                f"{self._id!r}, so its positions cannot be committed in the transaction",
                advice="Open the consumer and the transactional publisher on one bus",
            )

    async def begin(self) -> None:
        self._check()
        if self._since is not None:
            raise BackendError(f"A transaction of {self._id!r} is already open", advice="Commit or abort it first")
        if self._thread is None:
            # The broker rejected all of the last transaction.
            await self._open_producer()
        self._since = monotonic()
        self._positions = None
        begun, self._begun = self._begun, None
        if begun is self._thread and begun is not None and begun.fatal is None:
            return
        try:
            await self._attempt("begin", lambda producer: producer.begin_transaction())
        except BaseException:
            self._since = None
            raise

    async def publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        return await self._publish(topic, messages, receipts=receipts)

    async def _publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool, placed: bool = False
    ) -> Sequence[Receipt | BrokerError | None]:
        thread = self._current()
        outcomes = await thread.publish(topic, messages, receipts=receipts, placed=placed)
        if thread.fatal is None:
            purged = any(isinstance(outcome, ConnectionFailed) for outcome in outcomes)
            reason = await thread.call(ProducerClient.abort_reason) if purged else None
            thread.gap |= reason is not None
            return explain_purged(outcomes, topic, reason)
        failure = await self._close_dead(thread.fatal)
        return [failure if isinstance(outcome, BrokerError) else outcome for outcome in outcomes]

    async def add_offsets(self, source: RecordSource, positions: Mapping[TopicPartition, int]) -> None:
        """:raises LeaseLost: a partition is no longer assigned to the member; abort the transaction."""
        self._current()
        assert isinstance(source, KafkaRecordSource)
        metadata = await source.group_metadata(list(positions))
        owned = source.assignment()
        for partition in positions:
            if partition not in owned:
                # Metadata read while the partition is assigned is of its generation, so the broker can fence it.
                raise LeaseLost(
                    f"Partition {partition.partition} of topic {partition.topic!r} is not assigned to this member",
                    advice="Abort the transaction; the new owner reads from the last commit on",
                )
        self._positions = (
            [NativePartition(*place, source.log_ends.beyond(place, at)) for place, at in positions.items()],
            metadata,
        )

    def check_source(self, source: MessageSource) -> None:
        _leases_of(source, self._connection)

    async def add_acks(self, source: MessageSource, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._current()
        produce = partial(self._publish, receipts=False, placed=True)
        return await _leases_of(source, self._connection).write_ends(messages, produce)

    def acks_aborted(self, source: MessageSource, messages: Sequence[Message[Any]]) -> None:
        _leases_of(source, self._connection).discard_ends(messages)

    async def commit(self) -> None:
        commit = _Commit(self._positions)
        try:
            thread = self._current()
            await self._attempt("commit", commit)
        except TransactionAborted:
            self._since = None
            raise
        except BrokerError as error:
            if commit.positions is not None or not _must_abort(error):
                raise
            await self.abort()
            raise TransactionAborted(f"The transaction was aborted: {error.message}", native=error) from error
        self._since = None
        self._begun = thread if commit.begun else None

    async def abort(self) -> None:
        self._check()
        thread = self._thread
        if self._since is None or thread is None:
            self._since = None
            return
        try:
            await self._attempt("abort", lambda producer: producer.abort_transaction(_ATTEMPT_SECONDS))
        except TransactionAborted:
            logger.debug("The broker had already aborted the transaction of %r", self._id)
        except BrokerError as error:
            found = _native(error)
            if found is None or found.code() != KafkaError._STATE:
                raise
        self._since = None
        if thread.gap and self._thread is thread:
            await self._replace_producer(thread)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._leave()
        finally:
            self._on_close(self)

    async def _leave(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._since is not None:
            # Otherwise readers of committed data wait until the broker aborts it after the timeout.
            try:
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._retry(thread, "abort", lambda producer: producer.abort_transaction(_ATTEMPT_SECONDS))
            except (BrokerError, TimeoutError) as error:
                logger.debug("The transaction of %r is not aborted, and times out: %s", self._id, error)
        await thread.stop(_CLOSE_SECONDS)

    # -- inside --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"The transactional publisher {self._id!r} was closed")
        if self._dead is not None:
            raise TransactionFatal(self._dead.message, native=self._dead, advice=self._dead.advice)

    def _current(self) -> _TransactionThread:
        self._check()
        if self._since is None:
            raise BackendError("No transaction is open", advice="Begin one first")
        if self._thread is None:
            raise self._not_begun()
        return self._thread

    async def _is_same_cluster(self, other: Connection) -> bool:
        if other is not self._same_cluster:
            if await cluster_id(other) != await cluster_id(self._connection):
                return False
            self._same_cluster = other
        return True

    async def _open_producer(self) -> None:
        settings = self._connection.settings
        config = self._connection.transactional_config(self._id)
        thread = _TransactionThread(
            config,
            name=f"Kafka transactions of {self._id!r}",
            window=settings.publish_window,
            timeout=config["message.timeout.ms"] / 1000,
            eager="linger_ms" not in settings.model_fields_set,
            partitioner=settings.partition_function,
            changed=self._connection.changed,
            on_old=self._on_old,
        )
        try:
            await thread.start()
            await self._retry(thread, "open", lambda producer: producer.init_transactions(_ATTEMPT_SECONDS))
        except BaseException:
            await thread.stop(_CLOSE_SECONDS)
            raise
        self._thread = thread

    async def _replace_producer(self, thread: _TransactionThread) -> None:
        """Open a new producer at once: the old one has just aborted, so it was not fenced."""
        self._thread = None
        await thread.stop(_CLOSE_SECONDS)
        try:
            await self._open_producer()
        except BrokerError as error:
            logger.debug("The producer of %r is opened with the next transaction: %s", self._id, error)

    async def _attempt(self, what: str, function: Callable[[Producer], Any]) -> None:
        """Make a call of the open transaction; close the producer if the error is fatal."""
        thread = self._thread
        if thread is None:
            raise self._not_begun()
        try:
            await self._retry(thread, what, function)
        except BrokerError as error:
            found = _native(error)
            if isinstance(error, TransactionFatal) or (found is not None and found.fatal()):
                raise await self._close_dead(found) from error
            raise

    async def _retry(self, thread: _TransactionThread, what: str, function: Callable[[Producer], Any]) -> None:
        """Call until success or an error that is not retriable, or until the time for retries is over."""
        timeout = max(self._timeout, _RETRY_TIMEOUTS * self._connection.settings.request_timeout)
        deadline, backoff = monotonic() + timeout, Backoff(_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                await thread.call(lambda client: function(client.get()))
                return
            except BrokerError:
                raise
            except Exception as error:
                found = kafka_error(error)
                failed = f"Transaction of {self._id!r}: failed to {what} it"
                if found is None or not found.retriable() or found.fatal():
                    raise translate(error, failed) from error
                if monotonic() >= deadline and found.code() == KafkaError._TIMED_OUT:
                    raise OperationTimeout(
                        f"{failed}: the transaction coordinator did not answer within {timeout:g} s",
                        native=error,
                        advice="Check that the brokers run, or raise transaction_timeout_ms or request_timeout",
                    ) from error
                if monotonic() >= deadline:
                    raise translate(error, failed) from error
                if found.code() != KafkaError._TIMED_OUT:
                    await asyncio.sleep(min(backoff.next(), max(0.0, deadline - monotonic())))

    async def _close_dead(self, error: KafkaError | None) -> BrokerError:
        """Close a dead producer; return why it is dead."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop(_CLOSE_SECONDS)
        if self._dead is not None:
            return self._dead
        if thread is not None and thread.gap and error is not None and error.code() == KafkaError.INVALID_TXN_STATE:
            # The broker rejected every message, so no transaction began there, and none can be aborted.
            return self._not_begun()
        what = f"Transactional publisher {self._id!r}"
        if error is not None and error.code() not in FENCED:
            self._dead = TransactionFatal(f"{what} failed with a fatal error: {error.str()}")
        elif self._since is not None and monotonic() - self._since >= self._timeout:
            self._dead = TransactionFatal(
                f"{what} ended: its transaction was open for more than {self._timeout:g} s, and the broker aborted it, "
                "or another publisher opened this id",
                advice="If no other has the id, open a new publisher; do less in one transaction, or raise "
                "transaction_timeout_ms",
            )
        else:
            self._dead = TransactionFatal(f"{what} was fenced: another publisher opened this id")
        return self._dead

    def _not_begun(self) -> TransactionAborted:
        return TransactionAborted(f"The transaction of {self._id!r} has not begun at the broker")


class _TransactionThread(ProducerThread):
    """Neither replaces a client with a fatal error nor resends a rejected batch: either ends the transaction.

    :ivar gap: a broker has rejected messages, whose sequence numbers the client skips; the broker then rejects what
        the client sends next, until a new producer is opened.
    """

    _splits = False
    gap = False

    def _make(self) -> Producer:
        if self._fatal is not None:
            raise TransactionFatal(f"{self._name} failed with a fatal error: {self._fatal.str()}")
        return super()._make()

    def _replace(self, client: ProducerClient) -> None:
        self._drop_client(client)

    def _translated(self, error: KafkaError, call: PublishCall, index: int) -> BrokerError:
        # Positive codes are the broker's.
        self.gap = self.gap or error.code() > 0
        if error.code() in TOO_LARGE and len(call.messages) > 1:
            return batch_too_large(error, call.topic)
        return super()._translated(error, call, index)

    @property
    def fatal(self) -> KafkaError | None:
        """The fatal error of the client, if there is one."""
        return self._fatal


class _Commit:
    """Sends the positions, commits, and begins the next transaction, in one call of the thread, which can be retried.

    :ivar positions: positions that are not sent yet.
    :ivar begun: whether the next transaction has begun.
    """

    def __init__(self, positions: tuple[list[NativePartition], Any] | None) -> None:
        self.positions = positions
        self.begun = False

    def __call__(self, producer: Producer) -> None:
        if self.positions is not None:
            producer.send_offsets_to_transaction(*self.positions, _ATTEMPT_SECONDS)
            self.positions = None
        producer.commit_transaction(_ATTEMPT_SECONDS)
        with suppress(KafkaException):  # `begin` tries again, and raises
            producer.begin_transaction()
            self.begun = True


def _native(error: BrokerError) -> KafkaError | None:
    return kafka_error(error if error.native is None else error.native)


def _must_abort(error: BrokerError) -> bool:
    found = _native(error)
    return found is not None and found.txn_requires_abort()


def _leases_of(source: MessageSource, connection: Connection) -> LeaseManager:
    """The leases whose ENDs can be written in a transaction of this connection: those of queue=markers on this bus.

    :raises Unsupported: messages of this source cannot be acked in such a transaction.
    """
    if isinstance(source, QueueClient):
        if source.connection is connection:
            return source.leases
        raise Unsupported(
            "The message was received on another bus than the transaction's",
            advice="Open the transactional publisher and the consumer on one bus",
        )
    if isinstance(source, RecordsAsMessages):
        raise Unsupported(
            "Messages of queue=offsets are acked by committing group offsets, outside of transactions",
            advice="Use queue=markers, or read with bus.records(...) and pass that to publisher.transaction(...)",
        )
    if isinstance(source, ShareMessageSource):
        raise Unsupported(
            "Kafka does not support acks of share groups in a transaction",
            advice="Use queue=markers for messages of this topic",
        )
    raise Unsupported(
        "The message was received from another broker than the transaction's",
        advice="Open the transactional publisher and the consumer on one bus",
    )
