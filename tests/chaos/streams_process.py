"""A member of a group of stream processors, as a process or beside others, and what its tables have to be.

`python -m tests.chaos.streams_process URL GROUP NAME STATE_DIR` runs until it is killed or gets SIGTERM, and prints a
JSON line for each thing that happens. The group counts numbers by key, and sends each number through its loop to other
keys, once or twice. Whatever is counted is published too, with the place of the number in the log of the input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import broker
from broker import BrokerError, Bus, Json
from broker_streams.context import Context
from broker_streams.graph import Group, Input, Loop, Output, Persist
from broker_streams.processor import Processor
from broker_streams.stats import ProcessorState

logger = logging.getLogger("member")

KEYS = 97
_PRIME = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Row:
    """What a key has seen.

    :ivar trail: of its numbers in order: none may be missing, double or at another place.
    :ivar looped: how many came through the loop, whose order is not determined.
    """

    count: int = 0
    sum: int = 0
    last: int = -1
    trail: int = 0
    looped: int = 0
    looped_sum: int = 0
    looped_squares: int = 0

    def added(self, number: int) -> Row:
        return Row(
            self.count + 1,
            self.sum + number,
            number,
            (self.trail * 31 + number + 1) % _PRIME,
            self.looped,
            self.looped_sum,
            self.looped_squares,
        )

    def add_looped(self, number: int) -> Row:
        return Row(
            self.count,
            self.sum,
            self.last,
            self.trail,
            self.looped + 1,
            self.looped_sum + number,
            self.looped_squares + number * number % _PRIME,
        )


@dataclass(frozen=True, slots=True)
class Hop:
    """A number on its way.

    :ivar place: partition and offset in the input.
    :ivar hop: how often it went through the loop.
    """

    number: int
    place: tuple[int, int]
    hop: int


rows = Persist(Json(Row))


def key_of(number: int) -> str:
    return f"key-{number % KEYS}"


def next_key(number: int, hop: int) -> str:
    """Where a number goes to."""
    return f"key-{(number * 7 + hop * 11) % KEYS}"


def hops(number: int) -> int:
    """How often it goes through the loop."""
    return 2 if number % 3 == 0 else 1


def make_group(name: str) -> Group:
    output = Output(f"{name}-out", Json(Hop))

    def add(ctx: Context, number: int) -> None:
        ctx[rows] = (ctx[rows] or Row()).added(number)
        hop = Hop(number, (ctx.partition, ctx.offset), 0)
        ctx.emit(output, key=ctx.key, value=hop)
        ctx.loop(loop, key=next_key(number, 1), value=Hop(number, hop.place, 1))

    def looped(ctx: Context, hop: Hop) -> None:
        ctx[rows] = (ctx[rows] or Row()).add_looped(hop.number)
        ctx.emit(output, key=ctx.key, value=hop)
        if hop.hop < hops(hop.number):
            ctx.loop(loop, key=next_key(hop.number, hop.hop + 1), value=Hop(hop.number, hop.place, hop.hop + 1))

    loop = Loop(Json(Hop), looped)
    return Group(name, Input(f"{name}-in", Json(int), add), loop, rows, output)


class Arrived(NamedTuple):
    """A number in the log of the input."""

    partition: int
    offset: int
    number: int


def fold(arrived: Iterable[Arrived]) -> dict[str, Row]:
    """What the table has to be; the numbers of a partition are in order."""
    found: dict[str, Row] = {}
    for each in arrived:
        key = key_of(each.number)
        found[key] = found.get(key, Row()).added(each.number)
        for hop in range(1, hops(each.number) + 1):
            key = next_key(each.number, hop)
            found[key] = found.get(key, Row()).add_looped(each.number)
    return found


def published(arrived: Iterable[Arrived]) -> Counter[Hop]:
    """What the output has to be."""
    return Counter(
        Hop(each.number, (each.partition, each.offset), hop) for each in arrived for hop in range(hops(each.number) + 1)
    )


def counted(table: Mapping[str, Row]) -> int:
    """How many numbers were counted, those of the loop too."""
    return sum(row.count + row.looped for row in table.values())


class Life:
    """The life of one member, from its start until it is stopped.

    :param connect: makes a bus.
    :param hear: called with a word and details for each thing that happens.
    :ivar bus: of the member.
    """

    def __init__(
        self, connect: Callable[[], Bus], group: str, name: str, state_dir: str | Path, hear: Callable[..., object]
    ) -> None:
        self.bus: Bus | None = None
        self._connect = connect
        self._group = make_group(group)
        self._name = name
        self._state_dir = state_dir
        self._hear = hear
        self._processor: Processor | None = None
        self._was_ready = self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        if self._processor is not None:
            self._processor.stop()

    async def run(self) -> None:
        """Run until `stop`. One that finds no servers at its start starts again, as a supervisor would have it."""
        while not self._stopped:
            try:
                async with self._connect() as self.bus:
                    await self._run(self.bus)
            except Exception as error:
                if self._was_ready or not isinstance(error, BrokerError) or not error.retriable:
                    logger.exception("Member %s ends", self._name)
                    self._hear("broken", text="".join(traceback.format_exception(error)))
                    raise
                self._hear("repeated", error=repr(error))
                await asyncio.sleep(0.5)

    async def _run(self, bus: Bus) -> None:
        processor = self._processor = Processor(
            bus, self._group, name=self._name, state_dir=self._state_dir, checkpoint_interval=0.2
        )
        telling = asyncio.create_task(self._tell_ready(processor))
        try:
            async with processor:
                if self._stopped:
                    processor.stop()
                async for state in processor.states():
                    if state in (ProcessorState.STOPPING, ProcessorState.STOPPED):
                        break
        finally:
            telling.cancel()
            self._hear("ended", undone=processor.stats().failed_checkpoints)

    async def _tell_ready(self, processor: Processor) -> None:
        async for state in processor.states():
            if state is ProcessorState.RUNNING:
                break
        with suppress(BrokerError):
            await processor.ready()
            self._was_ready = True
            self._hear("ready", partitions=sorted(processor.partitions))


def say(word: str, **more: Any) -> None:
    print(json.dumps({"say": word, **more}), flush=True)


async def main(url: str, group: str, name: str, state_dir: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    life = Life(lambda: broker.connect(url), group, name, state_dir, say)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, life.stop)
    say("started")
    await life.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
