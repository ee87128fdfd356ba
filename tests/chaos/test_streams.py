"""Members of a group of stream processors are killed, frozen, stopped and added, state directories are deleted, and
servers go away, while numbers are published. Every number has to count once in every table, also through the loop, and
be published once for each time that it was counted.

Who does what when follows from the seed; what the members are at then does not. `CHAOS_SEED` repeats one,
`CHAOS_SECONDS` is how long it lasts:

    CHAOS_SECONDS=600 python -m pytest -n0 -s --timeout 3600 tests/chaos/test_streams.py -k kafka

prints what was done, minute by minute, and the accounts.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import pytest

import broker
from broker import (
    BrokerError,
    Bus,
    Capabilities,
    ConnectionFailed,
    Json,
    OperationTimeout,
    OutboundMessage,
    PublishError,
)
from broker_inmem import Broker, BrokerOptions, InmemSettings
from broker_streams.graph import Group
from broker_streams.processor import Processor
from broker_streams.view import View
from tests.chaos import streams_process
from tests.chaos.member_process import MemberProcess
from tests.chaos.streams_process import Arrived, Hop, Life, Row, counted, fold, key_of, make_group, published
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_cluster import KafkaCluster
from tests.servers.nats import NatsServer

T = TypeVar("T")

SECONDS = float(os.environ.get("CHAOS_SECONDS", "40"))
SEED = int(os.environ.get("CHAOS_SEED", str(random.SystemRandom().randrange(10**6))))

pytestmark = [pytest.mark.deep, pytest.mark.timeout(SECONDS + 800)]

PARTITIONS = 6
MEMBERS = (2, 4)
"""Fewer are added to, more are never started."""
NAMES = 6
"""Of members, each with a state directory that later ones of the name find."""
AHEAD = 3000
"""Numbers that wait, above which none are published."""
PATIENCE = 240.0
"""Seconds for all that is left in the end."""
STOP_SECONDS = 90.0


class Servers(Protocol):
    """Where a run takes place.

    :ivar session: seconds after which a member that says nothing has lost its partitions.
    :ivar pace: seconds from one deed to the next; a process takes a while to start.
    """

    session: float
    pace: float

    def connect(self) -> Bus: ...
    def start(self, group: str, name: str, state: Path) -> Member: ...
    async def harm(self, chance: random.Random) -> str:
        """Have servers go away and come back; return what was done."""
        ...


class Member(Protocol):
    """A member that something can happen to."""

    name: str
    heard: list[dict[str, Any]]
    frozen: bool

    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    async def kill(self) -> None: ...
    def stop(self) -> None:
        """Have it leave the group and end; `ended` waits for that."""
        ...

    async def ended(self, seconds: float) -> None:
        """:raises AssertionError: it has not ended in time, or with an error."""
        ...

    @property
    def over(self) -> bool: ...
    def last_words(self) -> str: ...


class InProcess(MemberProcess):
    """A member in a process of its own."""

    def __init__(self, url: str, group: str, name: str, state: Path) -> None:
        self.name = name
        self._log = state.parent / f"{name}-{uuid.uuid4().hex[:6]}.log"
        with self._log.open("wb") as log:
            super().__init__(streams_process.__name__, url, group, name, str(state), errors=log)

    async def ended(self, seconds: float) -> None:
        try:
            code = await asyncio.to_thread(self._child.wait, seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"Member {self.name} did not stop within {seconds:g} s: {self.last_words()}") from None
        await asyncio.to_thread(self._listener.join)
        # Until it listens to it, the signal ends it.
        young = code == -signal.SIGTERM and not self.heard
        assert code == 0 or young, f"Member {self.name} ended with {code}: {self.last_words()}"

    def last_words(self) -> str:
        return f"it said {self.heard[-5:]}\n{self._log.read_text(errors='replace')[-6000:]}"


class AsTask:
    """A member beside others in this process. One that is frozen is cut off and works on."""

    def __init__(self, server: Broker, group: str, name: str, state: Path) -> None:
        self.name = name
        self.heard: list[dict[str, Any]] = []
        self.frozen = False
        self._server = server
        self._life = Life(lambda: broker.connect(InmemSettings(broker=server)), group, name, state, self._hear)
        self._killed = False
        self._task = asyncio.create_task(self._run())

    def _hear(self, word: str, **more: Any) -> None:
        if not self._killed:
            self.heard.append({"say": word, **more})

    async def _run(self) -> None:
        try:
            await self._life.run()
        except Exception:
            if not self._killed:
                raise

    def freeze(self) -> None:
        if self._life.bus is not None and not self.over:
            self._server.faults.isolate(self._life.bus)
            self.frozen = True

    def thaw(self) -> None:
        if self.frozen and not self.over:
            self._server.faults.heal(self._life.bus)
        self.frozen = False

    async def kill(self) -> None:
        self._killed = True
        if self._life.bus is not None and not self.over:
            self._server.faults.kill(self._life.bus)
        self._task.cancel()
        await asyncio.wait((self._task,))

    def stop(self) -> None:
        self._life.stop()

    async def ended(self, seconds: float) -> None:
        done, _ = await asyncio.wait((self._task,), timeout=seconds)
        assert done, f"Member {self.name} did not stop within {seconds:g} s: {self.last_words()}"
        self._task.result()

    @property
    def over(self) -> bool:
        return self._task.done()

    def last_words(self) -> str:
        return f"it said {self.heard[-5:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Untransacted(BrokerOptions):
    """A broker that writes rows together, but has no transactions."""

    def capabilities(self) -> Capabilities:
        able = BrokerOptions.capabilities(self)
        return replace(able, publish=replace(able.publish, transactions=False, table_rows=50))


class InMemory:
    """The broker of this process."""

    session = 1.0
    pace = 0.4

    def __init__(self, options: BrokerOptions) -> None:
        self._server = Broker(
            replace(options, session_seconds=self.session, rebalance_seconds=3.0, transaction_seconds=5.0)
        )

    def connect(self) -> Bus:
        return broker.connect(InmemSettings(broker=self._server))

    def start(self, group: str, name: str, state: Path) -> Member:
        return AsTask(self._server, group, name, state)

    async def harm(self, chance: random.Random) -> str:
        if chance.random() < 0.5:
            self._server.faults.restart()
            return "restart server"
        self._server.faults.stop()
        await asyncio.sleep(chance.uniform(0.1, 1.5))
        self._server.faults.start()
        return "server away"


class Processes:
    """Members are processes."""

    url: str

    def connect(self) -> Bus:
        return broker.connect(self.url)

    def start(self, group: str, name: str, state: Path) -> Member:
        return InProcess(self.url, group, name, state)


class Kafka(Processes):
    """A cluster, of which one broker at a time goes away: one that is alone may leave transactions open for ever by
    that, see `docs/transactions.md`."""

    session = 6.0
    pace = 2.0

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self.url = f"{cluster.url}?session_timeout_ms=6000&heartbeat_interval_ms=300&transaction_timeout_ms=10000"

    async def harm(self, chance: random.Random) -> str:
        lost: KafkaServer = chance.choice(self._cluster.brokers)
        what = chance.choice(["stop", "kill", "freeze"])
        if what == "freeze":
            await asyncio.to_thread(lost.pause)
            await asyncio.sleep(chance.uniform(1.0, 8.0))
            lost.resume()
        else:
            await asyncio.to_thread(lost.kill if what == "kill" else lost.stop)
            await asyncio.sleep(chance.uniform(0.0, 3.0))
            await asyncio.to_thread(lost.start)
        # Two away at once are no majority.
        await asyncio.sleep(8.0)
        return f"{what} server"


class JetStream(Processes):
    """One server."""

    session = 2.0
    pace = 1.5

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.url = f"{server.url}?owner_timeout=2"

    async def harm(self, chance: random.Random) -> str:
        what = chance.choice(["stop", "kill", "freeze"])
        if what == "freeze":
            self._server.pause()
            await asyncio.sleep(chance.uniform(0.5, 6.0))
            self._server.resume()
        else:
            await asyncio.to_thread(self._server.kill if what == "kill" else self._server.stop)
            await asyncio.sleep(chance.uniform(0.0, 4.0))
            await asyncio.to_thread(self._server.start)
        await asyncio.sleep(4.0)
        return f"{what} server"


class Run:
    """One run: a publisher, members, and what happens to them."""

    def __init__(self, servers: Servers, bus: Bus, group: Group, view: View[Row], state: Path, tell: Tell) -> None:
        self.sent = 0
        self.unsure = 0
        self.deeds: Counter[str] = Counter()
        self.all: list[Member] = []
        self.failures: list[str] = []
        self.took = 0.0, 0.0
        self._servers = servers
        self._bus = bus
        self._topic = f"{group.name}-in"
        self._group = group.name
        self._view = view
        self._state = state
        self._tell = tell
        self._random = random.Random(SEED)
        self._sizes = random.Random(SEED)
        self._members: list[Member] = []
        self._background: set[asyncio.Task[None]] = set()
        self._harming: asyncio.Task[None] | None = None
        self._publishing = True

    @property
    def counted(self) -> int:
        return counted(dict(self._view.items()))

    def said(self, word: str) -> list[dict[str, Any]]:
        return [said for each in self.all for said in tuple(each.heard) if said["say"] == word]

    async def carry_out(self, seconds: float) -> None:
        """Publish and disturb for so many seconds; then wait until all is counted, and stop all members."""
        began = time.monotonic()
        publishing = asyncio.create_task(self._publish())
        telling = asyncio.create_task(self._tell_progress(began))
        try:
            while time.monotonic() < began + seconds:
                await self._do_something()
                await asyncio.sleep(self._random.uniform(0.2, 1.8) * self._servers.pace)
                self._look()
                assert not publishing.done(), publishing.result()
            self._publishing = False
            await publishing
            if self._background:
                await asyncio.wait(self._background)
            while len(self._members) < MEMBERS[0]:
                self._begin()
            self.took = time.monotonic() - began, 0.0
            await self._all_counted()
            self.took = self.took[0], time.monotonic() - began - self.took[0]
            for each in self._members:
                each.stop()
            for each in self._members:
                await each.ended(STOP_SECONDS)
        finally:
            for task in (publishing, telling, *self._background):
                if task is not self._harming:
                    task.cancel()
            if self._harming is not None:
                # A server that is starting is not left half-way.
                await asyncio.wait((self._harming,))
            for each in self.all:
                await each.kill()

    def _look(self) -> None:
        for each in self._members:
            assert not each.over, f"Member {each.name} ended by itself: {each.last_words()}"

    async def _publish(self) -> None:
        topic = self._bus.topic(self._topic)
        while self._publishing:
            numbers = range(self.sent, self.sent + self._sizes.randint(1, 40))
            messages = [OutboundMessage(b"%d" % each, key=key_of(each), id=f"{each}") for each in numbers]
            while messages:
                try:
                    await topic.publish_batch(messages)
                    break
                except PublishError as error:
                    # Those in doubt may come twice in the log, and count twice then.
                    messages = [
                        message
                        for message, outcome in zip(messages, error.outcomes, strict=True)
                        if isinstance(outcome, BrokerError)
                    ]
                except BrokerError:
                    pass
                self.unsure += len(messages)
                await asyncio.sleep(0.2)
            self.sent = numbers.stop
            await asyncio.sleep(0.05)
            while self._publishing and self._expected() - self.counted > AHEAD:
                await asyncio.sleep(0.2)

    def _expected(self) -> int:
        """What is counted in the end, if nothing comes twice in the log."""
        return 2 * self.sent + (self.sent + 2) // 3

    async def _tell_progress(self, began: float) -> None:
        while True:
            await asyncio.sleep(60)
            self._tell(
                f"{time.monotonic() - began:4.0f} s: {self.sent} sent, {self._expected() - self.counted} to count, "
                f"{len(self._members)} members; {_listed(self.deeds)}"
            )

    async def _do_something(self) -> None:
        least, most = MEMBERS
        awake = [each for each in self._members if not each.frozen]
        deeds = ["freeze", "kill", "kill", "stop", "harm"] if len(awake) > 1 else []
        deeds += ["start"] * 3 if len(self._members) < most else []
        deed = "start" if len(self._members) < least else self._random.choice(deeds or ["nothing"])
        if deed == "start":
            self._begin()
        elif deed == "freeze":
            victim = self._random.choice(awake)
            victim.freeze()
            self._spawn(self._thaw(victim, self._random.uniform(0.3, 2.5) * self._servers.session))
        elif deed == "kill":
            # A frozen one, too.
            victim = self._random.choice(self._members)
            self._members.remove(victim)
            await victim.kill()
        elif deed == "stop":
            victim = self._random.choice(awake)
            self._members.remove(victim)
            victim.stop()
            self._spawn(victim.ended(STOP_SECONDS))
        elif deed == "harm":
            if self._harming is None or self._harming.done():
                self._harming = self._spawn(self._harm())
            return
        self.deeds[deed] += 1

    def _begin(self) -> None:
        busy = {each.name for each in (*self._members, *self.all) if not each.over}
        free = [name for name in (f"member-{number}" for number in range(NAMES)) if name not in busy]
        if not free:
            return
        name = self._random.choice(free)
        directory = self._state / name
        if directory.exists() and self._random.random() < 0.3:
            shutil.rmtree(directory)
            self.deeds["delete state"] += 1
        member = self._servers.start(self._group, name, directory)
        self._members.append(member)
        self.all.append(member)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def do() -> None:
            await work

        task = asyncio.create_task(do())
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(str(error))

    async def _thaw(self, member: Member, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not member.over:
            member.thaw()

    async def _harm(self) -> None:
        self.deeds[await self._servers.harm(self._random)] += 1

    async def _all_counted(self) -> None:
        arrived = await log_of(self._bus, self._topic)
        expected = counted(fold(arrived))
        until = time.monotonic() + PATIENCE
        while (done := self.counted) < expected:
            self._look()
            if time.monotonic() > until:
                # The accounts say what is missing.
                return
            await asyncio.sleep(0.1)
        # What counts twice may come late.
        await asyncio.sleep(2.0 if done == expected else 0.0)


Tell = Callable[[str], object]


async def log_of(bus: Bus, topic: str) -> list[Arrived]:
    """The numbers in the input, partition by partition."""
    return [
        Arrived(partition, record.offset, int(record.data or b""))
        for partition in range(PARTITIONS)
        async for batch in bus.log.read(topic, partition)
        for record in batch
    ]


async def output_of(bus: Bus, topic: str) -> Counter[Hop]:
    """What was published, and committed if there are transactions."""
    codec = Json(Hop)
    return Counter(
        [
            codec.decode(record.data)
            for partition in range(PARTITIONS)
            async for batch in bus.log.read(topic, partition)
            for record in batch
        ]
    )


class Account(NamedTuple):
    """What became of the numbers.

    :ivar wrong: the first rows and outputs that are not as they have to be, for people.
    """

    arrived: int
    table: int
    rows: int
    missing: int
    twice: int
    wrong: list[str]


def account(arrived: list[Arrived], table: Mapping[str, Row], output: Counter[Hop]) -> Account:
    """Compare the table and the output with the log of the input."""
    rows, hops = fold(arrived), published(arrived)
    different = [key for key in sorted({**rows, **table}) if rows.get(key) != table.get(key)]
    missing, twice = hops - output, output - hops
    wrong = [f"{key} is {table.get(key)}, and should be {rows.get(key)}" for key in different[:5]]
    wrong += [f"{hop} is missing in the output" for hop in list(missing)[:5]]
    wrong += [f"{hop} is {count} times too often in the output" for hop, count in list(twice.items())[:5]]
    return Account(len(arrived), counted(table), len(different), missing.total(), twice.total(), wrong)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))


@asynccontextmanager
async def opened(name: str) -> AsyncGenerator[Servers]:
    if name == "kafka":
        with KafkaCluster() as cluster:
            await asyncio.to_thread(cluster.start)
            yield Kafka(cluster)
    elif name == "jetstream":
        with NatsServer() as server:
            yield JetStream(server)
    else:
        yield InMemory(BrokerOptions() if name == "memory" else Untransacted())


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call while servers that have just started do not answer in time."""
    for _ in range(10):
        with suppress(ConnectionFailed, OperationTimeout):
            return await call()
    return await call()


