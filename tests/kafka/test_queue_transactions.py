"""`queue_transactions`: STARTs and positions count together, whatever is suspended or dies in between."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.bus import Bus, connect
from broker.messages import Message
from broker.testing.waiting import bodies, nothing_more, numbered, once, take
from broker_kafka.fenced_writer import FencedWriter, OutcomeUnknown, OutgoingRecord, Positions
from broker_kafka.queue.markers.marker_topic import marker_topic_name
from broker_kafka.queue.markers.wire import Kind, MessageId, read_markers
from tests.kafka import queue_start_process
from tests.kafka.group_members import eventually
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, read_all

PATIENCE = 60.0
OPTIONS = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers&queue_transactions=true"


def starts_of(kafka: KafkaServer, group: str) -> Counter[MessageId]:
    """How often each message was started, as trackers see it."""
    RawAdmin(kafka.bootstrap).wait_for_markers(marker_topic_name(group), 0)
    records = read_all(kafka.bootstrap, marker_topic_name(group))
    found = [marker for record in records for marker, _ in read_markers(record.value())]
    starts = [marker for marker in found if marker is not None and marker.kind is Kind.START]
    return Counter(message for marker in starts for message in marker.ids())


async def done(bus: Bus, topic: str, group: str, messages: Sequence[Message[bytes]]) -> None:
    """Ack them; nothing is left then."""
    for message in messages:
        assert message.delivery_attempt == 1
        await message.ack()
    lag = await bus.admin.lag(topic, group)
    assert (lag.waiting, lag.unsettled) == (0, 0)


@pytest.mark.deep
@pytest.mark.parametrize(("where", "then"), [("before", "goes on"), ("within", "goes on"), ("within", "dies")])
async def test_a_process_suspended_while_starting_messages_duplicates_none(
    kafka: KafkaServer, topic: str, group: str, where: str, then: str
) -> None:
    url = f"{kafka.url}?{OPTIONS}"
    async with connect(url) as bus:
        await bus.admin.ensure_subscription(topic, group)
        await bus.topic(topic).publish_batch(numbered(3))
        zombie = await asyncio.create_subprocess_exec(
            sys.executable, "-m", queue_start_process.__name__, url, topic, group, where, stdout=PIPE
        )
        assert zombie.stdout is not None
        try:
            stat = Path(f"/proc/{zombie.pid}/stat")
            await eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
            if then == "dies":
                zombie.kill()
            async with bus.messages(topic, subscription=group, confirm_acks=True) as inbox:
                messages = await take(inbox, 3, PATIENCE)
                assert bodies(messages) == once(numbered(3))
                if then == "goes on":
                    zombie.send_signal(signal.SIGCONT)
                    async with asyncio.timeout(PATIENCE):
                        assert await zombie.stdout.readline() == b"undone\n"
                await done(bus, topic, group, messages)
                await nothing_more(inbox, 0.3)
        finally:
            if zombie.returncode is None:
                zombie.kill()
            output, _ = await zombie.communicate()
        assert b"m" not in output
        starts = await asyncio.to_thread(starts_of, kafka, group)
        assert sorted(starts.values()) == [1, 1, 1]


@pytest.mark.parametrize("is_written", [True, False], ids=["it was written", "it was not"])
async def test_an_unknown_outcome_is_resolved(
    kafka: KafkaServer, topic: str, group: str, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FencedWriter.write
    answers_to_lose = [1]

    async def losing_the_answer(
        self: FencedWriter, entries: Sequence[OutgoingRecord], positions: Positions | None = None
    ) -> None:
        if positions is None or not answers_to_lose:
            return await write(self, entries, positions)
        answers_to_lose.clear()
        if is_written:
            await write(self, entries, positions)
        raise OutcomeUnknown("The answer was lost")

    monkeypatch.setattr(FencedWriter, "write", losing_the_answer)
    async with connect(f"{kafka.url}?{OPTIONS}") as bus:
        await bus.topic(topic).publish_batch(numbered(3))
        async with bus.messages(topic, subscription=group, confirm_acks=True) as inbox:
            messages = await take(inbox, 3, PATIENCE)
            assert bodies(messages) == once(numbered(3))
            await done(bus, topic, group, messages)
            await nothing_more(inbox, 0.3)
        starts = await asyncio.to_thread(starts_of, kafka, group)
        assert sorted(starts.values()) == [1, 1, 1]
    assert not answers_to_lose
