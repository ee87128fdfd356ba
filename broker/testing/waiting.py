"""Waits of conformance tests: for conditions, messages and records, and for their absence.

A wait in vain raises an AssertionError that says what came instead.
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
    """The part of a message consumer that waits need."""

    async def next_message(self, timeout: float | None = None) -> Message[bytes] | None: ...


class Log(Protocol):
    """The part of a record consumer that waits need."""

    async def next_record(self, timeout: float | None = None) -> Record[bytes] | None: ...


async def eventually(condition: Callable[[], Awaitable[T] | T], patience: float, what: str = "the condition") -> T:
    """Poll a condition until it is true, and return its value.

    :raises AssertionError: the condition was not true within `patience` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while True:
        # Before the condition, so that a slow one is asked again after others had a turn.
        late = loop.time() >= deadline
        answer: Any = condition()
        value: T = await answer if inspect.isawaitable(answer) else answer
        if value:
            return value
        assert not late, f"{what} did not come true within {patience} s; its last value was {value!r}"
        await asyncio.sleep(POLL_SECONDS)


async def let_pass(seconds: float) -> None:
    """Sleep in real time, for promises about time such as the end of a lease."""
    await asyncio.sleep(seconds)


async def take(inbox: Inbox, count: int, patience: float) -> list[Message[bytes]]:
    """The next `count` messages, unsettled."""
    found: list[Message[bytes]] = []
    for _ in range(count):
        message = await inbox.next_message(timeout=patience)
        assert message is not None, f"Only {len(found)} of {count} messages arrived within {patience} s each"
        found.append(message)
    return found


async def until_seen(inbox: Inbox, wanted: Iterable[bytes], patience: float) -> list[Message[bytes]]:
    """Ack messages until each wanted body has arrived; return all messages, including repetitions."""
    missing = set(wanted)
    seen: list[Message[bytes]] = []
    while missing:
        message = await inbox.next_message(timeout=patience)
        assert message is not None, (
            f"{len(missing)} messages did not arrive, first {min(missing)!r}; {len(seen)} others did"
        )
        await message.ack()
        missing.discard(message.data or b"")
        seen.append(message)
    return seen


async def drain(inbox: Inbox, quiet: float) -> list[Message[bytes]]:
    """Ack all messages until none arrives for `quiet` seconds."""
    seen: list[Message[bytes]] = []
    while (message := await inbox.next_message(timeout=quiet)) is not None:
        await message.ack()
        seen.append(message)
    return seen


async def nothing_more(inbox: Inbox, quiet: float) -> None:
    """Assert that no message arrives within `quiet` seconds."""
    extra = await inbox.next_message(timeout=quiet)
    assert extra is None, f"An unexpected message arrived: {extra!r}"


async def read(log: Log, count: int, patience: float) -> list[Record[bytes]]:
    """The next `count` records, uncommitted."""
    records: list[Record[bytes]] = []
    for _ in range(count):
        record = await log.next_record(timeout=patience)
        if record is None:
            last = {(each.topic, each.partition): each.offset for each in records}
            raise AssertionError(
                f"Only {len(records)} of {count} records arrived within {patience} s each; the last offsets are {last}"
            )
        records.append(record)
    return records


def log_time(envelope: Message[bytes] | Record[bytes]) -> datetime:
    """The time by which the broker searches: its own, or the publisher's if it stores that."""
    time = envelope.broker_time or envelope.publish_time
    assert time is not None, f"{envelope!r} has no time"
    return time


def numbered(count: int, prefix: str = "m") -> list[bytes]:
    """`count` different bodies in ascending order."""
    return [f"{prefix}-{number:06}".encode() for number in range(count)]


def interleaved(keys: int, each: int) -> list[OutboundMessage]:
    """`each` numbered messages for each of `keys` keys, interleaved."""
    return [OutboundMessage(body, key=f"key-{key}") for body in numbered(each) for key in range(keys)]


def bodies(envelopes: Iterable[Message[bytes] | Record[bytes]]) -> Counter[bytes | None]:
    """The number of occurrences of each body."""
    return Counter(envelope.data for envelope in envelopes)


def once(wanted: Iterable[bytes]) -> dict[bytes, int]:
    """Each body once, to compare with `bodies`."""
    return dict.fromkeys(wanted, 1)
