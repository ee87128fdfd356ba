"""Messages of one source that are acked in transactions, until these end. Used on one event loop.

While the transaction is open, leases are renewed; the message can still be lost by `max_lease`, by the broker or by the
consumer's close, and then the transaction must not commit. While the transaction commits, the message is not touched.
After an abort the message is open again; if its handler has returned, the message is settled as if the handler failed.
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
    """:param failed: settles a message whose handler has returned, by the retry policy."""

    def __init__(self, owner: Owner, failed: Callable[[Message[Any], Exception], None]) -> None:
        self._owner = owner
        self._failed = failed
        self._waiting: dict[Message[Any], bool] = {}
        """Those of open transactions, and whether a handler had each."""
        self._ending: dict[Message[Any], bool] = {}
        """Those of which the commit has begun."""

    @property
    def source(self) -> MessageSource:
        return self._owner.source

    def waits(self, message: Message[Any]) -> bool:
        """Whether its transaction is open, and does not commit yet."""
        return message in self._waiting

    def check_free(self, message: Message[Any]) -> None:
        """:raises AlreadySettled: it is acked in a transaction that is not over."""
        if message in self._waiting or message in self._ending:
            raise AlreadySettled(
                f"Message {message.id!r} of topic {message.topic!r} is acked in a transaction that is not over",
                advice="It is acked by the commit; leave the block with an exception to keep it",
            )

    def join(self, message: Message[Any]) -> None:
        """It is to be acked by a transaction.

        :raises LeaseLost: its lease ended.
        :raises AlreadySettled: it was settled, or is acked in another transaction.
        """
        self.check_free(message)
        if not message.begin_settling(Outcome.ACK):
            raise AlreadySettled(f"Message {message.id!r} of topic {message.topic!r} was acked before")
        self._waiting[message] = message.in_use

    def leave(self, message: Message[Any]) -> None:
        """It joined for nothing; it is as it was."""
        self._waiting.pop(message)
        message.state, message.outcome = SettleState.OPEN, None

    def begin(self, messages: Sequence[Message[Any]]) -> list[Message[Any]]:
        """Their transaction is about to commit; those that are not ours any more, with which it must not."""
        for message in messages:
            self._ending[message] = self._waiting.pop(message)
        return [message for message in messages if not _is_ours(message)]

    def over(self, messages: Sequence[Message[Any]], error: BrokerError | None) -> None:
        """They are acked, or `error` says why they are lost or their outcome is unknown."""
        for message in messages:
            self._waiting.pop(message, None)
            self._ending.pop(message, None)
            if error is None:
                # What took it back meanwhile did not know that its ack was on the broker before.
                message.state = SettleState.SETTLING
        self._owner.concluded([Settlement(message, Outcome.ACK) for message in messages], [error] * len(messages))

    def ours(self, messages: Sequence[Message[Any]]) -> list[Message[Any]]:
        """Those that were not taken back meanwhile."""
        return [message for message in messages if _is_ours(message)]

    def aborted(self, messages: Sequence[Message[Any]], error: BaseException) -> None:
        """The transaction was, for this reason."""
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
        """Give back those whose transactions do not commit yet; these are to find that they lost them."""
        for message in list(self._waiting):
            if _is_ours(message):
                message.state, message.outcome = SettleState.OPEN, None
                self._owner.release([message])


def _is_ours(message: Message[Any]) -> bool:
    return message.state is SettleState.SETTLING and message.outcome is Outcome.ACK
