"""Provisioning over the HTTP API: topics with partitions and policies, subscriptions, lag.

Each call is one or a few requests. Every `ensure` and `delete` may be repeated and may run in several processes at
once. A subscription name belongs to a message subscription or to a record group.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Final
from urllib.parse import quote

from broker import (
    BackendError,
    ConnectionFailed,
    InvalidSetting,
    Lag,
    OperationTimeout,
    SubscriptionInfo,
    SubscriptionNotFound,
    TopicInfo,
    TopicNotFound,
    UnknownSetting,
    Unsupported,
)
from broker.driver import Backoff, Start, is_whole, not_compacted, reads_answer
from broker_pulsar import subscriptions
from broker_pulsar.connection import Connection
from broker_pulsar.log_stats import subscription_stats
from broker_pulsar.message_ids import unpack
from broker_pulsar.names import COMPACTED, TopicPath, subscription_path

__all__ = ["PulsarAdmin"]

_MOST_PARTITIONS: Final = 1024
_LARGEST: Final = 2**31 - 1
_LONGEST_RETENTION: Final = _LARGEST // 60
"""Minutes: Pulsar compares the retention in seconds, in 32 bits, with the backlog quota."""
_OPTIONS: Final = ("deduplication", "message_ttl", "retention_mb")
_RETENTION: Final = ("retentionTimeInMinutes", "retentionSizeInMB")
_WITH_PROPERTIES: Final = "application/vnd.partitioned-topic-metadata+json"
_THRESHOLD: Final = 16 * 1024 * 1024
"""Bytes after which the broker compacts a partition again; it looks once a minute."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0


