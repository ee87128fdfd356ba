"""A member of a group of stream processors, to be killed: sums two inputs by key, and counts through its loop.

Its arguments are URL, group, name of the member and state directory. It says `ready` when it has partitions.
"""

from __future__ import annotations

import asyncio
import sys

import broker
from broker import Json
from broker_streams.context import Context
from broker_streams.graph import Group, Input, Loop, Output, Persist
from broker_streams.processor import Processor

sums = Persist(Json(int))


def make_group(name: str) -> Group:
    """Publishes each new sum, and sends each message on to the key `looped` of its last digit."""
    output = Output(f"{name}-out", Json(int))

    def add(ctx: Context, value: int) -> None:
        total = ctx[sums] = (ctx[sums] or 0) + value
        ctx.emit(output, key=ctx.key, value=total)
        ctx.loop(loop, key=f"looped-{ctx.key[-1]}", value=1)

    def looped(ctx: Context, value: int) -> None:
        ctx[sums] = (ctx[sums] or 0) + value

    loop = Loop(Json(int), looped)
    return Group(name, Input([f"{name}-a", f"{name}-b"], Json(int), add), loop, sums, output)


async def run(url: str, group: str, name: str, state_dir: str) -> None:
    async with broker.connect(url) as bus:
        processor = Processor(bus, make_group(group), name=name, state_dir=state_dir, checkpoint_interval=0.1)
        async with processor:
            await processor.ready()
            print("ready", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
