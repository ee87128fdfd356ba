"""A worker of a queue with markers, which does by dice what workers do, and dies of some of it:

`python -m tests.chaos.kafka_queue_process URL TOPIC SUBSCRIPTION DEAD SEED ORDER FILE`

ORDER is `key` or `none`. Bodies are numbers. What is done with a message follows from the seed, its number and its
attempt. Every step is written to FILE before it is made, one line each (`step number partition:offset attempt time`,
the time in seconds since 1970), so that the file tells it whatever happens to the process. SIGTERM ends it orderly,
and SIGUSR1 has it write to standard error what each of its tasks waits for.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, Final

import broker
from broker.errors import BrokerError, LeaseLost
from broker.hooks import LeaseExpired
from broker.messages import Message

__all__ = ["CRASH", "LEASE", "MAX_LEASE", "action_of"]

LEASE: Final = 4.0
MAX_LEASE: Final = 5.0
CRASH: Final = 86
"""The exit code of a worker that has crashed itself."""
_CONCURRENCY: Final = 8
_PATIENCE: Final = 5
"""Attempts after which a message is only acked or rejected."""
_ACTIONS: Final = {
    "ack": 700,
    "slow": 120,
    "nack": 120,
    "reject": 30,
    "hang": 12,
    "block": 3,
    "crash": 2,
    "crash-after": 3,
}


def action_of(seed: int, number: int, attempt: int) -> tuple[str, random.Random]:
    """What is done with this delivery, and the dice for the rest of it."""
    dice = random.Random(f"{seed}/{number}/{attempt}")
    if attempt > _PATIENCE:
        return ("reject" if dice.random() < 0.1 else "ack"), dice
    return dice.choices(list(_ACTIONS), list(_ACTIONS.values()))[0], dice


def _note(file: int, step: str, message: Message[Any]) -> None:
    place = f"{message.native.partition()}:{message.native.offset()}"
    line = f"{step} {int(message.data or b'')} {place} {message.delivery_attempt or 0} {time.time():.4f}\n"
    os.write(file, line.encode())


async def _handle(message: Message[bytes], seed: int, file: int) -> None:
    number, attempt = int(message.data or b""), message.delivery_attempt or 0

    def say(step: str) -> None:
        _note(file, step, message)

    say("got")
    action, dice = action_of(seed, number, attempt)
    if action == "slow":
        await asyncio.sleep(dice.uniform(0.1, 1.5))
    elif action == "hang":
        await asyncio.sleep(MAX_LEASE + LEASE + dice.uniform(0.5, 1.5))
    elif action == "block":
        say("blocks")
        # The whole process hangs: not a lease of it is renewed.
        time.sleep(LEASE + dice.uniform(0.5, 2.0))  # noqa: ASYNC251
        say("unblocks")
    elif action == "crash":
        say("crashes")
        os._exit(CRASH)
    try:
        if action == "nack":
            say("nacks")
            await message.nack(dice.uniform(0.0, 1.5))
        elif action == "reject":
            say("rejects")
            await message.reject("by the dice")
        else:
            say("acks")
            if action == "crash-after":
                say("crashes")
                os._exit(CRASH)
            await message.ack()
        say("settled")
    except LeaseLost:
        say("lost")
    except asyncio.CancelledError:
        say("leaves")
        raise
    except BrokerError as error:
        say(f"failed:{type(error).__name__}")


def _report_waits() -> None:
    lines = [f"{task.get_name()}: {' > '.join(_waits(task.get_coro()))}\n" for task in asyncio.all_tasks()]
    sys.stderr.write("".join(lines))
    sys.stderr.flush()


def _waits(awaited: Any) -> Iterator[str]:
    """The calls that a coroutine stands in, the innermost last."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        yield f"{frame.f_code.co_qualname}:{frame.f_lineno}" if frame is not None else type(awaited).__name__
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)


async def main(url: str, topic: str, subscription: str, dead: str, seed: int, order: str, file: int) -> None:
    async def handle(message: Message[bytes]) -> None:
        await _handle(message, seed, file)

    async with AsyncExitStack() as opened:
        inbox = await _open(opened, url, topic, subscription, dead, order, file)
        work = asyncio.create_task(inbox.receive(handle, concurrency=_CONCURRENCY))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, inbox.stop)
        loop.add_signal_handler(signal.SIGUSR1, _report_waits)
        os.write(file, f"ready 0 0:0 0 {time.time():.4f}\n".encode())
        await work


async def _open(
    opened: AsyncExitStack, url: str, topic: str, subscription: str, dead: str, order: str, file: int
) -> broker.MessageConsumer[bytes]:
    """To open is a call, which fails while the broker is away."""

    def tell(event: object) -> None:
        if isinstance(event, LeaseExpired):
            _note(file, "expires", event.message)

    while True:
        try:
            async with AsyncExitStack() as opening:
                bus = await opening.enter_async_context(broker.connect(url))
                bus.hooks.listen(tell)
                inbox = bus.messages(
                    topic,
                    subscription=subscription,
                    dead_letter=dead,
                    ordered_by_key=order == "key",
                    confirm_acks=True,
                    max_outstanding=4 * _CONCURRENCY,
                    max_lease=MAX_LEASE,
                    close_timeout=2.0,
                )
                await opening.enter_async_context(inbox)
                await opened.enter_async_context(opening.pop_all())
                return inbox
        except BrokerError as error:
            if not error.retriable:
                raise
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    *places, seed, order, path = sys.argv[1:]
    url, topic, subscription, dead = places
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    asyncio.run(main(url, topic, subscription, dead, int(seed), order, opened))
