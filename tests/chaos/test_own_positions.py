"""Members join, die, freeze and stop at random, while they keep their positions with their results in one database.

Records are published all the time. In the end the results are the log, record by record and in order. Each run prints
its accounts and its seed. Ten minutes of a backend, such as `kafka`:

    CHAOS_SECONDS=600 .venv/bin/python -m pytest -n0 tests/chaos/test_own_positions.py -k kafka

CHAOS_SEED repeats what was chosen at random; the members have a timing of their own.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import pytest

import broker
from broker.errors import BrokerError
from broker.outbound import OutboundMessage
from broker_inmem import Broker, BrokerOptions, InmemSettings
from tests.chaos.member_process import MemberProcess
from tests.chaos.own_positions_process import Member, Result, Store
from tests.servers import kafka, nats, pulsar

T = TypeVar("T")
SECONDS = float(os.environ.get("CHAOS_SECONDS", "20"))
SEED = int(os.environ.get("CHAOS_SEED", str(random.SystemRandom().randrange(10**6))))

pytestmark = [pytest.mark.deep, pytest.mark.timeout(SECONDS + 280)]

PARTITIONS = 6
MEMBERS = (2, 5)
"""Fewer are added to, more are never started."""
AHEAD = 5000
"""Records that wait, above which none are published."""
PATIENCE = 120.0
"""Seconds for all that is left in the end."""


class Backend(NamedTuple):
    """How to run members on one backend.

    :ivar url: of an open server; None is the broker of this process.
    :ivar session: seconds after which a member that says nothing has lost its partitions.
    :ivar pace: seconds from one deed to the next; a process takes a while to start.
    """

    url: Callable[[], str] | None
    session: float
    pace: float


def kafka_url(assignor: str) -> str:
    options = f"session_timeout_ms=3000&heartbeat_interval_ms=200&partition_assignment_strategy={assignor}"
    return f"{kafka.shared_server().url}?{options}"


BACKENDS: Mapping[str, Backend] = {
    "inmem": Backend(None, 1.0, 0.3),
    "jetstream": Backend(lambda: f"{nats.shared_server().url}?owner_timeout=1", 1.0, 1.0),
    "kafka": Backend(lambda: kafka_url("cooperative-sticky"), 3.0, 1.0),
    "kafka-range": Backend(lambda: kafka_url("range"), 3.0, 1.0),
    "kafka-consumer": Backend(lambda: f"{kafka.shared_server().url}?group_protocol=consumer", 6.0, 1.0),
    "pulsar": Backend(lambda: pulsar.shared_server().url, 2.0, 1.0),
}


class Running(Protocol):
    """A member that something can happen to."""

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


Start = Callable[[int], Running]
"""Starts a member with this seed."""


class InProcess(MemberProcess):
    """A member in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("tests.chaos.own_positions_process", *arguments)

    async def ended(self, seconds: float) -> None:
        try:
            code = await asyncio.to_thread(self._child.wait, seconds)
        except subprocess.TimeoutExpired:
            for shown in (signal.SIGUSR2, signal.SIGUSR1):
                self._child.send_signal(shown)
                await asyncio.sleep(1.0)
            raise AssertionError(f"A member did not stop within {seconds:g} s; it said {self.heard[-5:]}") from None
        await asyncio.to_thread(self._listener.join)
        # Until it listens to it, the signal ends it.
        assert code == 0 or (code == -signal.SIGTERM and not self.heard), f"A member ended with {code}"


class AsTask:
    """A member beside others in this process. One that is frozen is cut off and works on."""

    def __init__(self, server: Broker, topics: Sequence[str], group: str, database: Path, seed: int) -> None:
        self.heard: list[dict[str, Any]] = []
        self.frozen = False
        self._server = server
        self._bus = broker.connect(InmemSettings(broker=server))
        self._store = Store(database)
        self._member = Member(self._bus, topics, group, self._store, seed, self._hear)
        self._task = asyncio.create_task(self._run())

    def _hear(self, word: str, **more: Any) -> None:
        self.heard.append({"say": word, **more})

    async def _run(self) -> None:
        try:
            async with self._bus:
                await self._member.run()
        except Exception as error:
            self._hear("broken", text=repr(error))
            raise

    def freeze(self) -> None:
        if self.heard:
            self._server.faults.isolate(self._bus)
            self.frozen = True

    def thaw(self) -> None:
        self._server.faults.heal(self._bus)
        self.frozen = False

    async def kill(self) -> None:
        if self.heard and not self.over:
            self._server.faults.kill(self._bus)
        self._task.cancel()
        await asyncio.wait((self._task,))

    def stop(self) -> None:
        self._member.stop()

    async def ended(self, seconds: float) -> None:
        done, _ = await asyncio.wait((self._task,), timeout=seconds)
        assert done, f"A member did not stop within {seconds:g} s; it said {self.heard[-5:]}"
        self._task.result()

    @property
    def over(self) -> bool:
        return self._task.done()


