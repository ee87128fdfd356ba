"""A member whose rebalances are measured, as a program: `python -m benchmarks.streams.rebalance_member JOB`.

The job is JSON: `url`, `group`, `sources` and `directory`. The program says `ready` when it handles messages. At the
end of its input it stops, and prints by partition the number of each message and when it was handled, by
`time.monotonic`, which the processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import broker
from broker import Json
from broker_streams import Context, Group, Input, Lmdb, Persist, Processor

CHECKPOINT_INTERVAL = 0.2


async def main(job: dict[str, Any]) -> None:
    handled: dict[int, list[tuple[int, float]]] = {}
    counts = Persist(Json(int))

    def on_message(ctx: Context, number: int) -> None:
        ctx[counts] = (ctx[counts] or 0) + 1
        handled.setdefault(ctx.partition, []).append((number, time.monotonic()))

    async with broker.connect(job["url"]) as bus:
        group = Group(job["group"], Input(job["sources"], Json(int), on_message), counts, order="arrival")
        async with Processor(
            bus, group, state_dir=job["directory"], store=Lmdb(), checkpoint_interval=CHECKPOINT_INTERVAL
        ) as processor:
            await processor.ready()
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(handled), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
