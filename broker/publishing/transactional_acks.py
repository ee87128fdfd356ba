"""`TransactedAcks`: the messages that one transaction acks. Used on one event loop.

Messages are checked at the call. Their acks are written last, directly before the commit: from then on their outcome
depends on the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from broker.consuming.failure_policy import FailurePolicy
from broker.consuming.transactional_acks import TransactedMessages
from broker.driver.contract import TransactionSpi
from broker.driver.optional import TransactionalAcks
from broker.errors import BrokerError, ConfigurationError, LeaseLost, SettleError, TransactionAborted, Unsupported
from broker.messages import Message

__all__ = ["TransactedAcks", "checked"]

_SETTLE_OTHERWISE: Final = "Call message.ack() after the transaction, and expect its output twice if that fails"


class TransactedAcks:
    """The acks of one transaction.

    :param backend: the name of the backend.
    """

    def __init__(self, spi: TransactionSpi, backend: str) -> None:
        self._spi = spi
        self._backend = backend
        self._messages: dict[TransactedMessages, list[Message[Any]]] = {}
        self._decided = False
        """Whether the commit has begun; then only its answer decides the outcome."""

    def add(self, messages: Sequence[Message[Any]]) -> None:
        """Add all of these messages or, if the call raises, none.

        :raises ConfigurationError: one is not a message.
        :raises Unsupported: the transaction cannot ack one of them.
        :raises LeaseLost, AlreadySettled: a message is not open.
        """
        owners = [self._owner_of(message) for message in messages]
        joined: list[tuple[TransactedMessages, Message[Any]]] = []
        try:
            for owner, message in zip(owners, messages, strict=True):
                owner.join(message)
                joined.append((owner, message))
        except BaseException:
            for owner, message in joined:
                owner.leave(message)
            raise
        for owner, message in joined:
            self._messages.setdefault(owner, []).append(message)

    async def write(self) -> None:
        """Write the acks into the transaction, before its commit.

        :raises TransactionAborted: a message was lost; the transaction must be aborted.
        :raises BrokerError: an ack could not be written; the transaction must be aborted.
        """
        lost = [message for owner, messages in self._messages.items() for message in owner.begin(messages)]
        if lost:
            raise _lost(lost[0], None)
        for owner, messages in list(self._messages.items()):
            assert isinstance(self._spi, TransactionalAcks)
            results = await self._spi.add_acks(owner.source, messages)
            lost_now = {m: error for m, error in zip(messages, results, strict=True) if isinstance(error, LeaseLost)}
            for message, error in lost_now.items():
                messages.remove(message)
                owner.over([message], error)
            for message, error in lost_now.items():
                raise _lost(message, error)
            for error in results:
                if error is not None:
                    raise error

    def committing(self) -> None:
        """The commit begins: the transaction may be committed even if the call fails."""
        self._decided = True

    def end(self, error: BaseException | None) -> None:
        """The transaction has ended: committed, or failed with this error."""
        messages_of, self._messages = self._messages, {}
        for owner, messages in messages_of.items():
            if error is None:
                owner.over(messages, None)
            elif self._decided and not isinstance(error, TransactionAborted):
                owner.over(messages, _unsure(error))
            else:
                assert isinstance(self._spi, TransactionalAcks)
                self._spi.acks_aborted(owner.source, owner.ours(messages))
                owner.aborted(messages, error)

    def _owner_of(self, message: object) -> TransactedMessages:
        if not isinstance(message, Message):
            raise ConfigurationError(
                f"A transaction cannot ack an object of type {type(message).__name__}",
                advice="Pass messages of bus.messages(...)",
            )
        if not isinstance(self._spi, TransactionalAcks):
            raise Unsupported(
                f"The transactions of backend {self._backend!r} ack no messages", advice=_SETTLE_OTHERWISE
            )
        if not isinstance(message.owner, FailurePolicy):
            raise Unsupported("The message does not come from a consumer, so there is nothing to ack")
        self._spi.check_source(message.owner.in_flight.source)
        return message.owner.in_flight.transacted


def checked(messages: Iterable[Message[Any]]) -> list[Message[Any]]:
    """The messages as a list.

    :raises ConfigurationError: this is a single message.
    """
    if isinstance(messages, Message):
        raise ConfigurationError("ack_batch takes many messages", advice="Call ack(message) for one")
    return list(messages)


def _lost(message: Message[Any], error: LeaseLost | None) -> TransactionAborted:
    lost = f"message {message.id!r} of topic {message.topic!r} was lost before the commit"
    aborted = TransactionAborted(
        f"The transaction was undone: {lost if error is None else error.message}",
        native=error,
        advice="The message is redelivered; keep transactions shorter than leases, or make the lease longer",
    )
    aborted.__cause__ = error
    return aborted


def _unsure(error: BaseException) -> BrokerError:
    return SettleError(
        f"The message was acked in a transaction whose outcome is unknown: {error}",
        native=error,
        advice="The message is redelivered if the transaction was not committed",
    )
