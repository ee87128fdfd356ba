"""Transactions: what is published in one, and the positions in it, count all or not at all.

*Concurrency.* A producer of its own, with its thread, per transactional id; one transaction at a time, in which
`publish` may be called any number of times at once. *Cancellation.* A cancelled call leaves what has begun to the
thread. *Failure.* Retriable trouble is repeated here, for three times `request_timeout` or the transaction's timeout,
whichever is longer. What the broker undid because it was open for too long, or what must be undone, is
`TransactionAborted`, or an error after which `abort` succeeds; the publisher goes on, after a time-out with a new
producer of the same id. A producer that another of its id has fenced is dead: `TransactionFatal`. The broker says the
same of both; what had been open for longer than `transaction_timeout_ms` counts as timed out.
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
)
from broker.driver import MessageSource, RecordSource, logger
from broker_kafka.client.delivery_reports import TOO_LARGE, PublishCall, batch_too_large, told_why
from broker_kafka.client.producer import ProducerClient, ProducerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.requests import cluster_id
from broker_kafka.errors import FENCED, kafka_error, translate
from broker_kafka.queue.consumer.ack_support import ends_of
from broker_kafka.records import KafkaRecordSource

__all__ = ["KafkaTransaction"]

_SLICE: Final = 0.5  # seconds of one attempt in the thread, which has to poll now and then
_PAUSE: Final = 0.05
_REQUESTS: Final = 3
"""So many times `request_timeout` retriable trouble is repeated for, or the transaction's timeout if that is longer."""
_ABORT_ON_CLOSE: Final = 3.0
_CLOSE: Final = 5.0


class _TransactionThread(ProducerThread):
    """A client with a fatal error is not replaced by the thread: only the transaction knows what that means. What is
    refused is not sent again, since it has failed the transaction."""

    _splits = False

    def _make(self) -> Producer:
        if self._fatal is not None:
            raise TransactionFatal(f"{self._name} has failed for good: {self._fatal.str()}")
        return super()._make()

    def _replace(self, client: ProducerClient) -> None:
        self._drop_client(client)

    gap = False
    """Whether a broker has refused messages, whose numbers the client then leaves out: the broker refuses what it sends
    next, until it is made anew."""

    def _translated(self, error: KafkaError, call: PublishCall, index: int) -> BrokerError:
        # The client's own codes are below 0.
        self.gap = self.gap or error.code() > 0
        if error.code() in TOO_LARGE and len(call.messages) > 1:
            return batch_too_large(error, call.topic)
        return super()._translated(error, call, index)

    @property
    def fatal(self) -> KafkaError | None:
        """Why the client is dead, if it is."""
        return self._fatal


