"""Options and arguments of the wrong type or value: one error names option, value and advice, and nothing happens."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import Any

import pytest

import broker
import broker.blocking
from broker.bus import Bus
from broker.errors import ConfigurationError
from broker.outbound import OutboundMessage
from broker_inmem import Broker

MESSAGES: list[tuple[str, Any, str]] = [
    ("codec", 5, "an object with encode and decode"),
    ("codec", "json", "an object with encode and decode"),
    ("codec", broker.Text, "Pass an instance: Text()"),
    ("codec", broker.Json, "Pass an instance: Json()"),
    ("codec", broker.Json[int], "Pass an instance: Json(int)"),
    ("retry", 5, "a Retry(...)"),
    ("retry", False, "a Retry(...)"),
    ("dead_letter", 5, "a topic's name, DROP or None"),
    ("ordered_by_key", "yes", "True or False"),
    ("confirm_acks", "no", "True or False, or None"),
    ("create", None, "True or False"),
    ("start", None, '"earliest", "latest" or a datetime'),
    ("max_outstanding", "5", "an int of 1 or more"),
    ("max_outstanding", 0, "an int of 1 or more"),
    ("max_outstanding_bytes", None, "an int of 1 or more"),
    ("prefetch", 1.5, "an int of 1 or more, or None"),
    ("max_rate", 0, "a number per second above 0, or None"),
    ("max_rate", math.nan, "a number per second above 0, or None"),
    ("max_rate", "fast", "a number per second above 0, or None"),
    ("max_lease", 0, "seconds above 0"),
    ("stop_when_idle", -1, "seconds above 0, or None"),
    ("close_timeout", 10**400, "seconds above 0"),
]
RECORDS: list[tuple[str, Any, str]] = [
    ("codec", 5, "an object with encode and decode"),
    ("codec", broker.Text, "Pass an instance: Text()"),
    ("start", "sometime", '"earliest", "latest" or a datetime'),
    ("isolation", "x", '"read_committed" or "read_uncommitted"'),
    ("isolation", None, '"read_committed" or "read_uncommitted"'),
    ("on_decode_error", None, '"raise", or the name of a topic'),
    ("on_decode_error", 5, '"raise", or the name of a topic'),
    ("on_assigned", 5, "a function"),
    ("on_revoking", 5, "a function"),
    ("on_lost", 5, "a function"),
    ("assign_timeout", 0, "seconds above 0, or None"),
    ("copartitioned", 5, "True or False"),
    ("max_buffered", "x", "an int of 1 or more"),
    ("max_rate", -1, "a number per second above 0, or None"),
    ("stop_when_idle", -1, "seconds above 0, or None"),
    ("stop_when_idle", "x", "seconds above 0, or None"),
    ("close_timeout", "x", "seconds above 0"),
    ("close_timeout", 0, "seconds above 0"),
]
AS_MESSAGES: list[tuple[str, Any, str]] = [
    ("max_gap", "x", "an int of 1 or more"),
    ("commit_every", 0, "an int of 1 or more"),
    ("commit_interval", math.nan, "seconds above 0"),
    ("ordered_by_key", 1, "True or False"),
    ("retry", 5, "a Retry(...)"),
]
TOPICS = [None, 5, b"orders"]


def refusal(call: Callable[[], object]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as raised:
        call()
    return raised.value


async def refusal_of(call: Awaitable[object]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as raised:
        await call
    return raised.value


def names(error: ConfigurationError, name: str, value: object, advice: str) -> bool:
    """Whether the error names the option and its value, and its advice contains the text."""
    of_a_class = f"{name} is the class {getattr(value, '__name__', '')}"
    return error.message in (f"{name} is {value!r}", of_a_class) and bool(error.advice) and advice in error.advice


@pytest.mark.parametrize(("name", "value", "advice"), MESSAGES)
async def test_messages(broker_bus: Bus, name: str, value: Any, advice: str) -> None:
    options: dict[str, Any] = {"subscription": "s-1", name: value}
    assert names(refusal(lambda: broker_bus.messages("orders", **options)), name, value, advice)


@pytest.mark.parametrize(("name", "value", "advice"), RECORDS)
async def test_records(broker_bus: Bus, name: str, value: Any, advice: str) -> None:
    options: dict[str, Any] = {"group": "g-1", name: value}
    assert names(refusal(lambda: broker_bus.records("orders", **options)), name, value, advice)


@pytest.mark.parametrize(("name", "value", "advice"), AS_MESSAGES)
async def test_records_as_messages(broker_bus: Bus, name: str, value: Any, advice: str) -> None:
    records = broker_bus.records("orders", group="g-1")
    assert names(refusal(lambda: records.as_messages(**{name: value})), name, value, advice)


@pytest.mark.parametrize("topics", TOPICS)
async def test_topics(broker_bus: Bus, topics: Any) -> None:
    advice = "a topic's name, a list of names, or a TopicPattern"
    assert names(refusal(lambda: broker_bus.messages(topics, subscription="s-1")), "topics", topics, advice)
    assert names(refusal(lambda: broker_bus.records(topics, group="g-1")), "topics", topics, advice)
    with pytest.raises(ConfigurationError, match="topic name is \\['orders'\\]"):
        broker_bus.messages([["orders"]], subscription="s-1")  # type: ignore[list-item]


def test_blocking(inmem_broker: Broker) -> None:
    with broker.blocking.connect(inmem_broker.url) as bus:
        for name, value, advice in MESSAGES:
            messages: dict[str, Any] = {"subscription": "s-1", name: value}
            assert names(refusal(partial(bus.messages, "orders", **messages)), name, value, advice)
        for name, value, advice in RECORDS:
            records: dict[str, Any] = {"group": "g-1", name: value}
            assert names(refusal(partial(bus.records, "orders", **records)), name, value, advice)

        async def callback(_: object) -> None:
            return None

        for name in ("on_assigned", "on_revoking", "on_lost"):
            with pytest.raises(ConfigurationError, match=f"{name} is a coroutine function"):
                bus.records("orders", group="g-1", **{name: callback})  # type: ignore[arg-type]
        assert names(refusal(lambda: bus.log.position_at("orders", None)), "time", None, "a datetime")  # type: ignore[arg-type]
        bus.admin.ensure_topic("orders")
        with bus.messages("orders", subscription="s-1") as inbox, bus.records("orders", group="g-1") as log:
            assert names(refusal(lambda: inbox.next_message(timeout="1")), "timeout", "1", "seconds")  # type: ignore[arg-type]
            assert names(refusal(lambda: inbox.next_batch("3")), "max_messages", "3", "an int from 1")  # type: ignore[arg-type]
            assert names(refusal(lambda: log.next_record(timeout="1")), "timeout", "1", "seconds")  # type: ignore[arg-type]
            assert names(refusal(lambda: log.next_batch("3")), "max_records", "3", "an int")  # type: ignore[arg-type]


async def test_a_codec_of_a_topic(broker_bus: Bus) -> None:
    assert names(refusal(lambda: broker_bus.topic("orders", 5)), "codec", 5, "an object")  # type: ignore[call-overload]
    error = refusal(lambda: broker_bus.topic("orders", broker.Text))  # type: ignore[arg-type]
    assert names(error, "codec", broker.Text, "Pass an instance: Text()")


async def test_a_codec_class_without_arguments_is_instantiated(broker_bus: Bus) -> None:
    class Upper:
        @staticmethod
        def encode(payload: str) -> bytes:
            return payload.upper().encode()

        @classmethod
        def decode(cls, data: bytes | None) -> str:
            return (data or b"").decode()

    await broker_bus.admin.ensure_topic("orders")
    await broker_bus.topic("orders", Upper).publish("a")
    async with broker_bus.messages("orders", subscription="s-1", codec=Upper) as inbox:
        message = await inbox.next_message(timeout=60)
        assert message is not None
        assert message.payload == "A"


@pytest.mark.parametrize("value", ["1", True, math.nan, b"", 10**400, [1]])
async def test_a_time_to_wait(broker_bus: Bus, value: Any) -> None:
    await broker_bus.admin.ensure_topic("orders")
    async with (
        broker_bus.messages("orders", subscription="s-1") as inbox,
        broker_bus.records("orders", group="g-1") as log,
    ):
        # Regardless of available records or messages, none is taken.
        await broker_bus.topic("orders").publish(b"x")
        for call in (inbox.next_message, inbox.next_batch, log.next_record, log.next_batch):
            assert names(await refusal_of(call(timeout=value)), "timeout", value, "seconds, or None")
        assert await inbox.next_message(timeout=60) is not None
        assert await log.next_record(timeout=60) is not None
        assert await inbox.next_message(timeout=-1) is None


@pytest.mark.parametrize("value", ["3", 0, 1.5, None, True])
async def test_the_size_of_a_batch(broker_bus: Bus, value: Any) -> None:
    await broker_bus.admin.ensure_topic("orders")
    async with (
        broker_bus.messages("orders", subscription="s-1") as inbox,
        broker_bus.records("orders", group="g-1") as log,
    ):
        for name, call in (("max_messages", inbox.next_batch), ("max_records", log.next_batch)):
            assert names(await refusal_of(call(value)), name, value, "an int")
        assert names(refusal(lambda: inbox.batches(value)), "max_messages", value, "an int from 1 to max_outstanding")
        assert names(refusal(lambda: log.batches(value)), "max_records", value, "an int of 1 or more")
        read = partial(broker_bus.log.read, "orders", 0, max_records=value)
        assert names(refusal(read), "max_records", value, "an int")
        async with broker_bus.log.follow("orders") as followed:
            assert names(await refusal_of(followed.next_batch(value)), "max_records", value, "an int")
            assert names(refusal(lambda: followed.batches(value)), "max_records", value, "an int")


async def test_positions_and_partitions(broker_bus: Bus) -> None:
    await broker_bus.admin.ensure_topic("orders")
    async with broker_bus.records("orders", group="g-1") as log:
        odd: list[tuple[Any, str, Any]] = [
            (None, "positions", None),
            ([("orders", 0)], "positions", [("orders", 0)]),
            ({("orders", 0): "x"}, "position", "x"),
            ({("orders", 0): 1.5}, "position", 1.5),
            ({"orders": 0}, "partition", "orders"),
            ({("orders", "0"): 0}, "partition", ("orders", "0")),
        ]
        for positions, name, value in odd:
            assert names(await refusal_of(log.seek(positions)), name, value, "")
        changes: list[Any] = [log.pause, log.resume]
        for change in changes:
            assert names(refusal(partial(change, "orders")), "partitions", "orders", "a list")
            assert names(refusal(partial(change, [5])), "partition", 5, "a TopicPartition")
        with pytest.raises(ConfigurationError, match="partitions is 5"):
            await log.committed(5)  # type: ignore[arg-type]
        await broker_bus.topic("orders").publish(OutboundMessage(b"x", partition=0))
        assert await log.next_record(timeout=60) is not None
        log.resume([["orders", 0]])  # type: ignore[list-item]
        await log.seek({("orders", 0): 0})
        assert await log.next_record(timeout=60) is not None


@pytest.mark.parametrize("value", [None, 5, "2026-01-01"])
async def test_a_time_in_the_log(broker_bus: Bus, value: Any) -> None:
    error = await refusal_of(broker_bus.log.position_at("orders", value))
    assert names(error, "time", value, "a datetime with a timezone")


async def test_a_time_in_the_log_has_a_timezone(broker_bus: Bus) -> None:
    with pytest.raises(ConfigurationError, match="time 2026-01-01T00:00:00 has no timezone"):
        await broker_bus.log.position_at("orders", datetime.fromisoformat("2026-01-01"))


async def test_the_range_of_a_read(broker_bus: Bus) -> None:
    read: Any = broker_bus.log.read
    assert names(refusal(lambda: read("orders", "0")), "partition", "0", "partitions(topic)")
    assert names(refusal(lambda: read("orders", True)), "partition", True, "partitions(topic)")
    assert names(refusal(lambda: read("orders", 0, "1", "2")), "start", "1", "an offset, or None")
    assert names(refusal(lambda: read("orders", 0, 1, 2.0)), "stop", 2.0, "an offset, or None")


@pytest.mark.parametrize("reason", [ValueError("bad"), None, b"bad"])
async def test_a_reason_to_reject(broker_bus: Bus, reason: Any) -> None:
    for topic in ("orders", "letters"):
        await broker_bus.admin.ensure_topic(topic)
    await broker_bus.topic("orders").publish(b"x")
    async with broker_bus.messages("orders", subscription="s-1", dead_letter="letters") as inbox:
        message = await inbox.next_message(timeout=60)
        assert message is not None
        assert names(await refusal_of(message.reject(reason)), "reason", reason, "a str")
        await message.ack()


async def test_the_limit_of_a_redrive(broker_bus: Bus) -> None:
    with pytest.raises(ConfigurationError, match="progress is 5"):
        await broker_bus.admin.redrive("letters", to=["orders"], progress=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="limit is None"):
        await broker_bus.admin.list_dead("letters", limit=None)  # type: ignore[arg-type]