class Run:
    """One run: a publisher, members, and what happens to them."""

    def __init__(self, bus: broker.Bus, topic: str, store: Store, backend: Backend, start: Start, seed: int) -> None:
        self.published = 0
        self.deeds: Counter[str] = Counter()
        self.all: list[Running] = []
        self._bus = bus
        self._topic = topic
        self._store = store
        self._backend = backend
        self._start = start
        self._random = random.Random(seed)
        self._sizes = random.Random(seed)
        self._members: list[Running] = []
        self._thaws: set[asyncio.Task[None]] = set()
        self._publishing = True

    async def carry_out(self, seconds: float) -> None:
        """Publish and disturb for so many seconds; then wait until all is handled, and stop all members."""
        publishing = asyncio.create_task(self._publish())
        try:
            until = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < until:
                await self._do_something()
                await asyncio.sleep(self._random.uniform(0.2, 1.8) * self._backend.pace)
                for each in self._members:
                    assert not each.over, f"A member ended by itself; it said {each.heard[-5:]}"
                assert not publishing.done(), publishing.result()
            self._publishing = False
            await publishing
            if self._thaws:
                await asyncio.wait(self._thaws)
            if not self._members:
                self._begin()
            await self._all_handled()
            for each in self._members:
                each.stop()
            for each in self._members:
                await each.ended(60)
        finally:
            publishing.cancel()
            for thaw in self._thaws:
                thaw.cancel()
            for each in self.all:
                await each.kill()

    def said(self, word: str) -> list[dict[str, Any]]:
        return [said for each in self.all for said in tuple(each.heard) if said["say"] == word]

    async def _publish(self) -> None:
        topic = self._bus.topic(self._topic)
        while self._publishing:
            numbers = range(self.published, self.published + self._sizes.randint(1, 60))
            messages = [OutboundMessage(b"%d" % each, key=f"key-{each % 97}") for each in numbers]
            await patient(partial(topic.publish_batch, messages))
            self.published = numbers.stop
            await asyncio.sleep(0.05)
            while self._publishing and self.published - await asyncio.to_thread(self._store.count) > AHEAD:
                await asyncio.sleep(0.2)

    async def _do_something(self) -> None:
        least, most = MEMBERS
        awake = [each for each in self._members if not each.frozen]
        deeds = ["freeze", "freeze", "kill", "stop"] if len(awake) > 1 else []
        deeds += ["start"] * 2 if len(self._members) < most else []
        deed = "start" if len(self._members) < least else self._random.choice(deeds or ["nothing"])
        self.deeds[deed] += 1
        if deed == "start":
            self._begin()
        elif deed == "freeze":
            victim = self._random.choice(awake)
            victim.freeze()
            seconds = self._random.uniform(0.3, 2.0) * self._backend.session
            thaw = asyncio.create_task(self._thaw(victim, seconds))
            self._thaws.add(thaw)
            thaw.add_done_callback(self._thaws.discard)
        elif deed == "kill":
            # A frozen one, too.
            victim = self._random.choice(self._members)
            self._members.remove(victim)
            await victim.kill()
        elif deed == "stop":
            victim = self._random.choice(awake)
            self._members.remove(victim)
            victim.stop()
            await victim.ended(60)

    def _begin(self) -> None:
        member = self._start(self._random.randrange(10**6))
        self._members.append(member)
        self.all.append(member)

    async def _thaw(self, member: Running, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not member.over:
            member.thaw()

    async def _all_handled(self) -> None:
        until = asyncio.get_running_loop().time() + PATIENCE
        # A publisher may have written a record twice.
        total = sum(len(rows) for rows in (await log_of(self._bus, self._topic)).values())
        while (done := await asyncio.to_thread(self._store.count)) < total:
            for each in self._members:
                assert not each.over, f"A member ended by itself; it said {each.heard[-5:]}"
            if asyncio.get_running_loop().time() > until:
                # The accounts say what is missing.
                return
            await asyncio.sleep(0.1)
        # What is written twice may come late.
        await asyncio.sleep(1.0 if done == total else 0.0)


class Account(NamedTuple):
    """What became of the records of one partition.

    :ivar wrong: the first results with which they are not the log, for people.
    """

    results: int
    missing: int
    twice: int
    wrong: list[str]


def account(log: list[tuple[int, str]], results: list[Result]) -> Account:
    """Compare a partition's results with its records, given as offsets and bodies."""
    counts = Counter((each.at, each.body) for each in results)
    missing = [f"{record} is missing" for record in log if not counts[record]]
    wrong = [
        f"{result} follows {before}"
        for before, result, record in zip([None, *results], results, [*log, *[None] * len(results)], strict=False)
        if record != (result.at, result.body)
    ]
    return Account(len(results), len(missing), counts.total() - len(counts), [*missing[:3], *wrong[:3]])


async def log_of(bus: broker.Bus, topic: str) -> dict[int, list[tuple[int, str]]]:
    """Offset and body of each record, by partition."""

    async def read() -> dict[int, list[tuple[int, str]]]:
        return {
            number: [
                (record.offset, (record.data or b"").decode())
                async for batch in bus.log.read(topic, number)
                for record in batch
            ]
            for number in await bus.log.partitions(topic)
        }

    return await patient(read)


async def patient(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat what a broker of a busy machine does not answer in time."""
    for _ in range(5):
        try:
            return await call()
        except BrokerError as error:
            if not error.retriable:
                raise
        await asyncio.sleep(0.5)
    return await call()


@asynccontextmanager
async def opened(
    backend: Backend, topics: Sequence[str], group: str, database: Path
) -> AsyncGenerator[tuple[broker.Bus, Start]]:
    """A bus for the test, and how members start."""
    if backend.url is None:
        server = Broker(BrokerOptions(session_seconds=backend.session, rebalance_seconds=2.0))
        async with broker.connect(InmemSettings(broker=server)) as bus:
            yield bus, lambda seed: AsTask(server, topics, group, database, seed)
    else:
        url = await asyncio.to_thread(backend.url)
        async with broker.connect(url) as bus:
            yield bus, lambda seed: InProcess(url, ",".join(topics), group, str(database), str(seed))


@pytest.mark.parametrize(
    ("name", "copartitioned"),
    [
        pytest.param(
            name,
            copartitioned,
            id=f"{name}-copartitioned" if copartitioned else name,
            marks=[pytest.mark.xdist_group("pulsar")] if name == "pulsar" else [],
        )
        for name, copartitioned in product(BACKENDS, (False, True))
        if name not in (("kafka",) if copartitioned else ("kafka-range",))
    ],
)
async def test_results_with_their_positions_are_exactly_once(
    name: str, copartitioned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend, topic, group = BACKENDS[name], f"chaos-{uuid.uuid4().hex[:12]}", f"own-{uuid.uuid4().hex[:8]}"
    topics = [topic, f"{topic}-empty"] if copartitioned else [topic]
    database = tmp_path / "results.db"
    store = Store.create(database)
    async with opened(backend, topics, group, database) as (bus, start):
        for each in topics:
            await bus.admin.ensure_topic(each, partitions=PARTITIONS)
        run = Run(bus, topic, store, backend, start, SEED)
        failure: Exception | None = None
        try:
            await run.carry_out(SECONDS)
        except Exception as error:
            failure = error
        log, positions = await log_of(bus, topic), store.positions()
        accounts = {number: account(rows, store.results(number)) for number, rows in log.items()}
        with capsys.disabled():
            ended = "" if failure is None else f"; it ended early: {failure!r}"
            what = f"{name}, {len(topics)} topics, seed {SEED}, {SECONDS:g} s"
            sys.stdout.write(f"\n{what}: {told(run, [*accounts.values()])}{ended}\n")
        if failure is not None:
            raise failure
        wrong = [f"partition {number}: {text}" for number, each in accounts.items() for text in each.wrong]
        assert wrong == [], "\n".join(wrong)
        assert {int(body) for rows in log.values() for _, body in rows} == set(range(run.published))
        assert {number: at for number, at in positions.items() if at is not None} == {
            number: rows[-1][0] + 1 for number, rows in log.items() if rows
        }
        assert run.said("broken") == []
        async with bus.records(topic, group=group) as last:
            committed = await last.committed([(topic, number) for number in log])
        skipped = [
            (number, at)
            for (_, number), position in committed.items()
            for at, _ in log[number]
            if (positions.get(number) or 0) <= at < (position or 0)
        ]
        assert skipped == [], "advice never runs ahead of the results"
        for each in topics:
            await bus.admin.delete_topic(each)
    store.close()


def told(run: Run, accounts: list[Account]) -> str:
    """For people."""
    results, missing = sum(each.results for each in accounts), sum(each.missing for each in accounts)
    twice = sum(each.twice for each in accounts)
    words = ("assigned", "revoking", "lost", "refused", "again", "gone", "repeated", "unadvised", "broken")
    deeds = ", ".join(f"{deed} {count}" for deed, count in sorted(run.deeds.items()))
    said = ", ".join(f"{word} {count}" for word in words if (count := len(run.said(word))))
    unadvised = Counter(each["error"] for each in run.said("unadvised"))
    return (
        f"{run.published} published, {results} results, {missing} missing, {twice} twice; {deeds}; {said}"
        f"{f', of {dict(unadvised)}' if unadvised else ''}"
    )
