"""What a backend's transactions may offer beyond `TransactionSpi`: each is optional.

The core asks for the acks of messages last of all, when everything else is in the transaction, so that they are
undecided for as short as can be: until then messages are held, and their leases renewed, as without a transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from broker.driver.contract import MessageSource, RecordSource
from broker.errors import BrokerError
from broker.messages import Message

__all__ = ["ChecksConsumers", "TransactionalAcks"]


@runtime_checkable
class ChecksConsumers(Protocol):
    """A `TransactionSpi` that refuses, before a transaction begins, consumers whose positions it cannot take."""

    async def check_consumer(self, source: RecordSource) -> None:
        """:raises ConfigurationError: this is of another broker. :raises BrokerError: that cannot be found out now."""
        ...


@runtime_checkable
class TransactionalAcks(Protocol):
    """A `TransactionSpi` in which messages can be acked."""

    def check_source(self, source: MessageSource) -> None:
        """:raises Unsupported: messages of this source cannot be acked in it; says why."""
        ...

    async def add_acks(self, source: MessageSource, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Stop renewing the leases of these, and write their acks into the open transaction.

        The outcome of each, LeaseLost if it is not ours any more; if any is not None, nothing may be committed.
        """
        ...

    def acks_aborted(self, source: MessageSource, messages: Sequence[Message[Any]]) -> None:
        """What `add_acks` wrote was not committed, and never will be: these are held again as before."""
        ...
