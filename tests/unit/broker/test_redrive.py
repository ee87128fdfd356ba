"""Redrive: dead letters return to their origin, none is lost, and those that cannot be moved stay."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from broker.bus import Bus
from broker.consuming.retry.policy import Retry
from broker.envelopes import DEAD_LETTER_PREFIX
from broker.messages import Message
from broker.names import REDRIVE_SUBSCRIPTION
from broker.outbound import OutboundMessage
from broker.redrive import DeadLetter
from broker_inmem import Broker

DEAD = "orders.dead"
TO = ("orders", "invoices", "gone.topic")


@pytest.fixture
async def bus(broker_bus: Bus) -> Bus:
    for name in ("orders", "invoices", DEAD):
        await broker_bus.admin.ensure_topic(name)
    return broker_bus


async def take(bus: Bus, topic: str, subscription: str, count: int) -> list[Message[bytes]]:
    found: list[Message[bytes]] = []
    async with bus.messages(topic, subscription=subscription) as inbox:
        while len(found) < count:
            message = await inbox.next_message(timeout=60)
            assert message is not None, f"only {len(found)} of {count} came"
            await message.ack()
            found.append(message)
    return found


async def dead_letter(bus: Bus, topic: str, *messages: OutboundMessage) -> None:
    """Have a consumer reject the messages, so that the letters are real."""
    await bus.topic(topic).publish_batch(messages)
    async with bus.messages(topic, subscription="billing", dead_letter=DEAD) as inbox:
        for _ in messages:
            message = await inbox.next_message(timeout=60)
            assert message is not None
            await message.reject(f"no use for {message.id}")


async def test_letters_held_by_another_redrive_are_counted(bus: Bus) -> None:
    await dead_letter(bus, "orders", *(OutboundMessage(b"", id=f"order-{number}") for number in range(3)))
    async with bus.messages(DEAD, subscription=REDRIVE_SUBSCRIPTION, max_outstanding=2) as another:
        assert len(await another.next_batch(2, timeout=5)) == 2
        report = await bus.admin.redrive(DEAD, to=TO)
        assert (report.moved, report.failed, report.elsewhere) == (1, 0, 2)
        assert (await bus.admin.redrive(DEAD, to=TO, limit=1)).elsewhere == 2
    report = await bus.admin.redrive(DEAD, to=TO)
    assert (report.moved, report.elsewhere) == (2, 0)


async def test_letters_return_unchanged_to_every_subscription(bus: Bus) -> None:
    sent = datetime(2026, 5, 1, 12, tzinfo=UTC)
    original = OutboundMessage(b"body", b"key", {"type": "created", "ü": ""}, id="order-1", publish_time=sent)
    await dead_letter(bus, "orders", original)
    await dead_letter(
        bus, "invoices", OutboundMessage(b"invoice", id="invoice-1"), OutboundMessage(b"more", id="invoice-2")
    )
    await bus.admin.ensure_subscription("orders", "archive", start="latest")
    seen: list[int] = []
    report = await bus.admin.redrive(DEAD, to=TO, progress=seen.append)
    assert (report.moved, report.skipped, report.failed, report.repeatable) == (3, 0, 0, 0)
    assert report.by_topic == {"orders": 1, "invoices": 2}
    assert seen[-1] == 3
    for subscription in ("billing", "archive"):
        (message,) = await take(bus, "orders", subscription, 1)
        assert (message.data, message.key, dict(message.attributes)) == (b"body", b"key", {"type": "created", "ü": ""})
        assert message.publish_time == sent
        assert message.id.startswith("order-1-r")
    assert (await bus.admin.redrive(DEAD, to=TO)).moved == 0


async def test_a_repeated_redrive_of_a_message_uses_a_new_id(bus: Bus) -> None:
    await dead_letter(bus, "orders", OutboundMessage(b"body", id="order-1"))
    ids: set[str] = set()
    for _ in range(3):
        assert (await bus.admin.redrive(DEAD, to=TO)).moved == 1
        async with bus.messages("orders", subscription="billing", dead_letter=DEAD) as inbox:
            message = await inbox.next_message(timeout=60)
            assert message is not None
            ids.add(message.id)
            await message.reject("again")
    assert len(ids) == 3
    assert {identity.rpartition("-r")[0] for identity in ids} == {"order-1"}


async def test_the_repetition_of_an_interrupted_redrive_is_deduplicated(bus: Bus) -> None:
    await dead_letter(bus, "orders", OutboundMessage(b"body", id="order-1"))
    assert bus.capabilities.publish.deduplication
    await bus.admin.ensure_subscription("orders", "archive", start="latest")
    assert (await bus.admin.redrive(DEAD, to=TO)).moved == 1
    await bus.admin.delete_subscription(DEAD, REDRIVE_SUBSCRIPTION)
    assert (await bus.admin.redrive(DEAD, to=TO)).moved == 1
    assert (await bus.admin.lag("orders", "archive")).waiting == 1


async def test_limit_bounds_the_moved_letters(bus: Bus) -> None:
    await dead_letter(bus, "orders", *(OutboundMessage(b"%d" % n) for n in range(5)))
    assert (await bus.admin.redrive(DEAD, to=TO, limit=2)).moved == 2
    assert (await bus.admin.redrive(DEAD, to=TO, limit=10)).moved == 3
    assert len(await take(bus, "orders", "billing", 5)) == 5


async def test_messages_without_an_origin_stay_and_are_counted(bus: Bus) -> None:
    await bus.topic(DEAD).publish(b"foreign", attributes={"reason": "mine"})
    await dead_letter(bus, "orders", OutboundMessage(b"1"))
    for moved in (1, 0):
        report = await bus.admin.redrive(DEAD, to=TO)
        assert (report.moved, report.skipped, report.failed) == (moved, 1, 0)
    (letter,) = await bus.admin.list_dead(DEAD)
    assert letter.data == b"foreign"
    assert letter.topic is None


async def test_letter_whose_publish_fails_stays(bus: Bus, inmem_broker: Broker) -> None:
    await dead_letter(bus, "orders", *(OutboundMessage(b"%d" % n) for n in range(3)))
    await bus.topic(DEAD).publish(OutboundMessage(b"lost", None, {f"{DEAD_LETTER_PREFIX}topic": "gone.topic"}))
    report = await bus.admin.redrive(DEAD, to=TO)
    assert (report.moved, report.failed, report.skipped) == (3, 1, 0)
    assert "gone.topic" in report.errors["gone.topic"].message
    assert [letter.data for letter in await bus.admin.list_dead(DEAD)] == [b"lost"]
    await bus.admin.ensure_topic("gone.topic")
    assert (await bus.admin.redrive(DEAD, to=TO)).by_topic == {"gone.topic": 1}
    assert await bus.admin.list_dead(DEAD) == []


async def test_redrive_that_is_cancelled_loses_nothing(bus: Bus) -> None:
    await dead_letter(bus, "orders", *(OutboundMessage(b"%d" % n) for n in range(20)))
    await bus.admin.ensure_subscription("orders", "archive", start="latest")
    redriving: asyncio.Task[object] | None = None

    def interrupt(moved: int) -> None:
        assert redriving is not None
        redriving.cancel()

    for limit in (3, 4):
        redriving = asyncio.create_task(bus.admin.redrive(DEAD, to=TO, limit=limit, progress=interrupt))
        with pytest.raises(asyncio.CancelledError):
            await redriving
    await bus.admin.redrive(DEAD, to=TO)
    bodies = [message.data for message in await take(bus, "orders", "archive", 20)]
    assert sorted(bodies, key=lambda body: int(body or b"")) == [b"%d" % n for n in range(20)]


async def test_letters_written_during_the_redrive_stay(bus: Bus) -> None:
    await dead_letter(bus, "orders", *(OutboundMessage(b"%d" % n, id=f"order-{n}") for n in range(3)))
    died = 0
    again = asyncio.Event()

    async def fail(message: Message[bytes]) -> None:
        nonlocal died
        died += 1
        if died == 3:
            again.set()
        raise ValueError("still no use")

    inbox = bus.messages("orders", subscription="billing", dead_letter=DEAD, retry=Retry(max_attempts=1))
    async with inbox:
        handling = asyncio.create_task(inbox.receive(fail))
        report = await bus.admin.redrive(DEAD, to=TO)
        await again.wait()
        await inbox.close()
        await handling
    assert report.moved == 3
    assert died == 3
    assert {letter.error for letter in await bus.admin.list_dead(DEAD)} == {"ValueError: still no use"}


async def test_listing_shows_reason_and_origin_and_changes_nothing(bus: Bus) -> None:
    await dead_letter(bus, "orders", OutboundMessage(b"body", "key", {"type": "created"}, id="order-1"))
    for subscriptions in ([], [REDRIVE_SUBSCRIPTION]):
        for _ in range(2):
            (letter,) = await bus.admin.list_dead(DEAD)
            assert (letter.topic, letter.subscription, letter.id) == ("orders", "billing", "order-1")
            assert letter.reason == "no use for order-1"
            assert (letter.key, letter.data, letter.attributes) == (b"key", b"body", {"type": "created"})
            assert letter.time is not None
            assert letter.time.tzinfo is not None
        assert await bus.admin.subscriptions(DEAD) == subscriptions
        await bus.admin.ensure_subscription(DEAD, REDRIVE_SUBSCRIPTION)
    assert (await bus.admin.redrive(DEAD, to=TO)).moved == 1
    assert await bus.admin.list_dead(DEAD) == []


@pytest.mark.parametrize("redriven_before", [False, True])
async def test_listing_is_bounded_and_begins_with_the_oldest(bus: Bus, redriven_before: bool) -> None:
    if redriven_before:
        await bus.admin.redrive(DEAD, to=TO)
    await dead_letter(bus, "orders", *(OutboundMessage(b"%d" % n, "key") for n in range(7)))
    assert [letter.data for letter in await bus.admin.list_dead(DEAD, limit=3)] == [b"0", b"1", b"2"]
    assert len(await bus.admin.list_dead(DEAD)) == 7


def test_foreign_letters_are_read_as_far_as_they_can_be() -> None:
    class Foreign:
        topic = DEAD
        key = None
        data = None
        publish_time = None
        broker_time = None
        native = None

        def __init__(self, attributes: dict[str, str]) -> None:
            self.attributes = attributes

    def read(**fields: str) -> DeadLetter:
        return DeadLetter.from_envelope(Foreign({DEAD_LETTER_PREFIX + name: value for name, value in fields.items()}))

    assert read(attempts="7").attempts == 7
    assert read(attempts="many").attempts is None
    assert (read(partition="2", offset="71").partition, read(partition="2", offset="71").offset) == (2, 71)
    assert read(offset="9" * 5000).offset is None
    assert read(time="yesterday").time is None
    assert read(time="0001-01-01T00:00:00+14:00").time is None
    assert read(time="2030-01-01T00:00:00").time == read(time="2030-01-01T01:00:00+01:00").time
    assert read(reason="x").topic is None
