"""Whatever fails, and whenever consumers die: nothing is lost, nothing comes before it is due, and order is kept where
it is promised.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import broker
from broker import Retry, RetryTopics
from broker.bus import Bus
from broker.messages import Message
from broker_inmem import Broker, InmemSettings
from tests.unit.broker.consuming.warp import warped

TOPICS = RetryTopics((3, 10))
GROUP = "billing"
TOLERANCE = 0.001


@dataclass
class Story:
    """The calls of all handlers."""

    failures: list[int]
    tries: defaultdict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    calls: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    done: set[int] = field(default_factory=set[int])

    async def handle(self, message: Message[bytes]) -> None:
        number, attempt = int(message.data or b""), message.delivery_attempt or 0
        assert (message.topic, message.id) == ("orders", f"id-{number}")
        self.calls.append((number, attempt))
        self.tries[number].setdefault(attempt, time.time())
        await asyncio.sleep(0.01)
        if attempt <= self.failures[number]:
            raise ValueError("fails by its number")
        self.done.add(number)


async def dead(bus: Bus) -> set[int]:
    found: set[int] = set()
    for partition in await bus.log.partitions("orders.dead"):
        async for batch in bus.log.read("orders.dead", partition):
            found |= {int(record.data or b"") for record in batch}
    return found


async def lag(bus: Bus) -> int:
    names = ("orders", *TOPICS.names("orders", GROUP))
    return sum([(await bus.admin.lag(name, GROUP)).waiting for name in names])


async def play(server: Broker, story: Story, lives: list[float], partitions: int, concurrency: int) -> None:
    """One consumer after the other, each killed when its life is over; the last one lives until all is done."""
    async with broker.connect(InmemSettings(broker=server)) as bus:
        for name in ("orders", "orders.dead", *TOPICS.names("orders", GROUP)):
            await bus.admin.ensure_topic(name, partitions=partitions)
        await bus.topic("orders").publish_batch(
            [broker.OutboundMessage(b"%d" % n, key=f"k{n % 3}", id=f"id-{n}") for n in range(len(story.failures))]
        )
        for life in [*lives, None]:
            own = broker.connect(InmemSettings(broker=server))
            await own.open()
            inbox = own.records("orders", group=GROUP).as_messages(
                retry=Retry(max_attempts=1), retry_topics=TOPICS, dead_letter="orders.dead", commit_interval=0.5
            )
            await inbox.open()
            work = asyncio.ensure_future(inbox.receive(story.handle, concurrency=concurrency))
            if life is None:
                async with asyncio.timeout(1000):
                    while await lag(bus):
                        await asyncio.sleep(0.5)
            else:
                await asyncio.sleep(life)
                server.faults.kill(own)
                work.cancel()
            await asyncio.gather(work, inbox.close(), return_exceptions=True)
            await asyncio.gather(own.close(), return_exceptions=True)
        lost = {n for n, failures in enumerate(story.failures) if failures > 2}
        assert await dead(bus) == lost
        assert story.done == set(range(len(story.failures))) - lost
    for number, tries in story.tries.items():
        for attempt in sorted(tries)[1:]:
            waited = tries[attempt] - tries[attempt - 1]
            assert waited >= TOPICS.delays[attempt - 2] - TOLERANCE, f"{number}, attempt {attempt}: {waited}"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    failures=st.lists(st.integers(0, 4), min_size=1, max_size=25),
    lives=st.lists(st.floats(0, 20), max_size=4),
    partitions=st.integers(1, 3),
    concurrency=st.integers(1, 4),
)
def test_nothing_is_lost_when_consumers_die(
    failures: list[int], lives: list[float], partitions: int, concurrency: int
) -> None:
    story = Story(failures)
    warped(lambda server: play(server, story, lives, partitions, concurrency))
    assert story.tries.keys() == set(range(len(failures)))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(failures=st.lists(st.integers(0, 4), min_size=1, max_size=25))
def test_without_crashes_each_attempt_happens_once_in_order(failures: list[int]) -> None:
    story = Story(failures)
    warped(lambda server: play(server, story, [], 1, 1))
    assert len(story.calls) == len(set(story.calls)) == sum(min(3, failed + 1) for failed in failures)
    for attempt in (1, 2, 3):
        order = [number for number, tried in story.calls if tried == attempt]
        assert all(before < after for before, after in pairwise(order))