class PulsarAdmin:
    """Implements `AdminSpi`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # Topics.

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Create a topic, or update the given values.

        Options: `retention_mb` (int: megabytes of acked messages to keep, -1 for all), `message_ttl` (seconds after
        which a subscription drops unacked messages), `deduplication` (bool: by producer and sequence).

        :raises UnknownSetting, InvalidSetting: an option is unknown or its value is invalid.
        :raises Unsupported: fewer partitions than the topic has.
        """
        policies, kept = _policies(options), _retention(retention, options)
        path, what = self._connection.topic(name), f"Topic {name!r}"
        wanted = _checked_partitions(self._connection.settings.partitions if partitions is None else partitions)
        answer = await self._connection.http.request("PUT", f"{path.path}/partitions", what, wanted, allow=(409,))
        if answer.status == 409:
            await self._ensure_partitions(name, path, partitions)
        return await self._ensure_policies(name, path, policies, kept)

    async def ensure_compacted_topic(
        self, name: str, *, partitions: int | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Options as of `ensure_topic`, without `retention_mb`, and `compaction_threshold`: the bytes after which the
        broker compacts a partition again.

        The log is retained, since it has the positions of what was compacted.
        """
        given = dict(options)
        threshold: object = given.pop("compaction_threshold", None)
        if threshold is not None and (not is_whole(threshold) or not 1 <= threshold <= _LARGEST):
            raise InvalidSetting(
                f"Option 'compaction_threshold' is {threshold!r}",
                advice=f"Use a whole number of bytes from 1 to {_LARGEST}",
            )
        if "retention_mb" in given:
            raise InvalidSetting(
                f"Option 'retention_mb' is {given['retention_mb']!r} beside compacted=True",
                advice="Leave it out: the log of a compacted topic is retained",
            )
        policies = _policies(given)
        path, what = self._connection.topic(name), f"Topic {name!r}"
        wanted = _checked_partitions(self._connection.settings.partitions if partitions is None else partitions)
        answer = await self._connection.http.request(
            "PUT",
            f"{path.path}/partitions",
            what,
            {"partitions": wanted, "properties": {COMPACTED: "true"}},
            allow=(409,),
            media=_WITH_PROPERTIES,
        )
        if answer.status == 409:
            await self._ensure_partitions(name, path, partitions)
            # Sets `compacted`.
            await self._connection.partitions(name)
            if name not in self._connection.compacted:
                raise not_compacted(name)
        present = await self._connection.http.get(f"{path.path}/compactionThreshold", what)
        if threshold is not None or present is None:
            policies["compactionThreshold"] = threshold or _THRESHOLD
        return await self._ensure_policies(name, path, policies, dict.fromkeys(_RETENTION, -1))

    async def _ensure_policies(
        self, name: str, path: TopicPath, policies: Mapping[str, object], kept: Mapping[str, int]
    ) -> TopicInfo:
        what = f"Topic {name!r}"
        for policy, value in policies.items():
            await self._set_policy(path, policy, value, what)
        await self._set_retention(path, kept, what)
        return await self.describe_topic(name)

    async def _ensure_partitions(self, name: str, path: TopicPath, partitions: int | None) -> None:
        """Grow an existing topic. The broker refuses all but one of concurrent requests, and may not find the topic
        for a moment."""
        resource, what = f"{path.path}/partitions", f"Topic {name!r}"
        backoff, until = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), monotonic() + self._connection.settings.request_timeout
        while True:
            refusals = (409,) if monotonic() < until else ()
            try:
                found = await self._connection.partitions(name)
                if partitions is None or partitions == max(found, 1):
                    return
                if partitions < found or not found:
                    raise Unsupported(
                        f"Topic {name!r} has {max(found, 1)} partitions and cannot have {partitions}",
                        advice="Partitions can only be added, and only to partitioned topics",
                    )
                # The broker refuses to grow a topic to its current number.
                answer = await self._connection.http.request(
                    "POST", resource, what, partitions, allow=refusals, once=True
                )
                if answer.status != 409:
                    return
            except TopicNotFound:
                if not refusals:
                    raise
            await asyncio.sleep(backoff.next())

    async def _set_policy(self, path: TopicPath, policy: str, value: object, what: str) -> None:
        """Set a policy; retried, because the broker fails while it loads the topic's policies on first use."""
        resource = f"{path.path}/{policy}"
        if policy == "messageTTL":
            resource, value = f"{resource}?messageTTL={value}", None
        backoff, until = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), monotonic() + self._connection.settings.request_timeout
        while True:
            try:
                await self._connection.http.request("POST", resource, what, value, once=True)
                return
            except (ConnectionFailed, BackendError):
                if monotonic() >= until:
                    raise
            await asyncio.sleep(backoff.next())

    async def _set_retention(self, path: TopicPath, wanted: Mapping[str, int], what: str) -> None:
        """Set the retention. Pulsar sets time and size together: an omitted one is unchanged, and unlimited if it was
        unset."""
        if not wanted:
            return
        resource = f"{path.path}/retention"
        found: Mapping[str, Any] = await self._connection.http.get(f"{resource}?applied=true", what) or {}
        with reads_answer(what):
            policy = {field: wanted.get(field) or int(found.get(field) or 0) or -1 for field in _RETENTION}
        await self._set_policy(path, "retention", policy, what)
        # The broker returns a policy only after reading it back, and the next call starts from the returned one.
        backoff, until = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), monotonic() + self._connection.settings.request_timeout
        while True:
            applied: Mapping[str, Any] = await self._connection.http.get(resource, what) or {}
            with reads_answer(what):
                if policy == {field: applied.get(field) for field in _RETENTION}:
                    return
            if monotonic() >= until:
                raise OperationTimeout(f"{what}: the broker accepted the retention but does not apply it")
            await asyncio.sleep(backoff.next())

    async def delete_topic(self, name: str) -> None:
        self._connection.topic_deleted(name)
        path, what = self._connection.topic(name), f"Topic {name!r}"
        try:
            partitions = await self._connection.partitions(name)
            kind = "/partitions" if partitions else ""
            await self._connection.http.request("DELETE", f"{path.path}{kind}?force=true", what)
        except TopicNotFound:
            return

    async def list_topics(self) -> Sequence[str]:
        settings = self._connection.settings
        base = f"/persistent/{quote(settings.tenant)}/{quote(settings.namespace)}"
        partitioned, plain = await asyncio.gather(
            self._connection.http.get(f"{base}/partitioned", "Topics"), self._connection.http.get(base, "Topics")
        )
        with reads_answer("Topics"):
            names = {_local_name(url) for url in partitioned or ()}
            names |= {
                local
                for local in map(_local_name, plain or ())
                if "-partition-" not in local and not local.startswith("__")
            }
        return sorted(names)

    async def describe_topic(self, name: str) -> TopicInfo:
        stats = await self._connection.stats(name)
        with reads_answer(f"Topic {name!r}"):
            size = sum(int(each.get("storageSize") or 0) for each in stats.values())
        return TopicInfo(
            name=name,
            partitions=len(stats),
            bytes=size,
            compacted=name in self._connection.compacted,
            native={"partitions": dict(stats)},
        )

    async def purge(self, topic: str) -> int | None:
        """Remove all messages. This unloads the topic, so its clients reconnect."""
        what = f"Topic {topic!r}"
        for log in await self._connection.logs(topic):
            # Only closed ledgers can be removed, and unloading closes the open one.
            await self._connection.http.request("PUT", f"{log.path}/unload", what)
            await self._connection.http.request("DELETE", f"{log.path}/truncate", what)
        return None

    # Subscriptions.

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        if options:
            raise UnknownSetting(
                f"A Pulsar subscription has no option {min(options)!r}",
                advice="The consumers choose the subscription type",
            )
        await subscriptions.create(self._connection, topic, name, start)
        return SubscriptionInfo(topic=topic, name=name)

    async def delete_subscription(self, topic: str, name: str) -> None:
        await subscriptions.delete(self._connection, topic, name)

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        return await subscriptions.list_names(self._connection, topic)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        await subscriptions.require(self._connection, topic, name)
        stats = await self._connection.stats(topic)
        found = {number: subscription_stats(each, name) or {} for number, each in stats.items()}
        return SubscriptionInfo(topic=topic, name=name, native={"partitions": found})

    async def lag(self, topic: str, subscription: str) -> Lag:
        """Counted by the broker, from at most about ten thousand batches per partition.

        Unacked deliveries count as waiting, and so does the acked part of a batch, unless a group of this connection
        committed it.
        """
        stats = await self._connection.stats(topic)
        found = {number: subscription_stats(each, subscription) for number, each in stats.items()}
        if not any(each is not None for each in found.values()):
            raise SubscriptionNotFound(f"Subscription {subscription!r} of topic {topic!r} does not exist")
        logs = await self._connection.logs(topic)
        waiting = await asyncio.gather(
            *(self._waiting(topic, number, logs[number], subscription, each or {}) for number, each in found.items())
        )
        return Lag(waiting=sum(waiting), unsettled=None, partitions=dict(enumerate(waiting)))

    async def _waiting(
        self, topic: str, number: int, log: TopicPath, subscription: str, stats: Mapping[str, Any]
    ) -> int:
        what = f"Subscription {subscription!r} of topic {topic!r}"
        with reads_answer(what):
            entries = int(stats.get("msgBacklog") or 0)
            if not entries:
                return 0
            path = f"{subscription_path(log, subscription)}/analyzeBacklog"
            counted = (await self._connection.http.request("POST", path, what)).body
            messages, counted_entries = int(counted.get("messages") or 0), int(counted.get("entries") or 0)
            if counted.get("aborted") and counted_entries:
                # The broker stopped counting; extrapolate.
                messages = math.ceil(messages * entries / counted_entries)
            return max(0, messages - self._committed_part(topic, number, subscription, counted))

    def _committed_part(self, topic: str, number: int, group: str, counted: Mapping[str, Any]) -> int:
        """The committed messages of the backlog's first batch, as far as this connection knows."""
        position = self._connection.committed.get((topic, number, group))
        first = str(counted.get("firstMessageId") or "")
        if position is None or not first:
            return 0
        ledger, entry, slot = unpack(position)
        # Slots start at 1; this is the one after the last committed.
        return max(0, slot - 1) if first == f"{ledger}:{entry}" else 0


