"""When a queue that is to be drained is: how much waited when it began, as far as the broker tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from broker.bus import Bus
from broker.errors import BrokerError
from broker.hooks import logger
from broker.messages import MessageBatch

__all__ = ["FOREVER", "IDLE", "Goal", "goal_of"]

IDLE: Final = 1.0
"""Seconds without a message after which a queue counts as empty, if nothing is on its way to somebody."""
FOREVER: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Goal:
    """How far a queue is drained.

    :ivar messages: so many are received, and no more.
    :ivar patience: seconds without a message that waited after which it ends before that.
    :ivar began: when it began, where the broker does not tell what waits; None where it does.
    """

    messages: int
    patience: float
    began: datetime | None

    def waited(self, batches: Sequence[MessageBatch[bytes]]) -> bool:
        """Whether one of these may have waited when it began, by the broker's clock, or else by the publisher's."""
        if self.began is None:
            return True
        times = [message.broker_time or message.publish_time for batch in batches for message in batch]
        return any(time is None or time <= self.began for time in times)


async def goal_of(bus: Bus, topics: Sequence[str], subscription: str, lease: float) -> Goal:
    """What to receive now.

    :param lease: seconds for which a message belongs to who got it.
    """
    began = datetime.now(UTC)
    try:
        lags = [await bus.admin.lag(topic, subscription) for topic in topics]
    except BrokerError as error:
        logger.warning(
            "What waits for subscription %s is not known, so that it is drained for longer: %s", subscription, error
        )
        lags = []
    if not lags or not all(each.current for each in lags):
        return Goal(FOREVER, lease + IDLE, began)
    unsettled = sum(each.unsettled or 0 for each in lags)
    # What a process held that was killed comes when its lease is over; who does not tell of it counts it as waiting.
    untold = any(each.unsettled is None for each in lags)
    return Goal(sum(each.waiting for each in lags) + unsettled, lease + IDLE if unsettled or untold else IDLE, None)
