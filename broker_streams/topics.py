"""`TopicPolicy`: the topics of a group are checked before it starts, and its own two are created.

A group owns its table and its loop; all other topics belong to others, and have to exist. Every mistake is a line of
one error, with what to do about it.

*Concurrency.* Members of a group may prepare its topics at the same time. *Failure.* `prepare` changes nothing if a
topic of others is missing or does not fit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

from broker import Bus, ConfigurationError, TopicInfo, TopicNotFound
from broker_streams.failures import policy_topics
from broker_streams.graph import Group
from broker_streams.wording import counted

__all__ = ["TopicPolicy"]

logger: Final = logging.getLogger("broker_streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPolicy:
    """How the topics of a group are created and checked.

    :param create: create the table and the loop of the group if they are missing; False refuses to start.
    :param loop_retention: how long a new loop keeps its messages; None is the broker's default. Messages that are older
        than this when the group comes back are lost.
    :param options: options of this broker for new tables and loops, such as `{"replication_factor": 3}` on Kafka.
    :param table_options: further options of this broker for a new table.
    :param loop_options: the same for a new loop.
    :param mismatch: what to do about a table that is not compacted, or a loop that is: "fail", "warn" or "ignore". A
        table that is not compacted loses rows when its retention removes them.
    """

    create: bool = True
    loop_retention: timedelta | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    table_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loop_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mismatch: Literal["fail", "warn", "ignore"] = "fail"

    def __post_init__(self) -> None:
        if self.mismatch not in ("fail", "warn", "ignore"):
            raise ConfigurationError(f"mismatch is {self.mismatch!r}", advice='It takes "fail", "warn" or "ignore"')

    async def prepare(self, bus: Bus, group: Group) -> int:
        """Check the topics of a group, and create its table and its loop.

        :returns: the number of partitions that its inputs, joined tables, loop and table share.
        :raises ConfigurationError: topics are missing or do not fit; the error names each.
        """
        inputs = [topic for each in group.inputs for topic in each.topics]
        joins = [join.table for join in group.joins]
        lookups = [lookup.table for lookup in group.lookups]
        outputs = [output.topic for output in group.outputs]
        letters = _dead_letter_topics(group)
        own = [group.table, *([group.loop_topic] if group.loop is not None else [])]
        found = await _describe(bus, {*inputs, *joins, *lookups, *outputs, *letters, *own})

        make = "create it with `broker topics create` or ensure_topic"
        own_or_make = f"start the group whose table it is, or {make}, compacted"
        wrong = [
            f"{what} {topic!r} does not exist: {mend}"
            for what, topics, mend in (
                ("Input", inputs, make),
                ("Join", joins, own_or_make),
                ("Lookup", lookups, own_or_make),
                ("Output", outputs, make),
                ("Dead-letter topic", letters, make),
            )
            for topic in topics
            if topic not in found
        ]
        counts = {topic: found[topic].partitions for topic in (*inputs, *joins) if topic in found}
        if len(set(counts.values())) > 1:
            wrong.append(
                f"Inputs and joined tables have different numbers of partitions: {_counted(counts)}; give them one"
            )
        partitions = next((count for topic, count in counts.items() if topic in inputs), None) or 0
        wrong += self._check_own(group, found, partitions)
        lax = [
            f"{what} {topic!r} is not compacted, so its rows go with its retention: create it with compacted=True"
            for what, topics in (("Table", [group.table]), ("Join", joins), ("Lookup", lookups))
            for topic in topics
            if topic in found and not found[topic].compacted
        ]
        if group.loop is not None and (loop := found.get(group.loop_topic)) is not None and loop.compacted:
            lax.append(f"Loop {loop.name!r} is compacted, so messages of one key replace each other: create it anew")
        if self.mismatch == "fail":
            wrong += lax
        elif self.mismatch == "warn":
            for line in lax:
                logger.warning("Group %s: %s", group.name, line)
        if wrong:
            raise ConfigurationError(f"The topics of group {group.name!r} do not fit:\n- " + "\n- ".join(wrong))
        await self._create(bus, group, found, partitions)
        return partitions

    def _check_own(self, group: Group, found: Mapping[str, TopicInfo], partitions: int) -> Iterable[str]:
        """What is wrong with the table and the loop, but for compaction."""
        own = {group.table: "Table"}
        if group.loop is not None:
            own[group.loop_topic] = "Loop"
        for topic, what in own.items():
            if topic not in found:
                if not self.create:
                    yield f"{what} {topic!r} does not exist, and the policy has create=False"
            elif partitions and (count := found[topic].partitions) is not None and count != partitions:
                yield (
                    f"{what} {topic!r} has {counted(count, 'partition')}, and the inputs have {partitions}: a group "
                    "keeps its number of partitions; give the group another name, or copy its topics"
                )

    async def _create(self, bus: Bus, group: Group, found: Mapping[str, TopicInfo], partitions: int) -> None:
        if group.table not in found:
            options = {**self.options, **self.table_options}
            await bus.admin.ensure_topic(group.table, partitions=partitions, compacted=True, **options)
            logger.info("Created table %s with %s", group.table, counted(partitions, "partition"))
        if group.loop is not None and group.loop_topic not in found:
            options = {**self.options, **self.loop_options}
            await bus.admin.ensure_topic(
                group.loop_topic, partitions=partitions, retention=self.loop_retention, **options
            )
            logger.info("Created loop %s with %s", group.loop_topic, counted(partitions, "partition"))


def _dead_letter_topics(group: Group) -> list[str]:
    consuming = [*group.inputs, *([] if group.loop is None else [group.loop])]
    return sorted(policy_topics(*(policy for edge in consuming for policy in (edge.on_error, edge.on_undecodable))))


async def _describe(bus: Bus, topics: Iterable[str]) -> dict[str, TopicInfo]:
    """The topics that exist, with their numbers of partitions."""

    async def describe(topic: str) -> TopicInfo | None:
        try:
            info = await bus.admin.describe_topic(topic)
            if info.partitions is None:
                info = TopicInfo(
                    name=info.name,
                    partitions=len(await bus.log.partitions(topic)),
                    identity=info.identity,
                    compacted=info.compacted,
                )
        except TopicNotFound:
            return None
        return info

    names = sorted(topics)
    infos = await asyncio.gather(*map(describe, names))
    return {name: info for name, info in zip(names, infos, strict=True) if info is not None}


def _counted(counts: Mapping[str, int | None]) -> str:
    return ", ".join(f"{topic!r} has {count}" for topic, count in counts.items())
