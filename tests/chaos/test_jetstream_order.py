"""Order per key under a steady flow of publishes, while the stream is absent at times and the server answers 503."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import broker
from broker.errors import BrokerError, ConnectionFailed, OperationTimeout, PublishError, TopicNotFound
from broker.outbound import OutboundMessage
from broker.publishing.topic import TopicFacade
from broker.receipts import Receipt
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings
from broker_jetstream.streams import layout_of
from tests.jetstream.support import until
from tests.servers.nats import NatsServer

pytestmark = pytest.mark.deep

KEYS = 7
SIZE = 60
MAX_UNCONFIRMED = 10 * SIZE


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def topic() -> str:
    return f"chaos.{uuid.uuid4().hex[:12]}"


class Flow:
    """Publishes 0, 1, 2, … of `KEYS` keys without a pause, and records the outcome of each."""

    def __init__(self, topic: TopicFacade[bytes]) -> None:
        self.outcomes: dict[int, Receipt | BrokerError] = {}
        self.stored = 0
        self._topic = topic
        self._next = 0
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, way: str) -> None:
        work = {"enqueue": [self._enqueue], "publish_batch": [self._publish_batch] * 3}[way]
        self._tasks = [asyncio.create_task(each()) for each in work]

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    def _take(self) -> list[int]:
        first, self._next = self._next, self._next + SIZE
        return list(range(first, self._next))

    async def _publish_batch(self) -> None:
        while not self._stopped:
            numbers = self._take()
            messages = [OutboundMessage(b"%d" % number, key=f"k{number % KEYS}") for number in numbers]
            try:
                outcomes: Any = await self._topic.publish_batch(messages)
            except PublishError as error:
                outcomes = error.outcomes
            except TopicNotFound as error:
                outcomes = [error] * SIZE
            for number, outcome in zip(numbers, outcomes, strict=True):
                self._note(number, outcome)

    async def _enqueue(self) -> None:
        def note(number: int, future: asyncio.Future[Receipt]) -> None:
            error = future.exception()
            assert error is None or isinstance(error, BrokerError)
            self._note(number, error or future.result())

        last: deque[asyncio.Future[Receipt]] = deque()
        while not self._stopped:
            for number in self._take():
                last.append(await self._topic.enqueue(b"%d" % number, key=f"k{number % KEYS}"))
                last[-1].add_done_callback(partial(note, number))
            while len(last) > MAX_UNCONFIRMED:
                await asyncio.wait([last.popleft()])
        if last:
            await asyncio.wait(last)

    def _note(self, number: int, outcome: Receipt | BrokerError) -> None:
        self.outcomes[number] = outcome
        self.stored += isinstance(outcome, Receipt)


async def log_of(bus: broker.Bus, topic: str) -> dict[int, int]:
    """Offset by number, in the order of the log."""
    (bounds,) = (await bus.log.bounds(topic)).values()
    found: dict[int, int] = {}
    async for batch in bus.log.read(topic, 0, *bounds):
        for record in batch:
            number = int(record.data or b"")
            assert number not in found
            found[number] = record.offset
    return found


def check_order(numbers: list[int]) -> None:
    of_key: defaultdict[int, list[int]] = defaultdict(list)
    for number in numbers:
        of_key[number % KEYS].append(number)
    for mine in of_key.values():
        assert mine == sorted(mine)


def check_outcomes(flow: Flow, log: dict[int, int]) -> None:
    """A message with a receipt is in the log at its offset, a failed one is not."""
    for number, outcome in flow.outcomes.items():
        if isinstance(outcome, Receipt):
            assert log.pop(number) == outcome.offset
        else:
            assert isinstance(outcome, ConnectionFailed)
    assert not log


class Churn:
    """Removes the subjects of the stream and restores them, as an administrator may; the log stays."""

    def __init__(self, backend: JetStreamBackend, config: dict[str, Any]) -> None:
        self._backend = backend
        self._config = config

    @classmethod
    async def of(cls, backend: JetStreamBackend, topic: str) -> Churn:
        info = await backend._layouts.info(topic)
        return cls(backend, info["config"])

    async def away(self) -> None:
        await self._update([f"{self._config['name']}.away"])

    async def back(self) -> None:
        await self._update(self._config["subjects"])

    async def round_trip(self) -> None:
        """Wait for one round trip."""
        await self._backend.check_health()

    async def _update(self, subjects: list[str]) -> None:
        name = self._config["name"]
        await self._backend._connection.api(
            f"STREAM.UPDATE.{name}", {**self._config, "subjects": subjects}, what="stream"
        )


def connect(server: NatsServer) -> broker.Bus:
    return broker.connect(JetStreamSettings(servers=(server.url,), reconnect_wait=0.02, publish_resend=0.5))


def backend_of(bus: broker.Bus) -> JetStreamBackend:
    backend = bus._backend
    assert isinstance(backend, JetStreamBackend)
    return backend


async def more(flow: Flow, number: int) -> None:
    """Wait until `number` more are stored."""
    goal = flow.stored + number
    await until(lambda: flow.stored >= goal, 30)


@pytest.mark.parametrize("way", ["enqueue", "publish_batch"])
@pytest.mark.parametrize("seed", range(4))
async def test_order_per_key_while_the_stream_loses_and_regains_its_subjects(
    server: NatsServer, topic: str, way: str, seed: int
) -> None:
    dice = random.Random(seed)
    async with connect(server) as bus, connect(server) as other:
        await other.admin.ensure_topic(topic, storage="memory")
        churn = await Churn.of(backend_of(other), topic)
        flow = Flow(bus.topic(topic))
        flow.start(way)
        for _ in range(25):
            await more(flow, dice.randrange(1, 4 * SIZE))
            await churn.away()
            for _ in range(dice.choice([0, 0, 1, 3, 10])):
                await churn.round_trip()
            await churn.back()
        await more(flow, SIZE)
        await flow.stop()
        log = await log_of(bus, topic)
    check_order(list(log))
    check_outcomes(flow, log)
    assert flow.stored > 25


@pytest.mark.parametrize("way", ["enqueue", "publish_batch"])
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_order_by_key_while_the_server_restarts(server: NatsServer, topic: str, way: str, how: str) -> None:
    halt: Callable[[], None] = server.stop if how == "stop" else server.kill
    async with connect(server) as bus:
        await bus.admin.ensure_topic(topic)
        flow = Flow(bus.topic(topic))
        flow.start(way)
        for _ in range(8):
            await more(flow, 3 * SIZE)
            await asyncio.to_thread(halt)
            await asyncio.to_thread(server.start)
        await more(flow, SIZE)
        await flow.stop()
        log = await log_of(bus, topic)
    check_order(list(log))
    check_outcomes(flow, log)
    assert len(flow.outcomes) == flow.stored


async def test_order_per_key_while_the_stream_is_recreated(server: NatsServer, topic: str) -> None:
    logs: list[list[int]] = []
    async with connect(server) as bus, connect(server) as other:
        await other.admin.ensure_topic(topic, storage="memory")
        flow = Flow(bus.topic(topic))
        flow.start("publish_batch")
        for _ in range(15):
            await more(flow, 3 * SIZE)
            logs.append(list(await log_of(other, topic)))
            await other.admin.delete_topic(topic)
            await other.admin.ensure_topic(topic, storage="memory")
        await more(flow, 3 * SIZE)
        await flow.stop()
        logs.append(list(await log_of(other, topic)))
    for log in logs:
        check_order(log)
    check_order([number for log in logs for number in log])
    failures = [outcome for outcome in flow.outcomes.values() if not isinstance(outcome, Receipt)]
    assert all(isinstance(failure, ConnectionFailed | OperationTimeout | TopicNotFound) for failure in failures)


async def test_a_stream_recreated_with_other_partitions_gets_the_unserved_messages(
    server: NatsServer, topic: str
) -> None:
    async with connect(server) as bus, connect(server) as other:
        await other.admin.ensure_topic(topic, partitions=4)
        churn = await Churn.of(backend_of(other), topic)
        await bus.topic(topic).publish(b"0", key="k")
        await churn.away()
        waiting = [asyncio.create_task(bus.topic(topic).publish(b"%d" % n, key=f"k{n}")) for n in range(1, 20)]
        target: Any = bus.topic(topic)._target
        unconfirmed = target._unconfirmed
        await until(
            lambda: (
                unconfirmed._stream_absent
                and all(each.replies.unserved for each in unconfirmed._batches if each.written)
            )
        )
        found = layout_of(topic, churn._config)
        churn._config["metadata"] = {
            name: "2" if value == str(found.partitions) else value for name, value in churn._config["metadata"].items()
        }
        await churn.back()
        receipts = await asyncio.gather(*waiting)
        # The oldest is sent alone, and may have been sent to its old partition before the stream was back.
        assert {receipt.partition for receipt in receipts[1:]} == {0, 1}
        assert len({receipt.offset for receipt in receipts}) == 19


async def test_a_stream_that_stays_absent_is_reported_in_time(server: NatsServer, topic: str) -> None:
    settings = JetStreamSettings(servers=(server.url,), publish_timeout=3.0)
    async with broker.connect(settings) as bus, connect(server) as other:
        await other.admin.ensure_topic(topic)
        churn = await Churn.of(backend_of(other), topic)
        await churn.away()
        calls = [asyncio.create_task(bus.topic(topic).publish(b"x", key="k")) for _ in range(3)]
        for each in calls:
            with pytest.raises(ConnectionFailed, match="No stream took messages"):
                await each
        await churn.back()
        assert (await bus.topic(topic).publish(b"x")).offset == 1
