"""Transactions on an in-memory server: published messages and positions are committed atomically.

Opening a producer fences the previous one of the same id: its open transaction is aborted, and all its further calls
are fatal. A transaction that is open for too long by the server's clock is aborted, and its commit raises. Calls do not
suspend; a producer has one transaction at a time. Ids are not deduplicated within a transaction, because an aborted one
has stored nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from broker import (
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    OutboundMessage,
    Receipt,
    TopicPartition,
    TransactionAborted,
    TransactionFatal,
)
from broker.driver import RecordSource
from broker_inmem.connection import Connection
from broker_inmem.publishing import store
from broker_inmem.records import InmemRecordSource
from broker_inmem.server import Broker, ServerTransaction

__all__ = ["InmemTransaction"]


class InmemTransaction:
    """Implements `TransactionSpi` and `ChecksConsumers`."""

    def __init__(
        self,
        broker: Broker,
        connection: Connection,
        transactional_id: str,
        *,
        on_close: Callable[[InmemTransaction], object],
    ) -> None:
        self._broker = broker
        self._connection = connection
        self._id = transactional_id
        self._on_close = on_close
        self._closed = False
        with broker.lock:
            connection.check()
            if broker.faults.armed:
                broker.faults.check("open")
            self._producer = producer = broker.producer(transactional_id)
            producer.epoch += 1
            self._epoch = producer.epoch
            if producer.current is not None:
                producer.current.end(committed=False, now=broker.clock.time())
                producer.current = None

    async def begin(self) -> None:
        broker = self._broker
        with broker.lock:
            self._check("transaction")
            if self._producer.current is not None:
                raise BackendError("A transaction of this producer is open already", advice="Commit or abort it first")
            self._producer.current = ServerTransaction()
            broker.add_deadline(broker.clock.time() + broker.options.transaction_seconds, self._producer.current)

    async def publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        broker = self._broker
        with broker.lock:
            current = self._current(None)
            now = broker.clock.time()
            found = broker.topic(topic, now)
            if not current.state.open:
                raise self._timed_out()
            return store(broker.faults, found, messages, now, current.work(found))

    async def check_consumer(self, source: RecordSource) -> None:
        self._checked_source(source)

    async def add_offsets(self, source: RecordSource, positions: Mapping[TopicPartition, int]) -> None:
        """:raises TransactionAborted: a partition was lost, and the transaction was aborted."""
        broker = self._broker
        source = self._checked_source(source)
        with broker.lock:
            current = self._current(None)
            current.offsets.append((source.group, source.claims(positions)))
            self._check_offsets(current)

    async def commit(self) -> None:
        broker = self._broker
        with broker.lock:
            current = self._current("commit")
            now = broker.clock.time()
            broker.expire_transactions(now)
            if current.expired:
                self._producer.current = None
                raise self._timed_out()
            self._check_offsets(current)
            for group, claims in current.offsets:
                group.commit(claims)
            current.end(committed=True, now=now)
            self._producer.current = None

    async def abort(self) -> None:
        broker = self._broker
        with broker.lock:
            self._check("transaction")
            current, self._producer.current = self._producer.current, None
            if current is not None:
                current.end(committed=False, now=broker.clock.time())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        broker = self._broker
        with broker.lock:
            current = self._producer.current
            if current is not None and self._producer.epoch == self._epoch and self._connection.usable:
                current.end(committed=False, now=broker.clock.time())
                self._producer.current = None
        self._on_close(self)

    def _checked_source(self, source: RecordSource) -> InmemRecordSource:
        if not isinstance(source, InmemRecordSource) or source.broker is not self._broker:
            raise ConfigurationError(
                f"The consumer reads from another broker than the transaction of {self._id!r}, and its positions "
                "cannot be committed there",
                advice="Open the consumer and the transactional publisher on one bus",
            )
        return source

    def _current(self, operation: str | None) -> ServerTransaction:
        self._check("transaction" if operation is None else "commit")
        current = self._producer.current
        if current is None:
            raise BackendError("No transaction is open", advice="Call begin first")
        return current

    def _check(self, operation: str) -> None:
        if self._closed:
            raise Closed(f"The transactional publisher {self._id!r} was closed")
        self._connection.check()
        if self._producer.epoch != self._epoch:
            raise TransactionFatal(f"Another publisher of the id {self._id!r} was opened; this one is fenced")
        if self._broker.faults.armed:
            self._broker.faults.check("commit" if operation == "commit" else "transaction")

    def _check_offsets(self, current: ServerTransaction) -> None:
        now = self._broker.clock.time()
        for group, claims in current.offsets:
            group.advance(now)
            for partition, claim in claims.items():
                refusal = group.refusal(partition, claim)
                if refusal is not None:
                    current.end(committed=False, now=now)
                    self._producer.current = None
                    raise TransactionAborted(f"The transaction was aborted: {refusal.message}", native=refusal)

    def _timed_out(self) -> TransactionAborted:
        seconds = self._broker.options.transaction_seconds
        return TransactionAborted(f"The transaction was aborted: it was open for more than {seconds} s")
