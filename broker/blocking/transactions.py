"""Transactions without `await`: `with publisher.transaction(log) as tx:`.

A publisher has one open transaction at a time. An interrupt inside the block aborts the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, cast, overload

from broker import protocols
from broker.blocking.messages import BlockingMessage
from broker.blocking.records import RecordConsumer
from broker.errors import Closed, ConfigurationError
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.protocols import OwnPositions
from broker.receipts import Receipt
from broker.threads.portal import Portal

__all__ = ["Transaction", "TransactionalPublisher"]


class TransactionalPublisher:
    """Publishes in transactions: readers of committed data see all messages of a transaction, or none."""

    def __init__(
        self, publisher: AbstractAsyncContextManager[protocols.TransactionalPublisher], portal: Portal
    ) -> None:
        self._context = publisher
        self._publisher: protocols.TransactionalPublisher | None = None
        self._portal = portal

    def __enter__(self) -> Self:
        self._publisher = self._portal.call(self._context.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._publisher = None
        return self._portal.call(self._context.__aexit__, kind, error, trace)

    def transaction(
        self,
        consumer: RecordConsumer[Any] | None = None,
        *,
        positions: OwnPositions | Callable[[], OwnPositions] | None = None,
        rewind: bool = True,
    ) -> Transaction:
        """A transaction, for `with`. Leaving the block commits.

        An exception in the block aborts the transaction, rewinds the consumer to its committed positions and is raised
        again.

        :param consumer: commit the positions after all records that it has delivered, as part of the transaction.
        :param positions: commit these positions of the consumer instead; a mapping, or a function that returns one,
            which is read at the end of the block, in its thread.
        :param rewind: False leaves the consumer where it is after an abort, for work that is kept and written again.
        :raises TransactionAborted: the transaction was rolled back and the consumer rewound; repeat the work.
        :raises TransactionFatal: the publisher is fenced; open a new one.
        """
        if self._publisher is None:
            raise Closed(
                "The transactional publisher is not open",
                advice="Use it as `with bus.transactional_publisher(...) as publisher:`",
            )
        inner = None if consumer is None else consumer.asynchronous
        read: list[OwnPositions] = []
        given = read.pop if callable(positions) else positions
        transaction = self._publisher.transaction(inner, positions=given, rewind=rewind)
        return Transaction(
            transaction, self._portal, (lambda: read.append(positions())) if callable(positions) else None
        )


class Transaction:
    """A transaction, open within its `with` block."""

    def __init__(
        self,
        transaction: AbstractAsyncContextManager[protocols.Transaction],
        portal: Portal,
        read_positions: Callable[[], None] | None = None,
    ) -> None:
        self._context = transaction
        self._read_positions = read_positions
        self._transaction: protocols.Transaction | None = None
        self._portal = portal

    def __enter__(self) -> Self:
        self._transaction = self._portal.call(self._context.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._transaction = None
        if error is None and self._read_positions is not None:
            try:
                self._read_positions()
            except BaseException as raised:
                self._portal.call(self._context.__aexit__, type(raised), raised, raised.__traceback__)
                raise
        return self._portal.call(self._context.__aexit__, kind, error, trace)

    def publish(
        self,
        topic: str,
        payload: bytes | OutboundMessage | None,
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Publish one message in the transaction.

        :raises BrokerError: the message was not published; the transaction will be aborted.
        """
        return self._portal.call(
            self._opened.publish,
            topic,
            payload,
            key=key,
            attributes=attributes,
            id=id,
            deliver_at=deliver_at,
            ttl=ttl,
            partition=partition,
        )

    @overload
    def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: Literal[True] = True
    ) -> list[Receipt]: ...
    @overload
    def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: Literal[False]
    ) -> None: ...
    @overload
    def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: bool
    ) -> list[Receipt] | None: ...
    def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: bool = True
    ) -> list[Receipt] | None:
        """Publish many messages in the transaction; return their receipts.

        :param receipts: False returns None, which is faster on some brokers.
        :raises PublishError: some messages failed; the transaction will be aborted.
        """
        return self._portal.call(self._opened.publish_batch, topic, payloads, receipts=receipts)

    def ack(self, message: BlockingMessage[Any]) -> None:
        """Ack a message with the commit of the transaction: its ack and the published messages count, or neither.

        :raises Unsupported: the transaction cannot ack messages of this consumer; the error says why.
        :raises LeaseLost, AlreadySettled: the message is not open.
        """
        self._portal.call(self._opened.ack, _asynchronous(message))

    def ack_batch(self, messages: Iterable[BlockingMessage[Any]]) -> None:
        """`ack` for many messages: for all of them or, if the call raises, for none."""
        self._portal.call(self._opened.ack_batch, [_asynchronous(message) for message in messages])

    @property
    def _opened(self) -> protocols.Transaction:
        if self._transaction is None:
            raise Closed("The transaction is not open", advice="Use it inside its `with` block")
        return self._transaction


def _asynchronous(message: object) -> Message[Any]:
    if not isinstance(message, BlockingMessage):
        raise ConfigurationError(
            f"A transaction cannot ack an object of type {type(message).__name__}",
            advice="Pass messages of bus.messages(...)",
        )
    return cast("BlockingMessage[Any]", message).asynchronous
