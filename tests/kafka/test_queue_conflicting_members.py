"""One subscription consumed with offsets and with markers at once, or with different queue_ids: members that see the
conflict warn."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from broker.bus import Bus, connect
from broker.errors import BrokerError, ConfigurationError
from broker.hooks import Warned
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.consumer.conflicting_members import conflicting_members
from broker_kafka.queue.markers.queue_filter import QueueFilter
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&topic_metadata_refresh_interval_ms=1000"
MARKERS = ["queue=markers", "queue=markers&queue_transactions=true"]


class Side:
    """A consumer of one kind."""

    def __init__(self, bus: Bus, topic: str, group: str) -> None:
        self.bus = bus
        self.warned: list[str] = []
        bus.hooks.listen(lambda event: self.warned.append(event.text) if isinstance(event, Warned) else None)
        self.inbox = bus.messages(topic, subscription=group)

    async def work(self) -> bool:
        """Ack what is there; whether there was anything."""
        message = await self.inbox.next_message(timeout=0.1)
        if message is None:
            return False
        await message.ack()
        return True


async def joined(stack: AsyncExitStack, kafka: KafkaServer, queue: str, topic: str, group: str) -> Side:
    bus = await stack.enter_async_context(connect(f"{kafka.url}?{QUICK}&{queue}"))
    side = Side(bus, topic, group)
    await stack.enter_async_context(side.inbox)
    return side


async def send(side: Side, topic: str, *keys: str) -> None:
    await side.bus.topic(topic).publish_batch(
        [OutboundMessage(b"x", key, partition=number) for number in range(2) for key in keys or ["k"]]
    )


@pytest.mark.deep
@pytest.mark.parametrize("markers", MARKERS)
@pytest.mark.parametrize("late", ["offsets", "markers"])
async def test_a_member_with_offsets_is_warned_of_one_with_markers(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, markers: str, late: str
) -> None:
    topic = make_topic(partitions=2)
    async with AsyncExitStack() as stack:
        first = await joined(stack, kafka, markers if late == "offsets" else "queue=offsets", topic, group)
        await send(first, topic)
        await eventually(first.work, PATIENCE, "the first message")
        second = await joined(stack, kafka, "queue=offsets" if late == "offsets" else markers, topic, group)
        alone, marked = (second, first) if late == "offsets" else (first, second)

        async def warned() -> bool:
            await send(first, topic)
            await first.work()
            await second.work()
            return bool(alone.warned)

        await eventually(warned, PATIENCE, "the warning")
        (warning,) = alone.warned
        assert repr(group) in warning
        assert "with queue=markers by anybroker at 127.0.0.1" in warning
        assert "a subscription of its own" in warning
        assert marked.warned == []


@pytest.mark.parametrize("markers", MARKERS)
async def test_a_group_that_has_changed_over_has_no_conflicts(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, markers: str
) -> None:
    topic = make_topic(partitions=2)
    async with AsyncExitStack() as stack:
        side = await joined(stack, kafka, markers, topic, group)
        await send(side, topic)
        await eventually(side.work, PATIENCE, "the first message")
        connection: Connection = side.bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
        assert [member.client for member in await conflicting_members(connection, topic, group)] == ["anybroker"]
    async with AsyncExitStack() as stack:
        sides = [await joined(stack, kafka, "queue=offsets", topic, group) for _ in range(2)]
        connection = sides[0].bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
        # Nothing was published since, so that what the others have committed still stands.
        assert await conflicting_members(connection, topic, group) == []


def unlike(how: str, more: str) -> tuple[str, str]:
    """Options of two sides of one group, each of which skips the messages of the other."""
    setting = f"queue=markers{more}"
    return f"{setting}&queue_id=mail", setting if how == "one takes all" else f"{setting}&queue_id=reports"


@pytest.mark.deep
@pytest.mark.parametrize("more", ["", "&queue_transactions=true"], ids=["apart", "together"])
@pytest.mark.parametrize("how", ["queue_id", "one takes all"])
async def test_a_member_that_skips_messages_of_others_warns_and_fails(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, how: str, more: str
) -> None:
    """Each of them would skip messages of the other for good."""
    topic = make_topic(partitions=2)
    mine, theirs = unlike(how, more)
    async with AsyncExitStack() as stack:
        # A member that joins before the other has committed is not refused.
        first = await joined(stack, kafka, mine, topic, group)
        second = await joined(stack, kafka, theirs, topic, group)

        async def worked(side: Side) -> BrokerError | None:
            try:
                await side.work()
            except BrokerError as error:
                return error
            return None

        async def ended() -> BrokerError | None:
            await send(first, topic, "mail", "reports")
            await worked(second)
            return await worked(first)

        error = await eventually(ended, PATIENCE, "the end")
        assert isinstance(error, ConfigurationError)
        (warning,) = first.warned
        assert error.message == warning
        assert f"Group {group!r}" in warning
        assert "anybroker at 127.0.0.1" in warning
        assert "a subscription of its own" in warning
        assert not second.warned if how == "one takes all" else set(second.warned) <= {warning}


@pytest.mark.deep
@pytest.mark.parametrize("more", ["", "&queue_transactions=true"], ids=["apart", "together"])
@pytest.mark.parametrize("how", ["queue_id", "one takes all"])
async def test_a_member_with_other_keys_is_refused(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, how: str, more: str
) -> None:
    topic = make_topic(partitions=2)
    mine, theirs = unlike(how, more)
    async with AsyncExitStack() as stack:
        first = await joined(stack, kafka, mine, topic, group)
        await send(first, topic, "mail", "reports")
        await eventually(first.work, PATIENCE, "the first message")
        with pytest.raises(ConfigurationError, match=r"with different values of queue_id: .* Stop one of the two"):
            await joined(stack, kafka, theirs, topic, group)
        # One with the same keys is no conflict.
        await joined(stack, kafka, mine, topic, group)
    # Members that have left are no conflict.
    async with AsyncExitStack() as stack:
        await joined(stack, kafka, theirs, topic, group)


async def test_members_of_one_queue_do_not_conflict(kafka: KafkaServer, make_topic: MakeTopic, group: str) -> None:
    topic = make_topic(partitions=2)
    queue = "queue=markers&queue_id=mail"
    async with AsyncExitStack() as stack:
        sides = [await joined(stack, kafka, queue, topic, group) for _ in range(2)]
        connection: Connection = sides[0].bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]

        async def both_committed() -> bool:
            await send(sides[0], topic, "mail")
            for side in sides:
                await side.work()
            # A slow member may be expelled; it rejoins with another id, and its next commit has the new mark.
            return len(await conflicting_members(connection, topic, group)) == 2

        await eventually(both_committed, PATIENCE, "commits of both members")
        assert (
            await conflicting_members(
                connection, topic, group, key_mark=QueueFilter.of(group, connection.settings).key_mark
            )
            == []
        )
