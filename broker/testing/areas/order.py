"""Conformance tests of order by key: in order within a key, in parallel across keys."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict

from broker.consuming.retry.policy import Retry
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.areas.retry import QUICK, handling
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import eventually, interleaved, numbered, take, until_seen
from broker.threads.messages import BlockingMessage

__all__ = ["Order"]


class Order(ConformanceCase):
    """Order by key."""

    @requires("messages.ordered_delivery")
    @promise(
        "order.one-consumer-sees-publish-order",
        "A single consumer without failures receives the messages of each key in the order of publishing.",
    )
    async def test_one_consumer_sees_publish_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", ordered_by_key=True) as inbox:
            await bus.topic(topic).publish_batch(interleaved(16, 60))
            seen: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)
            for _ in range(16 * 60):
                (message,) = await take(inbox, 1, harness.patience)
                seen[message.key].append(message.data)
                await message.ack()
            assert all(bodies == numbered(60) for bodies in seen.values())
            assert len(seen) == 16

    @requires("messages.ordered_delivery")
    @promise(
        "order.keys-run-in-parallel-each-in-order",
        "With `ordered_by_key`, one handler per key runs at a time, in order; keys run in parallel.",
    )
    async def test_keys_run_in_parallel_each_in_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        running: set[bytes | None] = set()
        seen: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)
        peak = 0

        async def handle(message: Message[bytes]) -> None:
            nonlocal peak
            assert message.key not in running, f"Two handlers of key {message.key!r} at once"
            running.add(message.key)
            peak = max(peak, len(running))
            for _ in range(3):
                await asyncio.sleep(0)
            seen[message.key].append(message.data)
            running.discard(message.key)

        async with bus.messages(topic, subscription="readers", ordered_by_key=True) as inbox:
            await bus.topic(topic).publish_batch(interleaved(8, 30))
            await handling(
                inbox.receive(handle, concurrency=8),
                lambda: sum(map(len, seen.values())) >= 240,
                inbox,
                harness.patience,
            )
        assert all(bodies == numbered(30) for bodies in seen.values())
        assert peak > 1, "Keys did not run in parallel"

    @requires("messages.ordered_delivery")
    @promise(
        "order.plain-handlers-keep-order",
        "With `ordered_by_key`, plain handlers in threads handle each key in order, one at a time.",
    )
    async def test_plain_handlers_keep_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        running: set[bytes | None] = set()
        side_by_side: list[bytes | None] = []
        seen: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)

        def handle(message: BlockingMessage[bytes]) -> None:
            if message.key in running:
                side_by_side.append(message.key)
            running.add(message.key)
            time.sleep(0.001)
            seen[message.key].append(message.data)
            running.discard(message.key)

        async with bus.messages(topic, subscription="readers", ordered_by_key=True) as inbox:
            await bus.topic(topic).publish_batch(interleaved(8, 30))
            await handling(
                inbox.receive(handle, concurrency=8),
                lambda: sum(map(len, seen.copy().values())) >= 240,
                inbox,
                harness.patience,
            )
        assert side_by_side == []
        assert all(bodies == numbered(30) for bodies in seen.values())

    @promise(
        "order.blocked-key-blocks-only-itself",
        "A key whose handler does not end delays only its own messages.",
    )
    async def test_blocked_key_blocks_only_itself(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        done: list[bytes | None] = []
        finish = asyncio.Event()

        async def handle(message: Message[bytes]) -> None:
            if message.key == b"stuck":
                await finish.wait()
            done.append(message.key)

        async with bus.messages(topic, subscription="readers", ordered_by_key=True) as inbox:
            stuck = [OutboundMessage(body, key="stuck") for body in numbered(3)]
            others = [OutboundMessage(b"x", key=f"other-{n}") for n in range(30)]
            await bus.topic(topic).publish_batch([*stuck, *others])
            work = asyncio.ensure_future(inbox.receive(handle, concurrency=4))
            await eventually(lambda: len(done) == 30, harness.patience, "the end of all other keys")
            assert b"stuck" not in done
            finish.set()
            await eventually(lambda: len(done) == 33, harness.patience, "the end of the stuck key")
            await inbox.close()
            await work

    @promise(
        "order.failed-head-is-retried-first",
        "A failed message is retried before any later message of its key is handled.",
    )
    async def test_failed_head_is_retried_first(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)
        failures: defaultdict[bytes | None, int] = defaultdict(int)

        async def handle(message: Message[bytes]) -> None:
            if message.data == b"m-000002" and failures[message.key] < 2:
                failures[message.key] += 1
                raise ValueError("raised by the test")
            seen[message.key].append(message.data)

        async with bus.messages(topic, subscription="readers", ordered_by_key=True, retry=QUICK) as inbox:
            # One publish at a time: order within a batch is another promise.
            for message in interleaved(3, 6):
                await bus.topic(topic).publish(message)
            await handling(
                inbox.receive(handle, concurrency=4),
                lambda: sum(map(len, seen.values())) >= 18,
                inbox,
                harness.patience,
            )
        assert set(failures.values()) == {2}
        for key, bodies in seen.items():
            before = bodies.index(b"m-000002")
            assert set(bodies[before + 1 :]) >= {b"m-000003", b"m-000004", b"m-000005"}, f"Key {key!r}: {bodies}"

    @requires("messages.ordered_delivery")
    @promise(
        "order.failures-keep-order",
        "With handlers that fail repeatedly, every key is still handled completely and in order.",
    )
    async def test_failures_keep_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)
        calls: Counter[tuple[bytes | None, bytes | None]] = Counter()

        async def handle(message: Message[bytes]) -> None:
            calls[(message.key, message.data)] += 1
            if sum(calls.values()) % 13 == 0 and calls[(message.key, message.data)] < 3:
                raise ValueError("raised by the test")
            seen[message.key].append(message.data)

        policy = Retry(max_attempts=5, initial=0.01, maximum=0.02, jitter=0.0)
        async with bus.messages(topic, subscription="readers", ordered_by_key=True, retry=policy) as inbox:
            await bus.topic(topic).publish_batch(interleaved(10, 100))
            await handling(
                inbox.receive(handle, concurrency=8),
                lambda: sum(map(len, seen.values())) >= 1000,
                inbox,
                2 * harness.patience,
            )
        assert all(bodies == numbered(100) for bodies in seen.values())
        assert sum(calls.values()) > 1000

    @requires("harness.cut", "messages.ordered_delivery")
    @promise(
        "order.survives-a-cut",
        "A consumer whose connection is cut while messages arrive handles every key completely and in order.",
        seconds=240,
    )
    async def test_survives_a_cut(self, harness: Harness) -> None:
        # Publishes use another connection than the consumer, whose connection is cut.
        bus, other, topic = await harness.connect(short_lease=True), await harness.bus(), await harness.topic()
        # On some brokers the first consumer decides whether the subscription is ordered.
        async with other.messages(topic, subscription="readers", ordered_by_key=True):
            pass
        wanted = [body.ljust(8000) for body in numbered(60)]
        for body in wanted:
            await other.topic(topic).publish_batch([OutboundMessage(body, key=f"key-{key}") for key in range(8)])
        seen: defaultdict[bytes | None, dict[bytes | None, None]] = defaultdict(dict)

        def handled() -> int:
            return sum(map(len, seen.values()))

        goals = list(range(20, 8 * len(wanted), 60))

        async def handle(message: Message[bytes]) -> None:
            # A message whose ack was lost is redelivered; the first deliveries are in order.
            seen[message.key].setdefault(message.data)
            if goals and handled() >= goals[0]:
                goals.pop(0)
                await harness.cut(bus)

        async with bus.messages(topic, subscription="readers", ordered_by_key=True, max_outstanding=200) as inbox:
            await handling(
                inbox.receive(handle, concurrency=8),
                lambda: handled() == 8 * len(wanted),
                inbox,
                # A key may wait a minute for a message whose outcome is unknown.
                60.0 + 8 * harness.patience,
            )
        assert handled() == 8 * len(wanted)
        wrong = {key: [(body or b"").strip() for body in came] for key, came in seen.items() if list(came) != wanted}
        assert not wrong

    @promise(
        "order.dead-letter-releases-followers",
        "Dead-lettering a message releases the next messages of its key.",
    )
    async def test_dead_letter_releases_followers(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        await bus.admin.ensure_subscription(dead, "readers")
        seen: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            if message.data == b"m-000000":
                raise ValueError("raised by the test")
            seen.append(message.data)

        async with bus.messages(
            topic, subscription="readers", ordered_by_key=True, retry=QUICK, dead_letter=dead
        ) as inbox:
            await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in numbered(5)])
            await handling(inbox.receive(handle), lambda: len(seen) >= 4, inbox, harness.patience)
        assert sorted(body or b"" for body in seen) == numbered(5)[1:]
        async with bus.messages(dead, subscription="readers", start="earliest") as letters:
            (letter,) = await take(letters, 1, harness.patience)
            assert (letter.data, letter.key) == (b"m-000000", b"k")

    @requires("messages.native_delay")
    @promise(
        "order.hot-key-does-not-starve-others",
        "Thousands of messages of one key do not keep other keys from being handled.",
    )
    async def test_hot_key_does_not_starve_others(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        done: list[bytes | None] = []
        finish = asyncio.Event()

        async def handle(message: Message[bytes]) -> None:
            if message.key == b"hot":
                await finish.wait()
            done.append(message.key)

        async with bus.messages(topic, subscription="readers", ordered_by_key=True, max_outstanding=40) as inbox:
            await bus.topic(topic).publish_batch([OutboundMessage(body, key="hot") for body in numbered(200)])
            await bus.topic(topic).publish_batch([OutboundMessage(b"x", key=f"cold-{n}") for n in range(20)])
            work = asyncio.ensure_future(inbox.receive(handle, concurrency=4))
            await eventually(
                lambda: len(done) == 20, 2 * harness.patience, "the handling of the cold keys behind 200 hot messages"
            )
            finish.set()
            await inbox.close()
            await work

    @requires("messages.ordered_delivery")
    @promise(
        "order.hot-key-stays-in-order",
        "A hot key whose messages had to be released is still handled in order.",
    )
    async def test_hot_key_stays_in_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            await asyncio.sleep(0)
            seen.append(message.data)

        async with bus.messages(topic, subscription="readers", ordered_by_key=True, max_outstanding=16) as inbox:
            await bus.topic(topic).publish_batch([OutboundMessage(body, key="hot") for body in numbered(100)])
            await handling(inbox.receive(handle, concurrency=4), lambda: len(seen) >= 100, inbox, 2 * harness.patience)
        assert seen == numbered(100)

    @promise("order.no-key-means-no-order", "Messages without a key are handled concurrently.")
    async def test_no_key_means_no_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        running = 0
        together = asyncio.Event()

        async def handle(_: Message[bytes]) -> None:
            nonlocal running
            running += 1
            if running == 4:
                together.set()
            await together.wait()

        async with bus.messages(topic, subscription="readers", ordered_by_key=True) as inbox:
            await bus.topic(topic).publish_batch(numbered(4))
            await handling(inbox.receive(handle, concurrency=4), together.is_set, inbox, harness.patience)

    @promise(
        "order.empty-key-is-a-key",
        "The empty key is a key: its messages are handled one at a time.",
    )
    async def test_empty_key_is_a_key(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        running = handled = 0

        async def handle(message: Message[bytes]) -> None:
            nonlocal running, handled
            running += 1
            assert running == 1, f"{message!r} was handled at the same time as another message of its key"
            for _ in range(3):
                await asyncio.sleep(0)
            running -= 1
            handled += 1

        async with bus.messages(topic, subscription="readers", ordered_by_key=True) as inbox:
            await bus.topic(topic).publish_batch([OutboundMessage(body, key=b"") for body in numbered(10)])
            await handling(inbox.receive(handle, concurrency=4), lambda: handled >= 10, inbox, harness.patience)

    @requires("messages.lease", "messages.ordered_delivery")
    @promise(
        "order.lost-lease-releases-followers",
        "When the lease of a key's first message ends, the later messages of the key are released with it.",
    )
    async def test_lost_lease_releases_followers(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(
            topic, subscription="readers", ordered_by_key=True, max_lease=0.5, retry=QUICK
        ) as inbox:
            for body in numbered(4):
                await bus.topic(topic).publish(body, key="k")
            (head,) = await take(inbox, 1, harness.patience)
            assert head.data == b"m-000000"
            seen: list[bytes | None] = []
            while len(seen) < 4:
                (message,) = await take(inbox, 1, harness.patience)
                await message.ack()
                seen.append(message.data)
            assert seen == numbered(4)
            assert head.lease_lost

    @requires("messages.key_affinity")
    @promise("order.survives-a-close", "Messages of a key that a close released are redelivered in order.")
    async def test_survives_a_close(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", ordered_by_key=True):
            pass
        await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in numbered(60)])
        seen: list[bytes | None] = []
        for _ in range(3):
            async with bus.messages(topic, subscription="readers", ordered_by_key=True) as inbox:
                for _ in range(20):
                    (message,) = await take(inbox, 1, harness.patience)
                    await message.ack()
                    seen.append(message.data)
        assert seen == numbered(60)

    @requires("messages.key_affinity")
    @promise(
        "order.key-affinity-across-consumers",
        "Two consumers never handle the same key at once, and each key stays in order.",
    )
    async def test_key_affinity_across_consumers(self, harness: Harness) -> None:
        first, second, topic = await harness.bus(), await harness.connect(), await harness.topic()
        running: set[bytes | None] = set()
        seen: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)

        async def handle(message: Message[bytes]) -> None:
            assert message.key not in running, f"Key {message.key!r} was handled twice at once"
            running.add(message.key)
            for _ in range(3):
                await asyncio.sleep(0)
            seen[message.key].append(message.data)
            running.discard(message.key)

        policy = Retry(max_attempts=1)
        inboxes = [
            bus.messages(topic, subscription="readers", ordered_by_key=True, retry=policy) for bus in (first, second)
        ]
        for inbox in inboxes:
            await inbox.__aenter__()
        work = [asyncio.ensure_future(inbox.receive(handle, concurrency=8)) for inbox in inboxes]
        await first.topic(topic).publish_batch(interleaved(16, 30))
        await eventually(
            lambda: sum(map(len, seen.values())) >= 480, 2 * harness.patience, "the handling of all messages"
        )
        for inbox in inboxes:
            await inbox.close()
        await asyncio.gather(*work)
        assert all(bodies == numbered(30) for bodies in seen.values())

    @promise(
        "order.many-consumers-lose-nothing",
        "Ten consumers of a subscription with `ordered_by_key` together handle every message.",
        seconds=120,
    )
    async def test_many_consumers_lose_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        inboxes = [bus.messages(topic, subscription="readers", ordered_by_key=True) for _ in range(10)]
        handled: list[bytes] = []

        async def handle(message: Message[bytes]) -> None:
            handled.append((message.key or b"") + (message.data or b""))

        for inbox in inboxes:
            await inbox.__aenter__()
        work = [asyncio.ensure_future(inbox.receive(handle)) for inbox in inboxes]
        await bus.topic(topic).publish_batch(interleaved(16, 30))
        await eventually(lambda: len(set(handled)) >= 480, 5 * harness.patience, "the handling of all messages")
        for inbox in inboxes:
            await inbox.close()
        await asyncio.gather(*work)
        async with bus.messages(topic, subscription="readers", ordered_by_key=True) as inbox:
            await bus.topic(topic).publish(b"last", key="last")
            assert len(await until_seen(inbox, [b"last"], harness.patience)) == 1
