"""Ephemeral subscriptions whose process died, which Pulsar would keep, and with them what they have not read.

They are found and deleted by whoever has an ephemeral subscription of the same topic. A consumer that only lost its
connection must not lose its place, so nobody must have been seen at a subscription in a row of looks over
`GONE_SECONDS`; and the broker refuses to delete one that somebody is connected to.

Runs on the loop of its connection while there is such a subscription; a look that fails is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from broker import BrokerError
from broker_pulsar.names import EPHEMERAL

__all__ = ["GONE_SECONDS", "LOOK_SECONDS", "Leftovers"]

LOOK_SECONDS: Final = 60.0
GONE_SECONDS: Final = 300.0

Stats = Callable[[str], Awaitable[Mapping[int, Mapping[str, Any]]]]
Delete = Callable[[str, str], Awaitable[None]]


class Leftovers:
    """Of one connection.

    :param stats: what the broker counts for each partition of a topic.
    :param delete: deletes a subscription of a topic that nobody is connected to.
    """

    def __init__(self, stats: Stats, delete: Delete) -> None:
        self._stats = stats
        self._delete = delete
        self._own: set[tuple[str, str]] = set()
        self._alone: dict[tuple[str, str], float] = {}
        """Since when nobody was seen at them."""
        self._task: asyncio.Task[None] | None = None

    def watch(self, topic: str, name: str) -> Callable[[], None]:
        """Look after the topic of this subscription, which is ours; returns the function that ends it."""
        own = (topic, name)
        self._own.add(own)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="broker-pulsar-leftovers")
        return lambda: self._own.discard(own)

    def close(self) -> None:
        """Look at nothing any more."""
        self._own.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._own:
            for topic in {topic for topic, _ in self._own}:
                with suppress(BrokerError):
                    await self._look(topic)
            await asyncio.sleep(LOOK_SECONDS)
        self._task = None
        self._alone.clear()

    async def _look(self, topic: str) -> None:
        found = _alone(await self._stats(topic))
        now = monotonic()
        seen = {(topic, name) for name in found} - self._own
        self._alone = {key: since for key, since in self._alone.items() if key[0] != topic or key in seen}
        for key in seen:
            if now - self._alone.setdefault(key, now) >= GONE_SECONDS:
                await self._delete(*key)


def _alone(stats: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The ephemeral subscriptions at which nobody is, in no partition."""
    names: set[str] = set()
    served: set[str] = set()
    for each in stats.values():
        subscriptions: Mapping[str, Mapping[str, Any]] = each.get("subscriptions") or {}
        for name, told in subscriptions.items():
            if name.startswith(EPHEMERAL):
                names.add(name)
                if told.get("consumers"):
                    served.add(name)
    return names - served
