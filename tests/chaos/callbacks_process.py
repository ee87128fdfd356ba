"""A member of a group that prints a JSON line for each call of its callbacks, and when it has read so many records.

`python -m tests.chaos.callbacks_process URL TOPICS GROUP RECORDS COPARTITIONED` runs until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import broker
from broker.driver.contract import TopicPartition


def say(word: str, **more: Any) -> None:
    print(json.dumps({"say": word, **more}), flush=True)


def noting(word: str) -> Callable[[Sequence[TopicPartition]], Awaitable[None]]:
    async def note(partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            say(word, partition=f"{partition.topic}/{partition.partition}")

    return note


async def main(url: str, topics: str, group: str, records: str, copartitioned: str) -> None:
    callbacks: dict[str, Any] = {f"on_{word}": noting(word) for word in ("assigned", "revoking", "lost")}
    async with (
        broker.connect(url) as bus,
        bus.records(topics.split(","), group=group, copartitioned=copartitioned == "True", **callbacks) as log,
    ):
        for _ in range(int(records)):
            await log.next_record()
        say("read")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
