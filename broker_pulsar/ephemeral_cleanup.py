"""Deletes ephemeral subscriptions of dead processes, which Pulsar would keep together with their backlog.

Every process with an ephemeral subscription checks its topic. A consumer that only lost its connection must not lose
its subscription, so a subscription is deleted only after it had no consumer for `ABANDONED_SECONDS`; the broker refuses
to delete one that has. Runs on the loop of its connection while it has such a subscription; failed checks are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from broker import BrokerError
from broker.driver import reads_answer
from broker_pulsar.names import EPHEMERAL

__all__ = ["ABANDONED_SECONDS", "CHECK_SECONDS", "EphemeralCleanup"]

CHECK_SECONDS: Final = 60.0
ABANDONED_SECONDS: Final = 300.0

Stats = Callable[[str], Awaitable[Mapping[int, Mapping[str, Any]]]]
Delete = Callable[[str, str], Awaitable[None]]


class EphemeralCleanup:
    """The cleanup of one connection.

    :param stats: returns the statistics of each partition of a topic.
    :param delete: deletes a subscription that has no consumer.
    """

    def __init__(self, stats: Stats, delete: Delete) -> None:
        self._stats = stats
        self._delete = delete
        self._watched: set[tuple[str, str]] = set()
        self._unattended: dict[tuple[str, str], float] = {}
        """Since when they have had no consumer."""
        self._task: asyncio.Task[None] | None = None

    def watch(self, topic: str, name: str) -> Callable[[], None]:
        """Check the topic of this subscription of ours; returns a function that ends this."""
        key = (topic, name)
        self._watched.add(key)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="broker-pulsar-cleanup")
        return lambda: self._watched.discard(key)

    def close(self) -> None:
        """Stop checking."""
        self._watched.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._watched:
            for topic in {topic for topic, _ in self._watched}:
                with suppress(BrokerError):
                    await self._check(topic)
            await asyncio.sleep(CHECK_SECONDS)
        self._task = None
        self._unattended.clear()

    async def _check(self, topic: str) -> None:
        found = _unattended(await self._stats(topic))
        now = monotonic()
        unattended = {(topic, name) for name in found} - self._watched
        self._unattended = {
            key: since for key, since in self._unattended.items() if key[0] != topic or key in unattended
        }
        for key in unattended:
            if now - self._unattended.setdefault(key, now) >= ABANDONED_SECONDS:
                await self._delete(*key)


@reads_answer("The statistics of a topic")
def _unattended(stats: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The ephemeral subscriptions without a consumer in any partition."""
    names: set[str] = set()
    served: set[str] = set()
    for each in stats.values():
        subscriptions: Mapping[str, Mapping[str, Any]] = each.get("subscriptions") or {}
        for name, subscription in subscriptions.items():
            if name.startswith(EPHEMERAL):
                names.add(name)
                if subscription.get("consumers"):
                    served.add(name)
    return names - served
