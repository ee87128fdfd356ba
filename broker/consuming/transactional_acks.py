"""`TransactedMessages`: the messages of one source that open transactions ack. Used on one event loop.

While the transaction is open, leases are renewed. If `max_lease`, the broker or a close of the consumer ends a lease,
the transaction must not commit. While the transaction commits, its messages are left alone. After an abort they are
open again; a message whose handler has returned is settled as if the handler had failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from broker.driver.contract import MessageSource, Settlement
from broker.errors import AlreadySettled, BrokerError
from broker.messages import Message, Outcome, SettleState

__all__ = ["TransactedMessages"]


class Owner(Protocol):
    """The source whose messages these are (`InFlight`)."""

    messages: dict[Message[Any], int]
    source: MessageSource

    def concluded(self, settlements: Sequence[Settlement], results: Sequence[BrokerError | None]) -> None: ...
    def release(self, messages: Sequence[Message[Any]], delay: float | None = None) -> None: ...


class TransactedMessages:
    """Keeps track of messages in transactions.

    :param failed: settles a message whose handler has returned, by the retry policy.
    """

    def __init__(self, owner: Owner, failed: Callable[[Message[Any], Exception], None]) -> None:
        self._owner = owner
        self._failed = failed
        self._waiting: dict[Message[Any], bool] = {}
        """Messages of open transactions, and whether a handler had each."""
        self._ending: dict[Message[Any], bool] = {}
        """Messages of transactions whose commit has begun."""

    @property
    def source(self) -> MessageSource:
        return self._owner.source

    def waits(self, message: Message[Any]) -> bool:
        """Whether the message is in an open transaction whose commit has not begun."""
        return message in self._waiting

    def check_free(self, message: Message[Any]) -> None:
        """:raises AlreadySettled: a transaction that has not ended acks the message."""
        if message in self._waiting or message in self._ending:
            raise AlreadySettled(
                f"Message {message.id!r} of topic {message.topic!r} is acked in an open transaction",
                advice="The commit acks it; leave the block with an exception to abort",
            )

    def join(self, message: Message[Any]) -> None:
        """Add a message to a transaction.

        :raises LeaseLost: its lease ended.
        :raises AlreadySettled: the message was settled, or is in a transaction.
        """
        self.check_free(message)
        if not message.begin_settling(Outcome.ACK):
            raise AlreadySettled(f"Message {message.id!r} of topic {message.topic!r} was acked before")
        self._waiting[message] = message.in_use

    def leave(self, message: Message[Any]) -> None:
        """Undo `join`."""
        self._waiting.pop(message)
        message.state, message.outcome = SettleState.OPEN, None

    def begin(self, messages: Sequence[Message[Any]]) -> list[Message[Any]]:
        """Their transaction is about to commit; return the messages that are no longer ours, so that it must not."""
        for message in messages:
            self._ending[message] = self._waiting.pop(message)
        return [message for message in messages if not _is_ours(message)]

    def over(self, messages: Sequence[Message[Any]], error: BrokerError | None) -> None:
        """The messages are acked; with `error`, they are lost or their outcome is unknown."""
        for message in messages:
            self._waiting.pop(message, None)
            self._ending.pop(message, None)
            if error is None:
                # Even if it was lost meanwhile: its ack was on the broker before.
                message.state = SettleState.SETTLING
        self._owner.concluded([Settlement(message, Outcome.ACK) for message in messages], [error] * len(messages))

    def ours(self, messages: Sequence[Message[Any]]) -> list[Message[Any]]:
        """Those of these messages that are still ours."""
        return [message for message in messages if _is_ours(message)]

    def aborted(self, messages: Sequence[Message[Any]], error: BaseException) -> None:
        """The transaction was aborted because of `error`."""
        for message in messages:
            had_handler = self._waiting.pop(message, False) | self._ending.pop(message, False)
            if not _is_ours(message):
                continue
            if message not in self._owner.messages:
                message.state = SettleState.LOST
                continue
            message.state, message.outcome = SettleState.OPEN, None
            if had_handler and not message.in_use:
                if isinstance(error, Exception):
                    self._failed(message, error)
                else:
                    self._owner.release([message])

    def close(self) -> None:
        """Release the messages of transactions whose commit has not begun; these commits will fail."""
        for message in list(self._waiting):
            if _is_ours(message):
                message.state, message.outcome = SettleState.OPEN, None
                self._owner.release([message])


def _is_ours(message: Message[Any]) -> bool:
    return message.state is SettleState.SETTLING and message.outcome is Outcome.ACK
