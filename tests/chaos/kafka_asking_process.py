"""A process that reads the committed offsets of a group: `python -m tests.chaos.kafka_asking_process URL GROUP`.

It reads once for each line on its input, and prints `read`, or the name of the error.
"""

from __future__ import annotations

import asyncio
import sys

import broker
from broker.errors import BrokerError


async def main(url: str, group: str) -> None:
    async with broker.connect(url) as bus:
        while await asyncio.to_thread(sys.stdin.readline):
            try:
                await bus.admin.describe_group(group)
            except BrokerError as error:
                print(type(error).__name__, flush=True)
            else:
                print("read", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
