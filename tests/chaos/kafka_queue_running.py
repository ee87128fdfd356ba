"""A queue with markers whose workers, trackers and broker die, freeze and come back while it is filled, all counted.

`python -m tests.chaos.kafka_queue_running --minutes 10` runs it for as long as that on a Kafka cluster of its own, and
prints the balance; it ends with 1 if there is a problem. What workers do with a message, and which faults come when,
follows from the seed; who gets which message does not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import broker
from broker.cli.errors import Exit
from broker.errors import BrokerError, PublishError
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from tests.chaos.kafka_queue_accounts import Books
from tests.chaos.kafka_queue_plans import long_plan
from tests.chaos.kafka_queue_process import CRASH, LEASE
from tests.chaos.kafka_queue_processes import Alone, Ran, Worker
from tests.chaos.kafka_queue_records import read_copies, read_ended
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin
from tests.servers.kafka_cluster import KafkaCluster

__all__ = ["QueueRun"]

_Of = TypeVar("_Of", bound=Ran)

_PARTITIONS: Final = 6
"""As many as trackers at most times, so that those which run alone have some."""
_OPTIONS: Final = "session_timeout_ms=3000&heartbeat_interval_ms=300&queue=markers"
_FREEZE: Final = 6.0
"""Longer than a lease and a session."""
_LINES: Final = 1_000
"""Bytes that workers write of some ten messages."""
_BUSY: Final = 20.0
_STUCK: Final = 30.0
"""Seconds in which something is settled as long as anything is left."""
_RESTARTS: Final = frozenset({"restart", "kill broker"})
_SKIPPED: Final = "Couldn't find leader endpoint"
"""What a broker that is alone says when its start leaves a transaction open for ever: see `docs/transactions.md`."""


class QueueRun:
    """One run.

    :param kafka: its own, of which brokers are restarted. One that is alone may leave transactions open for ever by
        that: see `docs/transactions.md`.
    :param directory: for what workers write.
    :param trackers: that run alone, beside those of the workers.
    :param rate: messages in a second.
    :param least: so many messages, however slow the machine is.
    :param transactions: STARTs and positions in one.
    :param ordered: by key, so that what is nacked waits in the memory of its worker.
    """

    def __init__(
        self,
        kafka: KafkaServer | KafkaCluster,
        directory: Path,
        *,
        seed: int,
        plan: Sequence[tuple[float, str]],
        seconds: float,
        workers: int = 3,
        trackers: int = 1,
        producers: int = 2,
        rate: float = 50.0,
        least: int = 0,
        transactions: bool = False,
        ordered: bool = False,
    ) -> None:
        self._kafka = kafka
        self._brokers = kafka.brokers if isinstance(kafka, KafkaCluster) else [kafka]
        self._directory = directory
        self._dice = random.Random(seed)
        self._plan = plan
        self._seconds = seconds
        self._producers = producers
        self._rate = rate
        self._least = least
        self._enough = asyncio.Event()
        self._subscription = f"queue-{uuid.uuid4().hex[:8]}"
        self._topic = RawAdmin(kafka.bootstrap).make_topic(
            partitions=_PARTITIONS, config={"message.timestamp.type": "LogAppendTime"}
        )
        self._dead = RawAdmin(kafka.bootstrap).make_topic()
        self._url = f"{kafka.url}?{_OPTIONS}&lease_seconds={LEASE}{'&queue_transactions=true' if transactions else ''}"
        order = "key" if ordered else "none"
        self._arguments = [self._url, self._topic, self._subscription, self._dead, str(seed), order]
        self._wanted = workers
        self._running: list[Worker] = []
        self._all: list[Worker] = []
        self._alone = trackers
        self._trackers: list[Alone] = []
        self._all_trackers: list[Alone] = []
        self._background: set[asyncio.Task[None]] = set()
        self._sent: set[int] = set()
        self._unsure: set[int] = set()
        self._next = 0
        self._up = asyncio.Event()
        self._restarting = asyncio.Lock()
        self._away: list[tuple[float, float]] = []
        self.took = 0.0, 0.0
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []

    async def run(self) -> Books:
        """All of it; the workers are ended, however it goes."""
        self._up.set()
        going: list[asyncio.Task[None]] = []
        try:
            for _ in range(self._alone):
                self._start_tracker()
            for _ in range(self._wanted):
                self._start()
            watching = asyncio.create_task(self._watch())
            publishing = [asyncio.create_task(self._publish(number)) for number in range(self._producers)]
            going += [watching, *publishing]
            begun = time.monotonic()
            await self._harm()
            await asyncio.gather(*publishing, *self._background)
            harmed = time.monotonic()
            await self._until_settled()
            self.took = harmed - begun, time.monotonic() - harmed
            await asyncio.gather(*(self._leave(worker) for worker in list(self._running)))
            watching.cancel()
            await asyncio.gather(*(self._end(tracker, -signal.SIGTERM, 0) for tracker in self._trackers))
            books = await asyncio.to_thread(self._read)
        except BaseException as error:
            for problem in self.problems:
                error.add_note(problem)
            raise
        finally:
            # Before the workers: they start others in the place of those that are gone. A broker that starts goes on.
            going += self._background
            for task in going:
                if task.get_name() not in _RESTARTS:
                    task.cancel()
            await asyncio.gather(*going, return_exceptions=True)
            for each in (*self._all, *self._all_trackers):
                if each.runs:
                    each.kill()
        # What went wrong in the run is often why messages are counted wrongly, or not to be counted at all.
        books.problems[:0] = self.problems
        return books

    def say(self, books: Books) -> str:
        """The balance, with what was done to it."""
        faults = ", ".join(f"{count} {what}" for what, count in sorted(self.faults.items()))
        took = f"{self.took[0]:.0f} s of faults, {self.took[1]:.0f} s until all was settled"
        processes = f"{len(self._all)} workers, {len(self._all_trackers)} trackers alone, {self._producers} producers"
        summary = f"{took}; {processes}; {faults}; {len(self._unsure)} sends unsure"
        return f"{summary}\n{books.table()}" + "".join(f"\n! {each}" for each in books.problems[:20])

    # -- processes -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        worker = Worker(f"w{len(self._all)}", self._arguments, self._directory)
        self._all.append(worker)
        self._running.append(worker)

    def _start_tracker(self) -> None:
        name = f"t{len(self._all_trackers)}"
        tracker = Alone(name, self._url, self._topic, self._subscription, self._directory)
        self._all_trackers.append(tracker)
        self._trackers.append(tracker)

    async def _watch(self) -> None:
        """Replace what has ended."""
        while True:
            for worker in list(self._running):
                code = worker.process.poll()
                if code is None or not worker.free:
                    continue
                self._running.remove(worker)
                self.faults["crash"] += 1
                if code != CRASH:
                    self._ended(worker, code)
                    worker.life.died = time.time()
                await self._up.wait()
                self._start()
            for tracker in [each for each in self._trackers if not each.runs and each.free]:
                self._trackers.remove(tracker)
                # A tracker that finds no broker at startup exits, and its supervisor restarts it: no failure.
                if tracker.process.returncode != Exit.NO_CONNECTION:
                    self._ended(tracker, tracker.process.returncode)
                await self._up.wait()
                self._start_tracker()
            await asyncio.sleep(0.1)

    def _ended(self, ran: Ran, code: int) -> None:
        self.problems.append(f"{ran.name} ended with {code}: {ran.last_words()}")

    async def _leave(self, worker: Worker) -> None:
        await self._end(worker, 0, CRASH, *(() if worker.ready else (-signal.SIGTERM,)))
        self._running.remove(worker)

    async def _end(self, ran: Ran, *codes: int) -> None:
        """Have it end orderly, with one of these codes."""
        ran.free = False
        if ran.runs:
            ran.process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(ran.process.wait, 60)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{ran.name} did not end: {ran.last_words()}")
            ran.kill()
        else:
            if code not in codes:
                self._ended(ran, code)

    # -- faults --------------------------------------------------------------------------------------------

    async def _harm(self) -> None:
        begun = time.monotonic()
        doing: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "kill": self._kill,
            "freeze": lambda: self._freeze(self._running, _FREEZE),
            "blink": lambda: self._freeze(self._running, 1.0),
            "join": self._join,
            "leave": self._replace,
            "kill tracker": self._kill_tracker,
            "freeze tracker": lambda: self._freeze(self._trackers, _FREEZE),
            "restart": lambda: self._restart(KafkaServer.stop),
            "kill broker": lambda: self._restart(KafkaServer.kill),
        }
        for at, what in self._plan:
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            await self._until_busy()
            self.faults[what] += 1
            task = asyncio.create_task(doing[what](), name=what)
            self._background.add(task)
        await asyncio.sleep(max(0.0, begun + self._seconds - time.monotonic()))
        self._enough.set()

    async def _until_busy(self) -> None:
        """Until workers have gone on since the last fault, however slow the machine is; else nothing is met."""
        before, until = self._written(), time.monotonic() + _BUSY
        while self._written() < before + _LINES and time.monotonic() < until:
            await asyncio.sleep(0.05)

    def _written(self) -> int:
        """Bytes that workers wrote."""
        return sum(worker.life.path.stat().st_size for worker in self._all)

    async def _victim(self, of: Sequence[_Of]) -> _Of:
        """One that works, and to which nothing else is done until it is free again."""
        while True:
            for each in self._dice.sample(of, len(of)):
                if each.free and each.ready and each.runs:
                    each.free = False
                    return each
            await asyncio.sleep(0.05)

    async def _kill(self) -> None:
        worker = await self._victim(self._running)
        worker.kill()
        self._running.remove(worker)
        await self._up.wait()
        self._start()

    async def _kill_tracker(self) -> None:
        tracker = await self._victim(self._trackers)
        tracker.kill()
        self._trackers.remove(tracker)
        await self._up.wait()
        self._start_tracker()

    async def _freeze(self, of: Sequence[Ran], seconds: float) -> None:
        ran = await self._victim(of)
        begun = time.time()
        ran.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        ran.process.send_signal(signal.SIGCONT)
        if isinstance(ran, Worker):
            ran.life.stills.append((begun, time.time()))
        ran.free = True

    async def _join(self) -> None:
        await self._up.wait()
        self._start()

    async def _replace(self) -> None:
        """One leaves orderly; another comes unless there are more than wanted."""
        if len(self._running) <= self._wanted:
            self._start()
        await self._leave(await self._victim(self._running))

    async def _restart(self, end: Callable[[KafkaServer], object]) -> None:
        # Two away at once are no majority, and one that is still starting cannot be stopped.
        async with self._restarting:
            lost = self._dice.choice(self._brokers)
            self._up.clear()
            begun = time.time()
            await asyncio.to_thread(end, lost)
            await asyncio.to_thread(lost.start)
            self._away.append((begun, time.time()))
            self._up.set()

    # -- messages ------------------------------------------------------------------------------------------

    async def _publish(self, producer: int) -> None:
        """Publish numbers, some with keys, for as long as the run is to last, and so many at least."""
        size = 5
        async with broker.connect(self._kafka.url) as bus:
            while not self._enough.is_set() or self._next < self._least:
                numbers = range(self._next, self._next + size)
                self._next += size
                messages = [OutboundMessage(b"%d" % n, b"%d" % (n % 17) if n % 2 else None) for n in numbers]
                try:
                    outcomes: Any = await bus.topic(self._topic).publish_batch(messages)
                except PublishError as error:
                    outcomes = error.outcomes
                except BrokerError:
                    outcomes = [None] * size
                for number, outcome in zip(numbers, outcomes, strict=True):
                    (self._sent if isinstance(outcome, Receipt) else self._unsure).add(number)
                await asyncio.sleep(size * self._producers / self._rate)

    async def _until_settled(self) -> None:
        """Until no message waits or is held, or there is no progress."""
        lag, moved = None, time.monotonic()
        async with broker.connect(self._url) as bus:
            while time.monotonic() < moved + _STUCK:
                before = lag
                with suppress(BrokerError):
                    lag = await bus.admin.lag(self._topic, self._subscription)
                    if not lag.unsettled and not lag.waiting:
                        return
                if lag != before:
                    moved = time.monotonic()
                await asyncio.sleep(0.5)
        self.problems.append(f"{lag} is left, and has not changed for {_STUCK} s")
        for worker in self._running:
            worker.process.send_signal(signal.SIGUSR1)
        async with broker.connect(self._url) as bus:
            self.problems.append(f"{await bus.admin.describe_group(self._subscription)}")
        said = [line for each in self._brokers for line in each.log.splitlines()]
        self.problems += [line for line in said if _SKIPPED in line][:3]
        self.problems += [f"{worker.name} waits: {worker.last_words()}" for worker in self._running]

    def _read(self) -> Books:
        bootstrap = self._kafka.bootstrap
        letters = [int(each.value() or b"") for each in read_ended(bootstrap, self._dead)]
        return Books(
            read_copies(bootstrap, self._topic, self._subscription, _PARTITIONS),
            [worker.life for worker in self._all],
            letters,
            sent=self._sent,
            unsure=self._unsure,
            away=self._away,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=50.0, help="messages in a second")
    parser.add_argument("--ordered", action="store_true", help="by key")
    parser.add_argument("--keep", type=Path, help="a directory for what the workers write")
    arguments = parser.parse_args()
    seconds, seed = 60 * arguments.minutes, arguments.seed
    with KafkaCluster(3) as kafka, TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary)
        directory.mkdir(exist_ok=True)

        async def running() -> Books:
            plan, more = long_plan(seconds, seed), {"rate": arguments.rate, "ordered": arguments.ordered}
            run = QueueRun(kafka, directory, seed=seed, plan=plan, seconds=seconds, workers=4, trackers=2, **more)
            books = await run.run()
            print(run.say(books))  # noqa: T201
            return books

        return int(bool(asyncio.run(running()).problems))


if __name__ == "__main__":
    sys.exit(main())
