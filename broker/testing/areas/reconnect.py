"""Conformance tests of reconnecting: a server that fails and returns loses no confirmed message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from broker.bus import Bus
from broker.errors import BrokerError, PublishError, SettleError
from broker.hooks import Connected, Disconnected, Event
from broker.messages import Message
from broker.receipts import Receipt
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.shared_restart import shares_restart
from broker.testing.waiting import bodies, eventually, numbered, once, read, take, until_seen

__all__ = ["Reconnecting"]

PACE = 0.002
"""Seconds between two messages of one publisher."""
PIPELINE_PACE = 0.02


class Reconnecting(ConformanceCase):
    """Restart, kill and pause of the server under load."""

    async def _through(self, harness: Harness, disturb: Callable[[], Awaitable[None]]) -> None:
        """Publish and consume while the server is disturbed twice; every confirmed message arrives."""
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        confirmed: set[bytes] = set()
        seen: set[bytes | None] = set()
        opened, enough, all_sent = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def publish(prefix: str) -> None:
            number = 0
            while not enough.is_set():
                number += 1
                body = f"{prefix}-{number}".encode()
                try:
                    await bus.topic(topic).publish(body)
                except BrokerError as error:
                    _check_retriable(error)
                else:
                    confirmed.add(body)
                await asyncio.sleep(PACE)

        async def consume() -> None:
            async with bus.messages(topic, subscription="readers") as inbox:
                opened.set()
                while not (all_sent.is_set() and seen >= confirmed):
                    message = await inbox.next_message(timeout=harness.quiet)
                    if message is not None:
                        seen.add(message.data)
                        async with message:
                            pass

        consuming = asyncio.ensure_future(consume())
        # A consumer that is not open yet may fail when the server stops.
        await asyncio.wait((consuming, asyncio.ensure_future(opened.wait())), return_when=asyncio.FIRST_COMPLETED)
        publishing = [asyncio.ensure_future(publish(f"p{number}")) for number in range(8)]
        for _ in range(2):
            await _grow(confirmed, harness)
            await disturb()
        await _grow(confirmed, harness)
        enough.set()
        await asyncio.gather(*publishing)
        all_sent.set()
        async with asyncio.timeout(6 * harness.patience):
            await consuming
        assert seen >= confirmed

    @requires("harness.restart")
    @promise(
        "reconnect.restart-loses-nothing",
        "After two restarts of the server under load, every message with a receipt arrives.",
        seconds=120,
    )
    async def test_restart_loses_nothing(self, harness: Harness) -> None:
        await self._through(harness, harness.restart)

    @requires("harness.kill")
    @promise(
        "reconnect.kill-loses-nothing",
        "After two SIGKILLs of the server under load, every message with a receipt arrives.",
        seconds=120,
    )
    async def test_kill_loses_nothing(self, harness: Harness) -> None:
        await self._through(harness, harness.kill)

    @requires("harness.pause")
    @promise(
        "reconnect.pause-loses-nothing",
        "A server that freezes for longer than a lease loses no message.",
        seconds=120,
    )
    async def test_pause_loses_nothing(self, harness: Harness) -> None:
        await self._through(harness, lambda: harness.pause(1.5 * harness.lease_seconds))

    @requires("harness.cut")
    @promise(
        "reconnect.cut-in-a-batch-loses-nothing",
        "When connections are cut during a batch, each message has a result, and those with a receipt arrive.",
    )
    async def test_cut_in_a_batch_loses_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        confirmed: set[bytes] = set()
        seen: set[bytes | None] = set()
        all_sent = asyncio.Event()

        # Some brokers keep messages for existing subscriptions only.
        async with bus.messages(topic, subscription="readers") as inbox:

            async def consume() -> None:
                while not (all_sent.is_set() and seen >= confirmed):
                    batch = await inbox.next_batch(50, timeout=harness.quiet)
                    seen.update(message.data for message in batch)
                    try:
                        await batch.ack()
                    except SettleError:
                        continue

            consuming = asyncio.ensure_future(consume())
            for number in range(8):
                batch = numbered(200, f"b{number}")
                publishing = asyncio.ensure_future(bus.topic(topic).publish_batch(batch))
                if number % 2:
                    for _ in range(number):
                        await asyncio.sleep(0)
                    await harness.cut(bus)
                try:
                    await publishing
                except PublishError as error:
                    outcomes = zip(batch, error.outcomes, strict=True)
                    confirmed.update(body for body, outcome in outcomes if isinstance(outcome, Receipt))
                except BrokerError as error:
                    _check_retriable(error)
                else:
                    confirmed.update(batch)
            all_sent.set()
            async with asyncio.timeout(6 * harness.patience):
                await consuming
        assert seen >= confirmed
        assert len(confirmed) >= 800

    @shares_restart
    @requires("harness.restart")
    @promise("reconnect.disconnects-are-events", "A lost and a restored connection are events of the bus.", seconds=180)
    async def test_disconnects_are_events(self, harness: Harness) -> None:
        bus, topic = await harness.connect(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"before")
            await until_seen(inbox, [b"before"], harness.patience)
            await harness.restart()
            await eventually(
                lambda: any(isinstance(event, Connected) and event.again for event in events),
                3 * harness.patience,
                "the news of the new connection",
            )
            assert any(isinstance(event, Disconnected) for event in events)
            await _publish_soon(bus, topic, b"after", harness.patience)
            await until_seen(inbox, [b"after"], 3 * harness.patience)

    @shares_restart
    @requires("harness.restart")
    @promise(
        "reconnect.acks-survive",
        "Messages acked before a restart are not redelivered; unacked ones are.",
        seconds=180,
    )
    async def test_acks_survive(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            messages = await take(inbox, 20, harness.patience)
            for message in messages[:10]:
                await message.ack()

            async def acked() -> bool:
                return (await bus.admin.lag(topic, "readers")).unsettled in (10, None)

            if bus.capabilities.messages and bus.capabilities.messages.subscription_admin:
                await eventually(acked, harness.patience, "ten acks at the server")
        await harness.restart()
        bus = await harness.connect(short_lease=True)
        async with bus.messages(topic, subscription="readers") as inbox:
            rest = [message.data or b"" for message in messages[10:]]
            seen = await until_seen(inbox, rest, 3 * harness.patience)
            assert set(bodies(seen)) == set(rest)

    @shares_restart
    @requires("harness.restart")
    @promise(
        "reconnect.released-is-redelivered",
        "Messages released by a close right before a restart are redelivered, at the latest when their lease ends.",
        seconds=180,
    )
    async def test_released_is_redelivered(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(10))
            await take(inbox, 10, harness.patience)
        await bus.close()
        await harness.restart()
        bus = await harness.connect(short_lease=True)
        async with bus.messages(topic, subscription="readers") as inbox:
            assert set(bodies(await until_seen(inbox, numbered(10), 3 * harness.patience))) == set(numbered(10))

    @shares_restart
    @requires("harness.restart")
    @promise(
        "reconnect.idle-consumer-wakes",
        "A consumer that waited through a restart receives the next message.",
        seconds=180,
    )
    async def test_idle_consumer_wakes(self, harness: Harness) -> None:
        bus, topic = await harness.connect(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            waiting: asyncio.Future[Message[bytes] | None] = asyncio.ensure_future(inbox.next_message())
            await asyncio.wait({waiting}, timeout=harness.quiet)
            await harness.restart()
            await _publish_soon(bus, topic, b"x", harness.patience)
            async with asyncio.timeout(3 * harness.patience):
                message = await waiting
            assert message is not None
            assert message.data == b"x"

    @shares_restart
    @requires("harness.restart", "records")
    @promise(
        "reconnect.positions-survive",
        "Committed positions survive a restart; the group continues there, in order.",
        seconds=180,
    )
    async def test_positions_survive(self, harness: Harness) -> None:
        bus, topic, group = await harness.connect(), await harness.topic(partitions=1), unique("group")
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.records(topic, group=group) as log:
            await (await read(log, 8, harness.patience))[-1].commit()
        await harness.restart()
        bus = await harness.connect()
        async with bus.records(topic, group=group) as log:
            assert [record.data for record in await read(log, 12, 3 * harness.patience)] == numbered(20)[8:]

    @shares_restart
    @requires("harness.restart", "records")
    @promise(
        "reconnect.records-continue",
        "A record consumer continues after a restart, with every record at least once and in order.",
        seconds=180,
    )
    async def test_records_continue(self, harness: Harness) -> None:
        bus, topic = await harness.connect(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(20, "a"))
        async with bus.records(topic, group=unique("group")) as log:
            first = await read(log, 20, harness.patience)
            await first[-1].commit()
            await harness.restart()
            for body in numbered(20, "b"):
                await _publish_soon(bus, topic, body, harness.patience)
            seen: list[bytes | None] = []
            while b"b-000019" not in seen:
                record = await log.next_record(timeout=3 * harness.patience)
                assert record is not None, f"Reading ended at {seen[-1:]}"
                seen.append(record.data)
            fresh = list(dict.fromkeys(body for body in seen if body in numbered(20, "b")))
            assert fresh == numbered(20, "b")

    @shares_restart
    @requires("harness.restart")
    @promise(
        "reconnect.pipeline-continues",
        "Messages that were queued by `enqueue` during a restart are published when the server is back.",
        seconds=180,
    )
    async def test_pipeline_continues(self, harness: Harness) -> None:
        bus, topic = await harness.connect(), await harness.topic()
        if bus.capabilities.records is None:
            # A broker without a log keeps messages for existing subscriptions only.
            await bus.admin.ensure_subscription(topic, "readers")
        futures = [await bus.topic(topic).enqueue(body) for body in numbered(100)]
        restarting = asyncio.ensure_future(harness.restart())
        sent = [*numbered(100), *numbered(100, "n")]
        futures += [await bus.topic(topic).enqueue(body) for body in sent[100:]]
        # The server may stop later, or be away for long.
        while not restarting.done() and len(sent) < 5000:
            sent.append(f"w-{len(sent)}".encode())
            futures.append(await bus.topic(topic).enqueue(sent[-1]))
            await asyncio.sleep(PIPELINE_PACE)
        await restarting
        async with asyncio.timeout(4 * harness.patience):
            ended = await asyncio.gather(*futures, return_exceptions=True)
        certain = [body for body, outcome in zip(sent, ended, strict=True) if not isinstance(outcome, BaseException)]
        unknown = [outcome for outcome in ended if isinstance(outcome, BaseException)]
        assert all(isinstance(outcome, BrokerError) and outcome.retriable for outcome in unknown)
        bus = await harness.connect()
        async with bus.messages(topic, subscription="readers", start="earliest") as inbox:
            counts = bodies(await until_seen(inbox, certain, 2 * harness.patience))
            assert (
                {body: counts[body] for body in certain} == once(certain)
                if bus.capabilities.publish.deduplication
                else True
            )


async def _grow(confirmed: set[bytes], harness: Harness) -> None:
    wanted = len(confirmed) + 200
    await eventually(lambda: len(confirmed) >= wanted, 4 * harness.patience, f"{wanted} receipts")


def _check_retriable(error: BrokerError) -> None:
    assert error.retriable, f"A broken connection was reported as {error!r}"


async def _publish_soon(bus: Bus, topic: str, body: bytes, patience: float) -> None:
    """Publish, with retries while the connection is being restored."""

    async def published() -> bool:
        try:
            await bus.topic(topic).publish(body)
        except BrokerError as error:
            _check_retriable(error)
            return False
        return True

    await eventually(published, 3 * patience, "a publish after the restart")
