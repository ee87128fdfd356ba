"""How a record consumer becomes a message consumer: the pieces between the two, which do not know each other.

Pure but for what the opener does when it is awaited, which is to join the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from broker.capabilities import Capabilities, ConfirmedAck, LeaseMode, MessageCapabilities
from broker.checks import check_count, check_seconds
from broker.consuming.options import ConsumerOptions
from broker.consuming.retry import Drop, Retry
from broker.errors import Unsupported
from broker.hooks import Hooks
from broker.protocols import Codec
from broker.reading.as_messages import RecordsAsMessages
from broker.spi import Backend, RecordSubscription, SourceListener

if TYPE_CHECKING:
    from broker.consuming.consumer import MessageConsumer
    from broker.consuming.engine import OpenSource

__all__ = ["MakeMessages", "message_capabilities", "opener"]


class MakeMessages(Protocol):
    """Makes a message consumer over any sources, each given with the topic it is named after."""

    def __call__(
        self,
        sources: Sequence[tuple[str, OpenSource]],
        family: MessageCapabilities,
        options: ConsumerOptions,
        *,
        retry: Retry,
        dead_letter: str | Drop | None,
        codec: Codec[Any] | None,
        subscription: str,
    ) -> MessageConsumer[Any]: ...


def message_capabilities(capabilities: Capabilities) -> MessageCapabilities:
    """What the messages made of a backend's records can do.

    :raises Unsupported: the backend has no records.
    """
    records = capabilities.records
    if records is None:
        raise Unsupported(f"Backend {capabilities.backend!r} has no records", advice="Use bus.messages(...)")
    return MessageCapabilities(
        lease=LeaseMode.NONE,
        confirmed_ack=ConfirmedAck.NEVER,
        native_delay=0.0,
        delivery_attempt=True,
        release_keeps_attempt=True,
        key_affinity=capabilities.publish.partitions,
        shared_by_message=False,
        ordered_delivery=True,
        creates_subscriptions=True,
        start_latest=True,
        start_time=records.start_time,
        ephemeral=True,
    )


def opener(
    backend: Backend,
    subscription: RecordSubscription,
    hooks: Hooks,
    max_gap: int,
    commit_every: int,
    commit_interval: float,
) -> OpenSource:
    """What opens the source of the messages when the message consumer is entered.

    :raises ConfigurationError: a bound is no number above 0.
    """
    check_count("max_gap", max_gap)
    check_count("commit_every", commit_every)
    check_seconds("commit_interval", commit_interval)

    async def open_source(listener: SourceListener) -> RecordsAsMessages:
        source = RecordsAsMessages(
            listener, hooks=hooks, max_gap=max_gap, commit_every=commit_every, commit_interval=commit_interval
        )
        return await source.join(backend, subscription)

    return open_source
