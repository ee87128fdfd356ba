"""A member of a group of stream processors, to be killed: sums its input by key, and deletes rows.

Its arguments are URL, group, guarantee, name of the member and state directory. It says `ready` when it has partitions.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import broker
from broker import Json
from broker_streams.commits import Guarantee
from broker_streams.context import Context
from broker_streams.graph import Group, Input, Output, Persist
from broker_streams.processor import Processor

sums = Persist(Json(int))


def make_group(name: str) -> Group:
    """Publishes each new sum. A 0 deletes the row."""
    output = Output(f"{name}-out", Json(int))

    def add(ctx: Context, value: int) -> None:
        total = (ctx[sums] or 0) + value
        ctx.emit(output, key=ctx.key, value=total)
        if value:
            ctx[sums] = total
        else:
            del ctx[sums]

    return Group(name, Input(f"{name}-in", Json(int), add), sums, output)


async def run(url: str, group: str, guarantee: str, name: str, state_dir: str) -> None:
    async with broker.connect(url) as bus:
        processor = Processor(
            bus,
            make_group(group),
            name=name,
            guarantee=cast("Guarantee", guarantee),
            state_dir=state_dir,
            checkpoint_interval=0.1,
        )
        async with processor:
            await processor.ready()
            print("ready", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
