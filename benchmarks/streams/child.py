"""One of the works of `beside` with this library, as a program: `python -m benchmarks.streams.child WORK ADDRESS JOB`.

The job is JSON, as `beside` makes it. The program handles all messages of the topic `source`, of which there are
`lines` with so many `words` in all. From the first of them to the commit of the last, it measures and prints the time,
the CPU of the process, and that of the event loop's thread.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import Any

import broker
from benchmarks.measure import COLLECTED_AFTER
from benchmarks.streams.works import Click, Row
from broker import Json, Text
from broker_streams import Context, Group, Input, Lmdb, Loop, Output, Persist, Processor


class Meter:
    """CPU and time since the first message."""

    def __init__(self) -> None:
        self.began: tuple[float, float, float] | None = None

    def begin(self) -> None:
        if self.began is None:
            self.began = time.process_time(), time.thread_time(), time.perf_counter()

    def end(self) -> str:
        if self.began is None:
            raise RuntimeError("No message came")
        cpu, loop, start = self.began
        cpu, loop, seconds = time.process_time() - cpu, time.thread_time() - loop, time.perf_counter() - start
        return json.dumps({"cpu": cpu, "loop": loop, "seconds": seconds})


def words(job: dict[str, Any], meter: Meter) -> Group:
    """Count words: each line is split, and each word is counted where its key belongs."""
    counts = Persist(Json(int))

    def on_line(ctx: Context, line: str) -> None:
        meter.begin()
        for word in line.split():
            ctx.loop(loop, key=word, value=1)

    def on_word(ctx: Context, number: int) -> None:
        ctx[counts] = (ctx[counts] or 0) + number

    loop = Loop(Json(int), on_word)
    return Group(job["group"], Input(job["source"], Text(), on_line), loop, counts)


def clicks(job: dict[str, Any], meter: Meter) -> Group:
    """Count and sum the clicks of each user, and publish the new sums."""
    rows, sums = Persist(Json(Row)), Output(job["target"], Json(Row))

    def on_click(ctx: Context, click: Click) -> None:
        meter.begin()
        row = ctx[rows] or Row(0, 0)
        row = Row(row.clicks + 1, row.spent + click.price)
        ctx[rows] = row
        ctx.emit(sums, key=ctx.key, value=row)

    return Group(job["group"], Input(job["source"], Json(Click), on_click), rows, sums)


WORKS = {"words": words, "clicks": clicks}


async def main(work: str, address: str, job: dict[str, Any]) -> None:
    gc.set_threshold(COLLECTED_AFTER, 20, 20)
    meter = Meter()
    async with broker.connect(f"kafka://{address}") as bus:
        group = WORKS[work](job, meter)
        async with Processor(
            bus,
            group,
            state_dir=job["directory"],
            store=Lmdb(),
            checkpoint_interval=job["interval"],
            checkpoint_messages=job["checkpoint"],
        ) as processor:
            count = job["lines"] + (job["words"] if work == "words" else 0)
            while _committed(processor) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            print(meter.end(), flush=True)


def _committed(processor: Processor) -> int:
    return sum(number for each in processor.runners for number, _ in each.handled.values())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
