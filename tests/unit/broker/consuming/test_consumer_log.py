"""What a consumer logs: one line when it opens, one with counts when it closes, and one line for each retry."""

from __future__ import annotations

import asyncio
import logging

import pytest

import broker
from broker.capabilities import LeaseMode
from broker.codecs import Json
from broker.consuming.dead_letters import placed
from broker.consuming.retry.policy import Retry
from broker.envelopes import Place
from broker.errors import BackendError
from broker.hooks import Event, HandlerFailed, NoDeadLetter, Warned
from broker.messages import Message, Outcome
from tests.unit.broker.consuming.scripted_source import Letters, Raw, RawView, ScriptedSource, consuming, until

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

    async with consuming(source, retry=QUICK, letters=letters) as consumer:
        (opened,) = caplog.messages
        assert opened == (
            "Consuming orders as billing: at most 1000 messages at once; attempts: 3, "
            "then the dead-letter topic orders.dead"
        )
        receiving = asyncio.create_task(consumer.receive(handle))
        await until(lambda: letters.written and len(source.outcomes(Outcome.ACK)) == 3)
        consumer.stop()
        await receiving
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

    async with consuming(source, retry=QUICK, letters=letters) as consumer:
        receiving = asyncio.create_task(consumer.receive(handle))
        await until(lambda: letters.written)
        consumer.stop()
        await receiving
    failures = [record for record in caplog.records if "failed (failure" in record.getMessage()]
    assert [record.exc_info is not None for record in failures] == [False, False, True]
    for record in failures:
        assert "): RuntimeError: first line second line x" in record.getMessage()
        assert "\n" not in record.getMessage()
        assert len(record.getMessage()) < 700
    assert [record.levelname for record in failures] == ["WARNING"] * 3


async def test_without_a_dead_letter_the_traceback_comes_once(caplog: pytest.LogCaptureFixture):
    source = ScriptedSource()
    source.add("1")

    async def handle(message: Message) -> None:
        raise RuntimeError("no")

    async with consuming(source, retry=QUICK) as consumer:
        receiving = asyncio.create_task(consumer.receive(handle))
        await until(lambda: len(lines(caplog, "Handling message")) >= 6)
        consumer.stop()
        await receiving
    failures = [record for record in caplog.records if "failed (failure" in record.getMessage()]
    assert [record.exc_info is not None for record in failures[:6]] == [False, False, True, False, False, False]
    assert all("since there is no dead_letter" in record.getMessage() for record in failures[2:])


async def test_an_undecodable_message_without_a_dead_letter_is_one_warning(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "broker")
    source = ScriptedSource()
    source.add("1", data=b"{broken")
    events: list[Event] = []
    codec = Json(dict[str, int])
    async with consuming(source, retry=QUICK, codec=codec, lease=LeaseMode.NONE, events=events) as consumer:
        waiting = asyncio.create_task(consumer.next_message())
        await until(lambda: sum(isinstance(event, NoDeadLetter) for event in events) == 2)
        waiting.cancel()
    reports = [record for record in caplog.records if "has no dead_letter" in record.getMessage()]
    assert len(reports) > 1
    assert [record.levelno for record in reports[:2]] == [logging.WARNING, logging.DEBUG]
    line = reports[0].getMessage()
    assert line.startswith(
        "Subscription 'billing' has no dead_letter for message '1' of 'orders', which comes again in 0.00 s: "
        "cannot be decoded: "
    )
    assert line.endswith("; until it is acked, the position of its partition stays here")


async def test_a_codec_without_a_dead_letter_is_warned_of(caplog: pytest.LogCaptureFixture):
    warning = (
        "Subscription 'billing' of orders has a codec and no dead_letter: a message that the codec cannot decode "
        "comes again and again; give dead_letter= a topic, or DROP"
    )
    events: list[Event] = []
    async with consuming(ScriptedSource(), codec=Json(dict[str, int]), events=events):
        assert lines(caplog, "Subscription") == [warning]
        assert [event.text for event in events if isinstance(event, Warned)] == [warning]
    caplog.clear()
    async with consuming(ScriptedSource(), codec=Json(dict[str, int]), drop=True):
        pass
    async with consuming(ScriptedSource(), codec=Json(dict[str, int]), letters=Letters()):
        pass
    async with consuming(ScriptedSource()):
        pass
    assert lines(caplog, "Subscription") == []


