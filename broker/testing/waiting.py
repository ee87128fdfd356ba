"""How conformance tests wait: for a condition with a bound, and for the absence of messages with a small one.

Nothing here swallows a cancellation. What was waited for in vain is an AssertionError that tells what came instead.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.records import Record

__all__ = [
    "Inbox",
    "Log",
    "bodies",
    "drain",
    "eventually",
    "interleaved",
    "let_pass",
    "nothing_more",
    "numbered",
    "once",
    "read",
    "take",
    "until_seen",
]

T = TypeVar("T")
POLL_SECONDS: Final = 0.01


class Inbox(Protocol):
    """The one method of a consumer that waiting needs."""

    async def next_message(self, timeout: float | None = None) -> Message[bytes] | None: ...


class Log(Protocol):
    """The one method of a record consumer that waiting needs."""

    async def next_record(self, timeout: float | None = None) -> Record[bytes] | None: ...


async def eventually(condition: Callable[[], Awaitable[T] | T], patience: float, what: str = "the condition") -> T:
    """Ask again until the answer is true.

    :raises AssertionError: it was not after `patience` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while True:
        answer: Any = condition()
        value: T = await answer if inspect.isawaitable(answer) else answer
        if value:
            return value
        assert loop.time() < deadline, f"{what} did not come true within {patience} s; the last answer was {value!r}"
        await asyncio.sleep(POLL_SECONDS)


async def let_pass(seconds: float) -> None:
    """Let so much real time pass: for promises about time itself, such as the end of a lease."""
    await asyncio.sleep(seconds)


async def take(inbox: Inbox, count: int, patience: float) -> list[Message[bytes]]:
    """Exactly the next `count` messages, unsettled."""
    taken: list[Message[bytes]] = []
    for _ in range(count):
        message = await inbox.next_message(timeout=patience)
        assert message is not None, f"Only {len(taken)} of {count} messages came; the next did not within {patience} s"
        taken.append(message)
    return taken


async def until_seen(inbox: Inbox, wanted: Iterable[bytes], patience: float) -> list[Message[bytes]]:
    """Ack messages until each wanted body has come; all that came, repetitions included."""
    missing = set(wanted)
    seen: list[Message[bytes]] = []
    while missing:
        message = await inbox.next_message(timeout=patience)
        assert message is not None, (
            f"{len(missing)} messages never came, first {min(missing)!r}; {len(seen)} others did"
        )
        await message.ack()
        missing.discard(message.data or b"")
        seen.append(message)
    return seen


async def drain(inbox: Inbox, quiet: float) -> list[Message[bytes]]:
    """Ack everything that comes until nothing does for `quiet` seconds."""
    seen: list[Message[bytes]] = []
    while (message := await inbox.next_message(timeout=quiet)) is not None:
        await message.ack()
        seen.append(message)
    return seen


async def nothing_more(inbox: Inbox, quiet: float) -> None:
    """Assert that nothing comes within `quiet` seconds."""
    extra = await inbox.next_message(timeout=quiet)
    assert extra is None, f"Nothing more was due, yet {extra!r} came"


async def read(log: Log, count: int, patience: float) -> list[Record[bytes]]:
    """Exactly the next `count` records, uncommitted."""
    records: list[Record[bytes]] = []
    for _ in range(count):
        record = await log.next_record(timeout=patience)
        assert record is not None, f"Only {len(records)} of {count} records came; the next did not within {patience} s"
        records.append(record)
    return records


def log_time(envelope: Message[bytes] | Record[bytes]) -> datetime:
    """The time that the broker searches by: its own, or the publisher's where it keeps that instead."""
    time = envelope.broker_time or envelope.publish_time
    assert time is not None, f"{envelope!r} has no time"
    return time


def numbered(count: int, prefix: str = "m") -> list[bytes]:
    """`count` different bodies in ascending order."""
    return [f"{prefix}-{number:06}".encode() for number in range(count)]


def interleaved(keys: int, each: int) -> list[OutboundMessage]:
    """`each` numbered messages of `keys` keys, taking turns."""
    return [OutboundMessage(body, key=f"key-{key}") for body in numbered(each) for key in range(keys)]


def bodies(envelopes: Iterable[Message[bytes] | Record[bytes]]) -> Counter[bytes | None]:
    """How often each body came."""
    return Counter(envelope.data for envelope in envelopes)


def once(wanted: Iterable[bytes]) -> dict[bytes, int]:
    """Each of these exactly once, to compare with `bodies`."""
    return dict.fromkeys(wanted, 1)
