"""What a backend's transactions offer beyond `TransactionSpi` where messages can be acked in them; optional.

The core asks for the acks last of all, when everything else is in the transaction, so that they are undecided for as
short as can be: until then messages are held, and their leases renewed, as without a transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from broker.errors import BrokerError
from broker.messages import Message
from broker.spi import MessageSource

__all__ = ["AcksMessages"]


@runtime_checkable
class AcksMessages(Protocol):
    """A `TransactionSpi` in which messages can be acked."""

    def check_source(self, source: MessageSource) -> None:
        """:raises Unsupported: messages of this source cannot be acked in it; says why."""
        ...

    async def add_acks(self, source: MessageSource, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Stop renewing the leases of these, and write their acks into the open transaction.

        The outcome of each, LeaseLost if it is not ours any more; if any is not None, nothing may be committed.
        """
        ...

    def acks_undone(self, source: MessageSource, messages: Sequence[Message[Any]]) -> None:
        """What `add_acks` wrote was not committed, and never will be: these are held again as before."""
        ...