class KafkaTransaction:
    """Implements `TransactionSpi`, and `AcksMessages` and `ChecksConsumers`.

    :param on_close: called when a close is over.
    """

    def __init__(
        self, connection: Connection, transactional_id: str, on_close: Callable[[KafkaTransaction], object]
    ) -> None:
        self._connection = connection
        self._on_close = on_close
        self._id = transactional_id
        self._timeout = connection.settings.transaction_timeout_ms / 1000
        self._thread: _TransactionThread | None = None
        self._dead: TransactionFatal | None = None
        self._since: float | None = None
        """When the open transaction began."""
        self._begun: _TransactionThread | None = None
        """Whose client is in a transaction that nothing was done in."""
        self._positions: tuple[list[NativePartition], Any] | None = None
        """What the commit sends first: positions, and the member's metadata."""
        self._closed = False
        self._same_cluster: Connection | None = None
        """Another connection that was found to be to this cluster."""

    async def open(self) -> None:
        """Make the producer, which fences an older one of the id and undoes its open transaction.

        :raises NotAuthorized: the id is not ours to use. :raises BrokerError: no coordinator could be reached.
        """
        await self._renew()

    async def check_consumer(self, source: RecordSource) -> None:
        theirs = source.connection if isinstance(source, KafkaRecordSource) else None
        if theirs is not self._connection and (theirs is None or not await self._is_ours(theirs)):
            raise ConfigurationError(
                f"The consumer reads another broker than {self._connection.servers}, where the transaction of "
                f"{self._id!r} is, and its positions cannot be committed there",
                advice="Open the consumer and the transactional publisher on one bus",
            )

    async def begin(self) -> None:
        self._check()
        if self._since is not None:
            raise BackendError("A transaction of this producer is open already", advice="Commit or abort it first")
        if self._thread is None:
            # The last one was timed out by the broker; if another took the id meanwhile, this fences it.
            await self._renew()
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
            refused = await thread.call(ProducerClient.refused) if purged else None
            thread.gap |= refused is not None
            return told_why(outcomes, topic, refused)
        failure = await self._gone(thread.fatal)
        return [failure if isinstance(outcome, BrokerError) else outcome for outcome in outcomes]

    async def add_offsets(self, source: RecordSource, positions: Mapping[TopicPartition, int]) -> None:
        """:raises LeaseLost: a partition is not the member's any more; abort the transaction."""
        self._current()
        assert isinstance(source, KafkaRecordSource)
        metadata = await source.group_metadata(list(positions))
        owned = source.assignment()
        for partition in positions:
            if partition not in owned:
                # Ownership ends before a new generation begins, so metadata got while it lasted is fenced right.
                raise LeaseLost(
                    f"Partition {partition.partition} of topic {partition.topic!r} is not this member's any more",
                    advice="Abort the transaction: its new owner reads from the last commit on",
                )
        self._positions = (
            [NativePartition(*place, source.log_ends.beyond(place, at)) for place, at in positions.items()],
            metadata,
        )

    def check_source(self, source: MessageSource) -> None:
        ends_of(source, self._connection)

    async def add_acks(self, source: MessageSource, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._current()
        produce = partial(self._publish, receipts=False, placed=True)
        return await ends_of(source, self._connection).write(messages, produce)

    def acks_undone(self, source: MessageSource, messages: Sequence[Message[Any]]) -> None:
        ends_of(source, self._connection).undone(messages)

    async def commit(self) -> None:
        committing = _Committing(self._positions)
        try:
            thread = self._current()
            await self._attempt("commit", committing)
        except TransactionAborted:
            self._since = None
            raise
        except BrokerError as error:
            if committing.positions is not None or not _must_abort(error):
                raise
            await self.abort()
            raise TransactionAborted(f"The transaction was undone: {error.message}", native=error) from error
        self._since = None
        self._begun = thread if committing.begun else None

    async def abort(self) -> None:
        self._check()
        thread = self._thread
        if self._since is None or thread is None:
            self._since = None
            return
        try:
            await self._attempt("abort", lambda producer: producer.abort_transaction(_SLICE))
        except TransactionAborted:
            logger.debug("The broker had undone the transaction of %r", self._id)
        except BrokerError as error:
            found = _native(error)
            if found is None or found.code() != KafkaError._STATE:
                raise
        self._since = None
        if thread.gap and self._thread is thread:
            await self._mend_gap(thread)

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
            # Readers of committed data wait for its end, and the broker would take the whole timeout.
            try:
                async with asyncio.timeout(_ABORT_ON_CLOSE):
                    await self._repeat(thread, "abort", lambda producer: producer.abort_transaction(_SLICE))
            except (BrokerError, TimeoutError) as error:
                logger.debug("The transaction of %r is left to the broker: %s", self._id, error)
        await thread.stop(_CLOSE)

    # -- inside --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"The transactional publisher {self._id!r} was closed")
        if self._dead is not None:
            raise TransactionFatal(self._dead.message, native=self._dead)

    def _current(self) -> _TransactionThread:
        self._check()
        if self._since is None:
            raise BackendError("No transaction is open", advice="Begin one first")
        if self._thread is None:
            raise self._timed_out()
        return self._thread

    async def _is_ours(self, theirs: Connection) -> bool:
        if theirs is not self._same_cluster:
            if await cluster_id(theirs) != await cluster_id(self._connection):
                return False
            self._same_cluster = theirs
        return True

    async def _renew(self) -> None:
        """A new producer of the id."""
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
        )
        try:
            await thread.start()
            await self._repeat(thread, "open", lambda producer: producer.init_transactions(_SLICE))
        except BaseException:
            await thread.stop(_CLOSE)
            raise
        self._thread = thread

    async def _mend_gap(self, thread: _TransactionThread) -> None:
        """A new producer; at once, since nobody has fenced the old one, which has just aborted."""
        self._thread = None
        await thread.stop(_CLOSE)
        try:
            await self._renew()
        except BrokerError as error:
            logger.debug("The producer of %r is made with the next transaction: %s", self._id, error)

    async def _attempt(self, what: str, function: Callable[[Producer], Any]) -> None:
        """A call of the open transaction; what it says of the producer is drawn from it."""
        thread = self._thread
        if thread is None:
            raise self._timed_out()
        try:
            await self._repeat(thread, what, function)
        except BrokerError as error:
            found = _native(error)
            if isinstance(error, TransactionFatal) or (found is not None and found.fatal()):
                raise await self._gone(found) from error
            raise

    async def _repeat(self, thread: _TransactionThread, what: str, function: Callable[[Producer], Any]) -> None:
        """Call until it is done, or cannot be."""
        patience = max(self._timeout, _REQUESTS * self._connection.settings.request_timeout)
        deadline = monotonic() + patience
        while True:
            try:
                await thread.call(lambda client: function(client.get()))
                return
            except BrokerError:
                raise
            except Exception as error:
                found = kafka_error(error)
                tried = f"Transaction of {self._id!r}: failed to {what} it"
                if found is None or not found.retriable() or found.fatal():
                    raise translate(error, tried) from error
                if monotonic() >= deadline and found.code() == KafkaError._TIMED_OUT:
                    raise OperationTimeout(
                        f"{tried}: its coordinator, a broker, did not answer within {patience:g} s",
                        native=error,
                        advice="See whether it runs; transaction_timeout_ms and request_timeout say how long to wait",
                    ) from error
                if monotonic() >= deadline:
                    raise translate(error, tried) from error
                if found.code() != KafkaError._TIMED_OUT:
                    await asyncio.sleep(_PAUSE)

    async def _gone(self, error: KafkaError | None) -> BrokerError:
        """The producer is dead: because the broker gave the transaction up, or because another has the id."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop(_CLOSE)
        if self._dead is not None:
            return self._dead
        if self._since is not None and monotonic() - self._since >= self._timeout:
            return self._timed_out()
        if thread is not None and thread.gap and error is not None and error.code() == KafkaError.INVALID_TXN_STATE:
            # What is refused when it is all there is begins no transaction at the broker, and none can be undone.
            return TransactionAborted(f"The transaction of {self._id!r} has not begun at the broker")
        fenced = error is None or error.code() in FENCED
        reason = "was fenced: another publisher of this id was opened" if fenced else "has failed for good"
        detail = "" if error is None or fenced else f": {error.str()}"
        self._dead = TransactionFatal(f"Transactional publisher {self._id!r} {reason}{detail}")
        return self._dead

    def _timed_out(self) -> TransactionAborted:
        return TransactionAborted(
            f"The transaction of {self._id!r} was open for more than {self._timeout:g} s and was undone by the broker",
            advice="Do less in one transaction, or raise transaction_timeout_ms",
        )


class _Committing:
    """The end of a transaction, in one call of the thread, which is repeated until it is done.

    What can be done for the next transaction without asking a broker is done there too: each call costs two changes
    of threads.
    """

    def __init__(self, positions: tuple[list[NativePartition], Any] | None) -> None:
        self.positions = positions
        """What is not sent yet."""
        self.begun = False
        """Whether the next transaction has begun."""

    def __call__(self, producer: Producer) -> None:
        if self.positions is not None:
            producer.send_offsets_to_transaction(*self.positions, _SLICE)
            self.positions = None
        producer.commit_transaction(_SLICE)
        with suppress(KafkaException):  # who begins the next one tries again, and is told
            producer.begin_transaction()
            self.begun = True


def _native(error: BrokerError) -> KafkaError | None:
    """What the client said."""
    return kafka_error(error if error.native is None else error.native)


def _must_abort(error: BrokerError) -> bool:
    found = _native(error)
    return found is not None and found.txn_requires_abort()
