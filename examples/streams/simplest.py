"""Count the messages of each key.

.venv/bin/python -m examples.streams.simplest
"""

from __future__ import annotations

import asyncio
import os

import broker
from broker import Text
from broker_streams import Context, Emitter, Group, Input, Int64, Memory, Persist, Processor, View

__all__ = ["COUNTER", "main"]

TOPIC = "demo-greetings"
counts = Persist(Int64())


def count(ctx: Context, _: str) -> None:
    """Called for each message: its key is `ctx.key`, and `ctx[counts]` is the row of that key."""
    ctx[counts] = (ctx[counts] or 0) + 1


COUNTER = Group("demo-counter", Input(TOPIC, Text(), count), counts)


async def main(messages: int = 30) -> dict[str, int]:
    """Publish messages while a processor counts them; return the counts that a view shows."""
    async with broker.connect(os.environ.get("BROKER_URL", "inmem://simplest")) as bus:
        await bus.admin.ensure_topic(TOPIC, partitions=2)
        async with Processor(bus, COUNTER, store=Memory(), checkpoint_interval=0.1) as processor:
            await processor.ready()
            async with View(bus, COUNTER.table, Int64()) as view, Emitter(bus, TOPIC, Text()) as greetings:
                await view.ready()
                changes = view.changes()
                goal = messages + sum(count for _, count in view.items())
                for number in range(messages):
                    await greetings.emit(f"key-{number % 3}", f"hello {number}")
                async for change in changes:
                    print(f"{change.key}: {change.new}")
                    if sum(count for _, count in view.items()) == goal:
                        break
                return dict(view.items())


if __name__ == "__main__":
    asyncio.run(main())
