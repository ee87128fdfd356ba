"""How much to receive until a subscription is drained: what waited at the start, if the broker counts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from broker.bus import Bus
from broker.errors import BrokerError
from broker.hooks import logger
from broker.messages import MessageBatch

__all__ = ["FOREVER", "IDLE", "DrainGoal", "find_drain_goal"]

IDLE: Final = 1.0
"""Seconds without a message after which a subscription without unsettled messages counts as empty."""
FOREVER: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DrainGoal:
    """When to stop receiving.

    :ivar messages: the most messages to receive.
    :ivar patience: stop earlier after this many seconds without a message that waited at the start.
    :ivar began: the start, if the broker does not count waiting messages; else None.
    """

    messages: int
    patience: float
    began: datetime | None

    def was_waiting(self, batches: Sequence[MessageBatch[bytes]]) -> bool:
        """Whether one of these may have waited at the start, by the broker's clock, or else the publisher's."""
        if self.began is None:
            return True
        times = [message.broker_time or message.publish_time for batch in batches for message in batch]
        return any(time is None or time <= self.began for time in times)


async def find_drain_goal(bus: Bus, topics: Sequence[str], subscription: str, lease: float) -> DrainGoal:
    """The goal of a drain that starts now.

    :param lease: seconds until an unsettled message is redelivered.
    """
    began = datetime.now(UTC)
    try:
        lags = [await bus.admin.lag(topic, subscription) for topic in topics]
    except BrokerError as error:
        logger.warning("The lag of subscription %s is unknown, so draining it takes longer: %s", subscription, error)
        lags = []
    if not lags or not all(each.current for each in lags):
        return DrainGoal(FOREVER, lease + IDLE, began)
    unsettled = sum(each.unsettled or 0 for each in lags)
    # Messages of a killed consumer come when their leases end. Some brokers count these as waiting.
    uncounted = any(each.unsettled is None for each in lags)
    return DrainGoal(
        sum(each.waiting for each in lags) + unsettled, lease + IDLE if unsettled or uncounted else IDLE, None
    )
