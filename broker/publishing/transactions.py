"""Transactions: publish, ack messages and commit a record consumer's positions, all or nothing.

*Concurrency.* A publisher or consumer takes part in one transaction at a time; a second one is refused. Calls in a
transaction may overlap; the end of the block waits for them. *Cancellation.* A cancelled block aborts the transaction,
and the abort is carried out. *Failure.* The end of the block raises `TransactionAborted` (rolled back, the consumer is
rewound: repeat the work) or `TransactionFatal` (the publisher is fenced or broken, the consumer is rewound: open a new
publisher). An exception inside the block aborts, rewinds, and is raised again. After an abort the messages to ack are
open again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, cast, overload

from broker.capabilities import Capabilities
from broker.driver.assignments import check_own_positions
from broker.driver.commits import Positions
from broker.driver.concurrency import TaskSet, check_loop
from broker.driver.contract import Backend, TransactionSpi
from broker.driver.limits import MessageLimits
from broker.driver.optional import ChecksConsumers
from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    OffsetOutOfRange,
    PublishError,
    TransactionAborted,
    TransactionFatal,
    Unsupported,
)
from broker.hooks import Hooks, PublishCall, Published, logger
from broker.messages import Message
from broker.names import check_name
from broker.outbound import OutboundMessage, check_batch, check_no_fields
from broker.protocols import BatchedRecordStream, OwnPositions
from broker.publishing.transactional_acks import TransactedAcks, checked
from broker.reading.membership import Membership
from broker.reading.record_consumer import RecordConsumer
from broker.receipts import Receipt

__all__ = ["OpenTransaction", "TransactionalPublisherFacade", "open_transactional_publisher"]


_LONGEST_END: Final = 30.0


class TransactionalPublisherFacade:
    """Implements `TransactionalPublisher`; created by `bus.transactional_publisher`."""

    def __init__(self, transactional_id: str, spi: TransactionSpi, capabilities: Capabilities, hooks: Hooks) -> None:
        self.transactional_id = transactional_id
        self.spi = spi
        self.hooks = hooks
        self.limits = MessageLimits(capabilities)
        self.backend = capabilities.backend
        self._current: OpenTransaction | None = None
        self._dead: BrokerError | None = None
        self._closed = False
        self._ending: asyncio.Task[None] | None = None
        self.loop = asyncio._get_running_loop()
        """The loop of the publisher and its transactions; None if it was made on none."""

    def transaction(
        self,
        consumer: BatchedRecordStream[Any] | None = None,
        *,
        positions: OwnPositions | Callable[[], OwnPositions] | None = None,
        rewind: bool = True,
    ) -> AbstractAsyncContextManager[OpenTransaction]:
        """A transaction, for `async with`. Leaving the block commits.

        :param consumer: a `RecordConsumer` of the same broker; commit the positions after all records that it has
            delivered, as part of the transaction. The consumer itself commits nothing while the transaction is open.
        :param positions: commit these positions of the consumer instead, as `RecordConsumer.commit_positions` would; a
            mapping, or a function that returns one, which is read at the end of the block. Positions that
            `commit_positions` refuses, and errors of the function, abort the transaction and are raised.
        :param rewind: False leaves the consumer where it is after an abort, for work that is kept and written again.
        :raises TransactionAborted: on leaving; the transaction was rolled back and the consumer rewound: repeat the
            work. A message that could not be published aborts the transaction.
        :raises TransactionFatal: on entering or leaving; the publisher is fenced or broken: open a new one.
        :raises Unsupported: on entering; another transaction of the publisher or of the consumer is open.
        :raises ConfigurationError: on entering; the consumer is of another broker.
        """
        if consumer is not None and not isinstance(consumer, RecordConsumer):
            raise ConfigurationError(
                f"A transaction cannot take the positions of a {type(consumer).__name__}",
                advice="Give it the consumer made by bus.records(...)",
            )
        if positions is not None:
            if consumer is None:
                raise ConfigurationError(
                    "A transaction with positions has no consumer", advice="Pass it: transaction(log, positions=...)"
                )
            if not callable(positions):
                check_own_positions(positions)
        return _Block(self, consumer, positions, rewind)

    async def close(self) -> None:
        """Close the publisher; the broker aborts a transaction that is still open. May be called twice.

        Waits for the end of a transaction whose block was cancelled, at most 30 seconds.
        """
        check_loop(self.loop)
        if not self._closed:
            self._closed = True
            if self._ending is not None:
                await asyncio.wait((self._ending,), timeout=_LONGEST_END)
            await self.spi.close()

    async def begin(
        self,
        member: Membership | None,
        positions: OwnPositions | Callable[[], OwnPositions] | None = None,
        *,
        rewind: bool = True,
    ) -> OpenTransaction:
        """Enter a transaction."""
        check_loop(self.loop)
        if self._current is not None and self._ending is not None:
            # A cancelled block did not wait for the end of its transaction.
            await asyncio.wait((self._ending,), timeout=_LONGEST_END)
        if self._closed:
            raise Closed(f"Transactional publisher {self.transactional_id!r} is closed")
        if self._dead is not None:
            raise TransactionFatal(
                f"Transactional publisher {self.transactional_id!r} ended: {self._dead.message}", native=self._dead
            )
        if self._current is not None:
            raise Unsupported(
                f"A transaction of {self.transactional_id!r} is open already",
                advice="Transactions neither nest nor overlap; give each task a publisher with its own id",
            )
        self._current = transaction = OpenTransaction(self, member, positions, rewind=rewind)
        try:
            await transaction.begin()
        except asyncio.CancelledError as error:
            self.end(transaction, error)
            raise
        except BaseException as error:
            self.ended(error)
            raise
        return transaction

    def end(self, transaction: OpenTransaction, error: BaseException | None) -> asyncio.Task[None]:
        """Leave a transaction; the task goes on when the caller is cancelled."""
        self._ending = asyncio.get_running_loop().create_task(transaction.end(error), name="broker-transaction-end")
        self._ending.add_done_callback(_retrieve_exception)
        return self._ending

    def ended(self, error: BaseException | None = None) -> None:
        """The transaction has ended; a fatal error ends the publisher too."""
        self._current = None
        if isinstance(error, TransactionFatal):
            self._dead = error


class OpenTransaction:
    """Implements `Transaction`."""

    def __init__(
        self,
        publisher: TransactionalPublisherFacade,
        member: Membership | None,
        positions: OwnPositions | Callable[[], OwnPositions] | None,
        *,
        rewind: bool,
    ) -> None:
        self._publisher = publisher
        self._spi = publisher.spi
        self._member = member
        self._own_positions = positions
        self._rewinds = rewind
        self._failure: BrokerError | None = None
        self._calls = TaskSet(
            "broker-transaction-publish", lambda error: logger.debug("A publish in a transaction raised: %r", error)
        )
        self._acks = TransactedAcks(publisher.spi, publisher.backend)
        self._over = False

    async def publish(
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
        """Publish one message in the transaction; readers of committed data see it after the commit.

        :raises InvalidMessage, MessageTooLarge, Unsupported: the broker cannot carry the message; the transaction stays
            open.
        :raises BrokerError: the message was not published; the transaction will be aborted.
        :raises Closed: the block has ended.
        """
        if isinstance(payload, OutboundMessage):
            check_no_fields(
                payload,
                key=key,
                attributes=attributes,
                id=id,
                deliver_at=deliver_at,
                ttl=ttl,
                partition=partition,
            )
            message = payload
        else:
            message = OutboundMessage(payload, key, attributes, id, deliver_at, ttl, partition)
        outcome = (await self._publish(topic, [message]))[0]
        if isinstance(outcome, BrokerError):
            raise outcome
        return cast("Receipt", outcome)

    @overload
    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: Literal[True] = True
    ) -> list[Receipt]: ...
    @overload
    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: Literal[False]
    ) -> None: ...
    @overload
    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: bool
    ) -> list[Receipt] | None: ...
    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: bool = True
    ) -> list[Receipt] | None:
        """Publish many messages in the transaction, in order per key; return their receipts.

        :param receipts: False returns None, which is faster on some brokers.
        :raises PublishError: some messages failed; the transaction will be aborted.
        :raises InvalidMessage, MessageTooLarge, Unsupported: the broker cannot carry one of the messages; none was
            published, and the transaction stays open.
        :raises Closed: the block has ended.
        """
        outcomes = await self._publish(topic, _outbound(payloads), receipts=receipts)
        if any(isinstance(outcome, BrokerError) for outcome in outcomes):
            raise PublishError(outcomes)
        return cast("list[Receipt]", list(outcomes)) if receipts else None

    async def ack(self, message: Message[Any]) -> None:
        """Ack a message with the commit of the transaction: its ack and the published messages count, or neither.

        Until then its lease is renewed. After an abort the message is open again.

        :raises Unsupported: the transaction cannot ack messages of this consumer; the error says why.
        :raises LeaseLost, AlreadySettled: the message is not open.
        :raises Closed: the block has ended.
        """
        self._add_acks([message])

    async def ack_batch(self, messages: Iterable[Message[Any]]) -> None:
        """`ack` for many messages: for all of them or, if the call raises, for none.

        :raises Unsupported, LeaseLost, AlreadySettled, Closed: as for `ack`.
        """
        self._add_acks(checked(messages))

    def _add_acks(self, messages: Sequence[Message[Any]]) -> None:
        check_loop(self._publisher.loop)
        if self._over:
            raise Closed("The transaction is over", advice="Ack inside its block")
        self._acks.add(messages)

    async def _publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        check_loop(self._publisher.loop)
        if not messages:
            return []
        if self._over:
            raise Closed("The transaction is over", advice="Publish inside its block")
        check_name(topic, "topic")
        with PublishCall(self._publisher.hooks.publishing, topic, messages) as call:
            outcomes = call.outcomes = await self._send_checked(topic, call.messages, receipts=receipts)
        return outcomes

    async def _send_checked(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool
    ) -> Sequence[Receipt | BrokerError | None]:
        for refusal in self._publisher.limits.refused(messages).values():
            raise refusal
        # A task of its own: a cancelled caller must not leave a half-sent batch behind that commits.
        return await asyncio.shield(self._calls.spawn(self._send(topic, messages, receipts=receipts)))

    async def _send(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool
    ) -> Sequence[Receipt | BrokerError | None]:
        clock = asyncio.get_running_loop().time
        began = clock()
        outcomes: Sequence[Receipt | BrokerError | None]
        try:
            outcomes = await self._spi.publish(topic, messages, receipts=receipts)
        except BrokerError as error:
            self._failed(error)
            outcomes = [error] * len(messages)
        except Exception as error:
            failure = BackendError(f"The backend failed to publish: {error}", native=error)
            self._failed(failure)
            outcomes = [failure] * len(messages)
        if self._publisher.hooks.hears_publishes:
            self._publisher.hooks.emit(Published(topic=topic, outcomes=outcomes, seconds=clock() - began))
        for outcome in outcomes:
            if isinstance(outcome, BrokerError):
                self._failed(outcome)
        return outcomes

    def _failed(self, error: BrokerError) -> None:
        if self._failure is None or isinstance(error, TransactionFatal):
            self._failure = error

    # -- begin and end, called by the block ----------------------------------------------------------------

    async def begin(self) -> None:
        """Begin the transaction on the broker."""
        self._source = None if self._member is None else self._member.enter_transaction()
        self._opening = asyncio.ensure_future(self._begin())
        try:
            await asyncio.shield(self._opening)
        except Exception:
            if self._member is not None:
                self._member.leave_transaction()
            raise

    async def _begin(self) -> None:
        if self._source is not None and isinstance(self._spi, ChecksConsumers):
            await self._spi.check_consumer(self._source)
        await self._spi.begin()

    async def end(self, error: BaseException | None) -> None:
        """Commit the transaction, or abort it because the block raised `error`.

        :raises TransactionAborted, TransactionFatal: the commit failed.
        """
        self._over = True
        outcome: BaseException | None = None
        try:
            await asyncio.wait((self._opening, *self._calls))
            await (self._commit() if error is None else self._abort(error))
        except BaseException as raised:
            outcome = raised
            raise
        finally:
            self._publisher.ended(outcome)
            self._acks.end(outcome if error is None else error)

    async def _commit(self) -> None:
        if self._failure is not None:
            await self._undo(self._failure, undone=False)
        positions = await self._positions()
        undone = False
        try:
            if positions and self._source is not None:
                at = {partition: position for partition, (_, position) in positions.items()}
                await self._spi.add_offsets(self._source, at)
            await self._acks.write()
            self._acks.committing()
            undone = True
            await self._spi.commit()
        except BrokerError as error:
            await self._undo(error, undone=undone and isinstance(error, TransactionAborted))
        except Exception as error:
            await self._undo(BackendError(f"The backend failed to commit: {error}", native=error), undone=False)
        if self._member is not None:
            self._member.leave_transaction(positions)

    async def _positions(self) -> Positions | None:
        """The positions to commit. If they are refused, abort and raise."""
        if self._member is None:
            return None
        own = self._own_positions
        try:
            wanted = None if own is None else check_own_positions(own() if callable(own) else own)
            return await self._member.positions_in_transaction(wanted)
        except (ConfigurationError, OffsetOutOfRange) as error:
            # Repeating the work would not help.
            await self._abort(error)
            raise
        except BrokerError as error:
            await self._undo(error, undone=False)
        except Exception as error:
            await self._abort(error)
            raise

    async def _undo(self, error: BrokerError, *, undone: bool) -> NoReturn:
        """Abort unless `undone`, rewind the consumer if asked to, and raise TransactionAborted or TransactionFatal."""
        outcome: BrokerError = error
        try:
            if not undone and not isinstance(error, TransactionFatal):
                await self._spi.abort()
        except TransactionAborted:
            pass
        except TransactionFatal as fatal:
            outcome = fatal
        except Exception as failure:
            # The outcome is unknown: only a new producer, which fences this one, can decide it.
            outcome = TransactionFatal(
                f"The transaction could be neither committed nor aborted: {failure}", native=error
            )
        await self._rewind()
        if isinstance(outcome, (TransactionAborted, TransactionFatal)):
            raise outcome
        raise TransactionAborted(f"The transaction was undone: {error.message}", native=error) from error

    async def _abort(self, raised: BaseException) -> None:
        """Abort, and rewind if asked to, after the block raised, without hiding its exception."""
        try:
            await self._spi.abort()
        except TransactionAborted:
            pass
        except Exception as error:
            logger.warning("Aborting a transaction failed: %s", error)
            fatal = TransactionFatal(f"A transaction could not be aborted: {error}", native=error)
            self._publisher.ended(error if isinstance(error, TransactionFatal) else fatal)
            raised.add_note(f"The transaction could not be aborted either: {error}")
        await self._rewind()

    async def _rewind(self) -> None:
        if self._member is not None:
            # A revocation may wait for the transaction, and the seek for the revocation.
            self._member.leave_transaction()
            if self._rewinds:
                await self._member.rewind()


class _Block(AbstractAsyncContextManager[OpenTransaction]):
    """`async with publisher.transaction(...)`."""

    def __init__(
        self,
        publisher: TransactionalPublisherFacade,
        consumer: RecordConsumer[Any] | None,
        positions: OwnPositions | Callable[[], OwnPositions] | None,
        rewind: bool,
    ) -> None:
        self._publisher = publisher
        self._consumer = consumer
        self._positions = positions
        self._rewind = rewind
        self._transaction: OpenTransaction | None = None

    async def __aenter__(self) -> OpenTransaction:
        member = None if self._consumer is None else self._consumer.member
        self._transaction = await self._publisher.begin(member, self._positions, rewind=self._rewind)
        return self._transaction

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await asyncio.shield(self._publisher.end(transaction, error))


def _outbound(payloads: Sequence[bytes | OutboundMessage]) -> list[OutboundMessage]:
    check_batch(payloads)
    return [p if isinstance(p, OutboundMessage) else OutboundMessage(p) for p in payloads]


def _retrieve_exception(ending: asyncio.Task[None]) -> None:
    """A cancelled caller does not get the outcome; asyncio must not log it as never retrieved."""
    if not ending.cancelled():
        ending.exception()


@asynccontextmanager
async def open_transactional_publisher(
    transactional_id: str,
    backend: Backend,
    capabilities: Capabilities,
    hooks: Hooks,
    check_open: Callable[[], None],
) -> AsyncGenerator[TransactionalPublisherFacade]:
    """Open the publisher of this id, which fences an older one; close it when the block ends.

    :param check_open: raises Closed if the bus is not open.
    :raises Unsupported: the backend has no transactions.
    """
    if not capabilities.publish.transactions:
        raise Unsupported(f"Backend {capabilities.backend!r} has no transactions")
    check_name(transactional_id, "transactional id")
    check_open()
    publisher = TransactionalPublisherFacade(
        transactional_id, await backend.transaction(transactional_id), capabilities, hooks
    )
    try:
        yield publisher
    finally:
        await publisher.close()