@asynccontextmanager
async def connected(servers: Servers) -> AsyncGenerator[Bus]:
    bus = servers.connect()
    await patiently(bus.open)
    try:
        yield bus
    finally:
        await bus.close()


async def ensure(bus: Bus, topic: str, *, compacted: bool) -> None:
    await patiently(lambda: bus.admin.ensure_topic(topic, partitions=PARTITIONS, compacted=compacted))


@pytest.mark.parametrize("name", ["memory", "memory-atomic", "jetstream", "kafka"])
async def test_every_number_counts_once(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tell(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{name}: {text}")
            sys.stdout.flush()

    state = tmp_path / "state"
    state.mkdir()
    async with opened(name) as servers, connected(servers) as bus:
        group = make_group(f"chaos-{uuid.uuid4().hex[:8]}")
        for topic in (*(f"{group.name}-{end}" for end in ("in", "out", "loop")), group.table):
            await ensure(bus, topic, compacted=topic == group.table)
        async with View(bus, group.table, Json(Row)) as view:
            await view.ready()
            done = Run(servers, bus, group, view, state, tell)
            tell(f"seed {SEED}, {SECONDS:g} s")
            try:
                await done.carry_out(SECONDS)
            finally:
                arrived, output = await log_of(bus, f"{group.name}-in"), await output_of(bus, f"{group.name}-out")
                found = account(arrived, dict(view.items()), output)
                tell(told(done, found))
            assert found.wrong == [], "\n".join(found.wrong)
            assert "\n".join([*done.failures, *(each["text"] for each in done.said("broken"))]) == ""
        # A copy that is read anew, and the stores of the members, which were brought up to date many times.
        async with View(bus, group.table, Json(Row)) as anew:
            await anew.ready()
            assert dict(anew.items()) == fold(arrived)
        for directory in sorted(state.iterdir()):
            if directory.is_dir():
                await check_stores(bus, group, directory, fold(arrived))
        assert (await bus.admin.lag(f"{group.name}-in", group.name)).waiting == 0


async def check_stores(bus: Bus, group: Group, directory: Path, expected: Mapping[str, Row]) -> None:
    """A member with these stores has the rows that it has to have."""
    processor = Processor(bus, group, name=directory.name, state_dir=directory)
    async with processor:
        async with asyncio.timeout(PATIENCE):
            await processor.ready()
            while len(processor.partitions) < PARTITIONS:
                await asyncio.sleep(0.05)
            await processor.ready()
        assert {key: await processor.get(key) for key in expected} == expected


def told(done: Run, found: Account) -> str:
    """For people."""
    words = ("ready", "repeated", "broken")
    said = ", ".join(f"{word} {count}" for word in words if (count := len(done.said(word))))
    undone = sum(each["undone"] for each in done.said("ended"))
    seconds, after = done.took
    return (
        f"{seconds:.0f} s of faults, {after:.0f} s until all was counted; {done.sent} sent ({done.unsure} unsure), "
        f"{found.arrived} in the log; counted {found.table}, {found.rows} rows wrong; output {found.missing} missing, "
        f"{found.twice} twice; {_listed(done.deeds)}; members: {said}, checkpoints undone {undone}; "
        f"{found.table / max(1.0, seconds + after):.0f} counted/s\n"
    )
