"""Invalid arguments of a group consumer raise an error with the name, the value and advice, and change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from broker import blocking
from broker.driver.contract import TopicPartition
from broker.errors import ConfigurationError, LeaseLost
from broker_kafka.group import GroupConsumer, OffsetStash
from tests.kafka.group_members import fill, opened, take
from tests.servers.kafka import KafkaServer

_RECORD: dict[str, Callable[[GroupConsumer, Any], Any]] = {
    "mark": lambda group, wrong: group.mark(wrong),
    "finish": lambda group, wrong: group.finish(wrong),
    "reset": lambda group, wrong: group.reset(wrong),
    "mark_all": lambda group, wrong: group.mark_all([wrong]),
    "commit_records": lambda group, wrong: group.commit_records([wrong]),
    "save_point": lambda group, wrong: group.save_point([wrong]),
    "stash.mark": lambda group, wrong: OffsetStash().mark(wrong),
    "stash.reset": lambda group, wrong: OffsetStash().reset(wrong),
}
_RECORDS: dict[str, Callable[[GroupConsumer, Any], Any]] = {
    "mark_all": lambda group, wrong: group.mark_all(wrong),
    "commit_records": lambda group, wrong: group.commit_records(wrong),
    "save_point": lambda group, wrong: group.save_point(wrong),
}
_PARTITIONS: dict[str, Callable[[GroupConsumer, Any], Any]] = {
    "pause": lambda group, wrong: group.pause(wrong),
    "resume": lambda group, wrong: group.resume(wrong),
    "commit": lambda group, wrong: group.commit(wrong),
    "committed": lambda group, wrong: group.committed(wrong),
}
_POSITION: dict[str, Callable[[GroupConsumer, Any, Any, Any], Any]] = {
    "mark_position": lambda group, *wrong: group.mark_position(*wrong),
    "reset_position": lambda group, *wrong: group.reset_position(*wrong),
    "stash.mark_position": lambda group, *wrong: OffsetStash().mark_position(*wrong),
    "stash.reset_position": lambda group, *wrong: OffsetStash().reset_position(*wrong),
    "seek": lambda group, topic, partition, position: group.seek({(topic, partition): position}),
}


async def refused(says: str, call: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match=says):
        answer = call(*arguments)
        if inspect.isawaitable(answer):
            await answer


async def test_what_no_call_takes_is_named(kafka: KafkaServer, topic: str, group: str):
    await fill(kafka, topic, 1, 10)
    async with opened(kafka, topic, group, commit_interval=None) as consumer:
        records = await take(consumer, 10)
        for call in _RECORD.values():
            for wrong in (None, "x", 5, (topic, 0, 3), records):
                await refused("record is .*Record", call, consumer, wrong)
        for call in _RECORDS.values():
            for wrong in (None, 5, records[0]):
                await refused("records is ", call, consumer, wrong)
            await refused("record is None", call, consumer, [*records, None])
        for call in _PARTITIONS.values():
            for wrong in (5, topic, b"x"):
                await refused("partitions is ", call, consumer, wrong)
            for wrong in ("ab", None, (topic,), (topic, "0"), (None, 0), (topic, 0, 0)):
                await refused("partition is ", call, consumer, [wrong])
        for call in _POSITION.values():
            for place in ((None, 0), ("", 0), (topic, "0"), (topic, None), (topic, True), (topic, -1)):
                await refused(r"(topic|partition|partition of '[\w-]+') is ", call, consumer, *place, 1)
            for position in (None, -1, 1.5, "1", True, 2**63):
                await refused(f"The offset of '{topic}'.0. is ", call, consumer, topic, 0, position)
        for wrong in (None, 5, [(topic, 0)], "ab"):
            await refused("positions is ", consumer.seek, wrong)
        for call in (consumer.mark_stashed, consumer.reset_stashed):
            for wrong in (None, {}, OffsetStash):
                await refused("stash is .*an OffsetStash", call, wrong)
        for wrong in (None, (), {}):
            await refused("point is .*save_point", consumer.saved, wrong)
        assert consumer.positions() == {(topic, 0): None}
        assert await consumer.commit() == {}


async def test_what_is_asked_of_a_partition_elsewhere_is_a_lost_lease_whether_there_is_such_a_partition_or_not(
    kafka: KafkaServer, topic: str, group: str
):
    await fill(kafka, topic, 1, 3)
    async with opened(kafka, topic, group, commit_interval=None) as consumer:
        records = await take(consumer, 3)
        mine = TopicPartition(topic, 0)
        expected = f"is not assigned to this member of group {group!r}, which has '{topic}'.0."
        places = (TopicPartition(topic, 9), TopicPartition("no-such-topic", 0))
        for place, record in zip(places, records, strict=False):
            with pytest.raises(LeaseLost, match=expected):
                await consumer.seek({mine: 1, place: 0})
            for call in (consumer.pause, consumer.resume):
                with pytest.raises(LeaseLost, match=expected):
                    call([mine, place])
            assert not consumer.mark_position(*place, 1)
            consumer.mark(record)
            answers = await consumer.commit([place, mine])
            assert answers[mine] is None
            assert isinstance(answers[place], LeaseLost)
        # Nothing was paused along with what could not be.
        await consumer.seek({mine: 0})
        assert len(await take(consumer, 3)) == 3


async def test_a_start_that_is_none_tells_all_that_one_can_be(kafka: KafkaServer, topic: str, group: str):
    with pytest.raises(
        ConfigurationError, match=r'start is 5.*"latest", a mapping of TopicPartition to offset or a da'
    ):
        async with opened(kafka, topic, group, start=5):
            pass


async def test_a_start_of_a_partition_that_is_not_there_is_refused(kafka: KafkaServer, topic: str, group: str):
    with pytest.raises(ConfigurationError, match=r"start names '.*'\[9\], and the last partition is 0"):
        async with opened(kafka, topic, group, start={TopicPartition(topic, 9): 5}):
            pass


def test_a_blocking_bus_is_told_that_there_is_no_blocking_form(kafka: KafkaServer, topic: str, group: str):
    bus: Any
    says = "GroupConsumer has no blocking form"
    with blocking.connect(kafka.url) as bus, pytest.raises(ConfigurationError, match=says):
        GroupConsumer(bus, topic, group=group)