def _local_name(url: Any) -> str:
    return str(url).rpartition("/")[2]


def _checked_partitions(number: int) -> int:
    if not 1 <= number <= _MOST_PARTITIONS:
        raise InvalidSetting(f"partitions is {number}", advice=f"Use 1 to {_MOST_PARTITIONS}")
    return number


def _retention(retention: timedelta | None, options: Mapping[str, Any]) -> dict[str, int]:
    """The requested retention time and size."""
    found: dict[str, int] = {}
    if retention is not None:
        # Pulsar counts minutes and removes whole ledgers.
        minutes = max(1, math.ceil(retention.total_seconds() / 60))
        if minutes > _LONGEST_RETENTION:
            raise InvalidSetting(
                f"retention is {retention}", advice=f"Use at most {timedelta(minutes=_LONGEST_RETENTION)}"
            )
        found["retentionTimeInMinutes"] = minutes
    size = options.get("retention_mb")
    if size is not None:
        if not isinstance(size, int) or isinstance(size, bool) or not (size > 0 or size == -1):
            raise InvalidSetting(
                f"Option 'retention_mb' is {size!r}", advice="Use a whole number above 0, or -1 for no limit"
            )
        found["retentionSizeInMB"] = size
    return found


def _policies(options: Mapping[str, Any]) -> dict[str, object]:
    for option in options:
        if option not in _OPTIONS:
            raise UnknownSetting(f"A Pulsar topic has no option {option!r}", advice=f"It has {', '.join(_OPTIONS)}")
    found: dict[str, object] = {}
    ttl = options.get("message_ttl")
    if ttl is not None:
        if not isinstance(ttl, int) or isinstance(ttl, bool) or not 1 <= ttl <= _LARGEST:
            raise InvalidSetting(
                f"Option 'message_ttl' is {ttl!r}", advice=f"Use a whole number of seconds from 1 to {_LARGEST}"
            )
        found["messageTTL"] = ttl
    deduplication = options.get("deduplication")
    if deduplication is not None:
        if not isinstance(deduplication, bool):
            raise InvalidSetting(f"Option 'deduplication' is {deduplication!r}", advice="Use True or False")
        found["deduplicationEnabled"] = deduplication
    return found