async def test_the_last_attempt_of_a_message_that_comes_again_is_not_logged_as_given_up(
    caplog: pytest.LogCaptureFixture,
):
    source = ScriptedSource()
    source.add("1")
    events: list[Event] = []
    handled = 0

    async with consuming(source, retry=QUICK, events=events) as consumer:

        async def handle(message: Message) -> None:
            nonlocal handled
            handled += 1
            if handled < 5:
                raise RuntimeError("no")
            consumer.stop()

        await consumer.receive(handle)
    assert not [line for line in caplog.messages if "given up" in line and not line.startswith("Stopped")]
    failures = [record for record in caplog.records if "failed (failure" in record.getMessage()]
    assert "(failure 3, again in 0.00 s, since there is no dead_letter): RuntimeError: no" in failures[2].getMessage()
    assert [record.exc_info is not None for record in failures] == [False, False, True, False]
    assert not [line for line in caplog.messages if "has no dead_letter" in line]
    assert [event.reason for event in events if isinstance(event, NoDeadLetter)] == ["failed 3 times", "failed 4 times"]
    assert all(event.retry_in is not None for event in events if isinstance(event, HandlerFailed))


async def test_a_message_that_is_dead_lettered_or_dropped_is_logged(caplog: pytest.LogCaptureFixture):
    source, letters = ScriptedSource(), Letters()
    letters.failures = [BackendError("down\nfor now")]
    source.add("1")
    async with consuming(source, letters=letters) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        await message.reject("no\ndeparture")
    (failed,) = lines(caplog, "The dead letter of ")
    assert failed.startswith("The dead letter of message '1' of 'orders' was not written to 'orders.dead', again in ")
    assert failed.endswith(" s: down for now")
    assert lines(caplog, "Subscription") == [
        "Subscription 'billing' has dead-lettered message '1' of 'orders' to 'orders.dead': no departure"
    ]
    caplog.clear()
    source = ScriptedSource()
    source.add("1")
    async with consuming(source, drop=True) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        await message.reject("worthless")
    assert lines(caplog, "Subscription") == ["Subscription 'billing' has dropped message '1' of 'orders': worthless"]


async def test_an_undecodable_record_is_logged(broker_bus: broker.Bus, caplog: pytest.LogCaptureFixture):
    for topic in ("orders", "orders.dead"):
        await broker_bus.admin.ensure_topic(topic, partitions=1)
    await broker_bus.topic("orders").publish_batch([b"{broken", b"{}"])
    async with broker_bus.records(
        "orders", group="audit", codec=Json(dict[str, int]), on_decode_error="orders.dead"
    ) as log:
        record = await log.next_record(timeout=60)
        assert record is not None
    (line,) = lines(caplog, "Subscription")
    assert "'audit' has dead-lettered message 'orders:0:0' of 'orders'[0]@0 to 'orders.dead': cannot be decoded" in line


async def test_at_debug_every_attempt_has_its_traceback(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "broker")
    source = ScriptedSource()
    source.add("1")

    async with consuming(source, retry=QUICK) as consumer:

        async def handle(message: Message) -> None:
            if message.raw.attempt == 1:
                raise RuntimeError("no")
            consumer.stop()

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


class Placed(RawView):
    """The view of a broker that reports this place."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def place(self, raw: object, /) -> Place:
        return self._place


@pytest.mark.parametrize(("place", "shown"), [(Place(2, 71), "[2]@71"), (Place(None, 71), "@71")])
def test_a_place_without_a_partition_is_an_offset(place: Place, shown: str):
    message = Message("orders", b"", Raw("1", None, 1, {}), Placed(place), None, 0)
    assert placed(message) == f"message '1' of 'orders'{shown}"
