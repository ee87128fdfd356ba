"""`OldPublishTimes`: warns of messages that retention removes at once, because a given publish time is their timestamp.

*Concurrency.* One event loop. *Failure.* A topic whose configuration cannot be read causes no warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from time import time
from typing import Final

from broker import BrokerError
from broker.driver import TaskSet, logger

__all__ = ["OldPublishTimes"]

_FIRST_SECONDS: Final = 1.0
_INTERVAL: Final = 60.0
"""Between two warnings of one topic."""
_CLOSE_SECONDS: Final = 2.0


class _Topic:
    """A topic that messages with old times are being published to; forgotten when there are no more of them."""

    def __init__(self) -> None:
        self.retention: timedelta | None = None
        self.looked_up = False
        self.uncompared: list[int] = []
        """Times that came before the retention was known."""
        self.old = self.reported = self.oldest = 0

    def count(self, times: Iterable[int]) -> None:
        """Count those that are older than the retention."""
        if self.retention is not None:
            first = 1000 * (time() - self.retention.total_seconds())
            if old := [each for each in times if each < first]:
                self.oldest = min(self.oldest or old[0], *old)
                self.old += len(old)


class OldPublishTimes:
    """:param retention: reads for how long a topic keeps records by their timestamps; None is for ever.
    :param warn: called with each warning.
    """

    def __init__(self, retention: Callable[[str], Awaitable[timedelta | None]], warn: Callable[[str], object]) -> None:
        self._retention = retention
        self._warn = warn
        self._topics: dict[str, _Topic] = {}
        self._tasks = TaskSet("broker-kafka-old-times", lambda error: logger.debug("Old publish times: %r", error))

    def published(self, topic: str, times: Sequence[int]) -> None:
        """Messages were produced with these given times, in milliseconds since 1970."""
        found = self._topics.get(topic)
        if found is None:
            found = self._topics[topic] = _Topic()
            self._tasks.spawn(self._report_at_intervals(topic, found))
        if found.looked_up:
            found.count(times)
        else:
            found.uncompared += times

    async def close(self) -> None:
        """Warn of what was not warned of yet, within two seconds."""
        self._tasks.cancel()
        last = [asyncio.ensure_future(self._report(topic, found)) for topic, found in self._topics.items()]
        self._topics.clear()
        if last:
            _, late = await asyncio.wait(last, timeout=_CLOSE_SECONDS)
            for each in late:
                each.cancel()

    async def _report_at_intervals(self, topic: str, found: _Topic) -> None:
        # All of a short run is in one warning.
        seconds = _FIRST_SECONDS
        while True:
            await asyncio.sleep(seconds)
            if not await self._report(topic, found):
                break
            seconds = _INTERVAL
        del self._topics[topic]

    async def _report(self, topic: str, found: _Topic) -> bool:
        """Warn if there are more; return whether there were."""
        if not found.looked_up:
            try:
                found.retention = await self._retention(topic)
            except BrokerError as error:
                logger.debug("The retention of %r is unknown: %s", topic, error)
                return False
            found.looked_up = True
            found.count(found.uncompared)
            found.uncompared.clear()
        if found.old == found.reported:
            return False
        found.reported = found.old
        self._warn(_text(topic, found))
        return True


def _text(topic: str, found: _Topic) -> str:
    several = found.old > 1
    oldest = datetime.fromtimestamp(found.oldest / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return (
        f"{found.old} {'messages were' if several else 'message was'} published to {topic!r} with a publish time older "
        f"than its retention of {found.retention}, {'the oldest ' if several else ''}{oldest}. Kafka removes records "
        f"by that time: {'these are' if several else 'this is'} lost at its next sweep. Leave publish_time out, and "
        "keep the old time in an attribute (broker publish has --publish-time-as)"
    )
