"""What a consumer logs: one line when it opens, one with counts when it closes, and one line for each retry."""

from __future__ import annotations

import logging

import pytest

import broker
from broker.consuming.retry.policy import Retry
from broker.errors import BackendError
from broker.messages import Message
from tests.unit.broker.consuming.scripted_source import Letters, ScriptedSource, consuming

QUICK = Retry(max_attempts=3, initial=0.001, maximum=0.002)


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "broker")


def lines(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [line for line in caplog.messages if line.startswith(start)]


async def test_a_consumer_logs_its_opening_and_its_counts(caplog: pytest.LogCaptureFixture):
    source, letters = ScriptedSource(), Letters()
    source.add("1", "2", "3")

    async def handle(message: Message) -> None:
        if message.id == "2":
            raise RuntimeError("no")

    async with consuming(source, retry=QUICK, letters=letters, stop_when_idle=0.05) as consumer:
        (opened,) = caplog.messages
        assert opened == (
            "Consuming orders as billing: at most 1000 messages at once; attempts: 3, "
            "then the dead-letter topic orders.dead"
        )
        await consumer.receive(handle)
    (closed,) = lines(caplog, "Stopped")
    assert closed.startswith("Stopped consuming orders as billing after ")
    assert closed.endswith(" s: 5 messages handed over, 2 acked, 3 failures, 1 given up")


async def test_the_last_step_is_named(caplog: pytest.LogCaptureFixture):
    async with consuming(ScriptedSource(), drop=True):
        assert caplog.messages[-1].endswith("then dropped")
    async with consuming(ScriptedSource()):
        assert caplog.messages[-1].endswith("then more at the longest delay")


async def test_the_error_that_ended_a_consumer_is_in_its_last_line(caplog: pytest.LogCaptureFixture):
    source = ScriptedSource()
    async with consuming(source) as consumer:
        source.fail(BackendError("broken"))
        with pytest.raises(BackendError):
            await consumer.next_message()
    assert caplog.messages[-1].endswith("0 given up; ended by an error: broken")


async def test_a_retry_is_one_line_and_the_last_attempt_has_the_traceback(caplog: pytest.LogCaptureFixture):
    source, letters = ScriptedSource(), Letters()
    source.add("1")

    async def handle(message: Message) -> None:
        raise RuntimeError("first line\nsecond line " + "x" * 1000)

    async with consuming(source, retry=QUICK, letters=letters, stop_when_idle=0.05) as consumer:
        await consumer.receive(handle)
    failures = [record for record in caplog.records if "failed (failure" in record.getMessage()]
    assert [record.exc_info is not None for record in failures] == [False, False, True]
    for record in failures:
        assert "): RuntimeError: first line second line x" in record.getMessage()
        assert "\n" not in record.getMessage()
        assert len(record.getMessage()) < 700
    assert [record.levelname for record in failures] == ["WARNING"] * 3


async def test_at_debug_every_attempt_has_its_traceback(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "broker")
    source = ScriptedSource()
    source.add("1")

    async def handle(message: Message) -> None:
        if message.raw.attempt == 1:
            raise RuntimeError("no")

    async with consuming(source, retry=QUICK, stop_when_idle=0.05) as consumer:
        await consumer.receive(handle)
    (failure,) = [record for record in caplog.records if "failed (failure" in record.getMessage()]
    assert failure.exc_info


@pytest.mark.parametrize("batches", [False, True])
async def test_records_log_both_lines(broker_bus: broker.Bus, caplog: pytest.LogCaptureFixture, batches: bool):
    await broker_bus.admin.ensure_topic("orders")
    await broker_bus.topic("orders").publish_batch([b"%d" % number for number in range(600)])
    seen = 0
    async with broker_bus.records("orders", group="audit") as log:
        assert lines(caplog, "Reading") == ["Reading orders in group audit"]
        while seen < 600:
            seen += len(await log.next_batch(7, timeout=60)) if batches else (await log.next_record()) is not None
    (closed,) = lines(caplog, "Stopped")
    assert closed.startswith("Stopped reading orders in group audit after ")
    assert closed.endswith(" s: 600 records handed over")


async def test_a_consumer_that_cannot_open_logs_neither(broker_bus: broker.Bus, caplog: pytest.LogCaptureFixture):
    with pytest.raises(broker.TopicNotFound):
        async with broker_bus.messages("missing", subscription="billing"):
            pass
    with pytest.raises(broker.TopicNotFound):
        async with broker_bus.records("missing", group="audit"):
            pass
    assert lines(caplog, "Consuming") + lines(caplog, "Reading") + lines(caplog, "Stopped") == []
