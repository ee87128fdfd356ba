"""A process that handles messages with retry topics until it is killed:

`python -m tests.chaos.retry_process URL TOPIC GROUP DEAD FILE`

Bodies are numbers. Each attempt is written to FILE before it ends, a line each (`number attempt time`); of ten numbers
3, 4 and 5 fail once, 6 fails twice, and 7 always.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import broker
from broker.messages import Message

DELAYS = broker.RetryTopics((0.5, 1.5))
FAILURES = {3: 1, 4: 1, 5: 1, 6: 2, 7: 1000}


async def main(url: str, topic: str, group: str, dead: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def handle(message: Message[bytes]) -> None:
        number, attempt = int(message.data or b""), message.delivery_attempt or 0
        assert (message.topic, message.id) == (topic, f"id-{number}")
        os.write(file, b"%d %d %.6f\n" % (number, attempt, time.time()))
        await asyncio.sleep(0.002)
        if attempt <= FAILURES.get(number % 10, 0):
            raise ValueError("fails by its number")

    async with broker.connect(url) as bus:
        inbox = bus.records(topic, group=group).as_messages(
            retry_topics=DELAYS, dead_letter=dead, commit_interval=0.2, max_outstanding=50
        )
        async with inbox:
            await inbox.receive(handle, concurrency=4)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
