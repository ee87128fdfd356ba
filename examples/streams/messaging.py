"""A messenger of five groups: messages are filtered, translated and collected, and spammers blocked by themselves.

    messages ──> filter ──> delivered ──> collector      the last messages of each user
       │           │  └ joins blocker's table, looks up translator's
       └──> detector ──> blocking ──> blocker            who is blocked
                                      translator         which words are replaced

`detector` handles a message at the key of its sender, and tells the receiver by a message of its loop. So both sides
are counted in one table, each at its own key.

    .venv/bin/python -m examples.streams.messaging
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import msgspec

import broker
from broker import Json, Text
from broker_streams import (
    Context,
    Emitter,
    Group,
    Input,
    Join,
    Lookup,
    Loop,
    Memory,
    Output,
    Persist,
    Processor,
    View,
    table_of,
)

__all__ = [
    "BLOCKER",
    "COLLECTOR",
    "DETECTOR",
    "FILTER",
    "GROUPS",
    "TRANSLATOR",
    "Block",
    "Counts",
    "Message",
    "main",
]

KEPT = 5
"""Messages that are kept of each user."""
FEW = 10
"""Below so many messages nobody is a spammer."""
UNANSWERED = 0.8
"""The share of messages without an answer that makes a spammer."""


class Message(msgspec.Struct, frozen=True):
    """Published with the sender as key; delivered with the receiver as key."""

    sender: str
    receiver: str
    text: str


class Block(msgspec.Struct, frozen=True):
    """Published with the user as key."""

    blocked: bool = True


class Counts(msgspec.Struct):
    """Messages of a user."""

    sent: int = 0
    received: int = 0

    @property
    def is_spam(self) -> bool:
        return self.sent >= FEW and self.sent - self.received >= self.sent * UNANSWERED


# The table of who is blocked: a row is there as long as the user is.
blocks = Persist(Json(bool))


def block(ctx: Context, change: Block) -> None:
    if change.blocked:
        ctx[blocks] = True
    else:
        del ctx[blocks]


BLOCKER = Group("demo-blocker", Input("demo-blocking", Json(Block), block), blocks)


# The table of words that are replaced: the key is the word, the message what takes its place.
words = Persist(Text())


def translate(ctx: Context, replacement: str) -> None:
    ctx[words] = replacement


TRANSLATOR = Group("demo-translator", Input("demo-translations", Text(), translate), words)


# Messages of senders that are not blocked go to their receivers, with words replaced.
sender_blocked = Join(table_of("demo-blocker"), Json(bool))
replacements = Lookup(table_of("demo-translator"), Text())
delivered = Output("demo-delivered", Json(Message))


def pass_on(ctx: Context, message: Message) -> None:
    if ctx[sender_blocked]:
        return
    text = " ".join(ctx.lookup(replacements, word) or word for word in message.text.split())
    ctx.emit(delivered, key=message.receiver, value=msgspec.structs.replace(message, text=text))


FILTER = Group("demo-filter", Input("demo-messages", Json(Message), pass_on), sender_blocked, replacements, delivered)


# The last messages of each receiver.
inbox = Persist(Json(list[Message]))


def collect(ctx: Context, message: Message) -> None:
    ctx[inbox] = [*(ctx[inbox] or []), message][-KEPT:]


COLLECTOR = Group("demo-collector", Input("demo-delivered", Json(Message), collect), inbox)


# How many messages each user has sent and received. One who sends many and hears from nobody is blocked.
counts = Persist(Json(Counts))
blocking = Output("demo-blocking", Json(Block))


def on_sent(ctx: Context, message: Message) -> None:
    add(ctx, sent=1)
    ctx.loop(received, key=message.receiver, value="received")


def on_received(ctx: Context, _: str) -> None:
    add(ctx, received=1)


def add(ctx: Context, *, sent: int = 0, received: int = 0) -> None:
    user = ctx[counts] or Counts()
    was_spam = user.is_spam
    user.sent += sent
    user.received += received
    ctx[counts] = user
    if user.is_spam and not was_spam:
        ctx.emit(blocking, key=ctx.key, value=Block())


received = Loop(Text(), on_received)
DETECTOR = Group("demo-detector", Input("demo-messages", Json(Message), on_sent), received, counts, blocking)

GROUPS = (BLOCKER, TRANSLATOR, FILTER, COLLECTOR, DETECTOR)


async def main() -> list[Message]:
    """Let a spammer and two friends write to each other; return the inbox of one of them."""
    async with broker.connect(os.environ.get("BROKER_URL", "inmem://messaging")) as bus, AsyncExitStack() as stack:
        for topic in ("demo-messages", "demo-translations", "demo-blocking", "demo-delivered"):
            await bus.admin.ensure_topic(topic, partitions=2)
        # A table exists once its group has started, and the filter reads two of them.
        for group in GROUPS:
            processor = Processor(bus, group, store=Memory(), checkpoint_interval=0.1)
            await (await stack.enter_async_context(processor)).ready()
        inboxes = await stack.enter_async_context(View(bus, COLLECTOR.table, Json(list[Message])))
        blocked = await stack.enter_async_context(View(bus, BLOCKER.table, Json(bool)))
        messages = await stack.enter_async_context(Emitter(bus, "demo-messages", Json(Message)))
        blocks_seen, mail_seen = blocked.changes(), inboxes.changes()

        for number in range(FEW):
            await messages.emit("mallory", Message("mallory", f"user-{number}", "buy now"))
        async for change in blocks_seen:
            print(f"{change.key} is blocked")
            break
        await asyncio.sleep(0.5)  # the filter's copy of the blocks is a moment behind this view
        await messages.emit("mallory", Message("mallory", "bob", "buy now"))
        await messages.emit("alice", Message("alice", "bob", "hello"))
        async for change in mail_seen:
            if change.key == "bob" and change.new and change.new[-1].sender == "alice":
                return change.new
    return []


if __name__ == "__main__":
    for message in asyncio.run(main()):
        print(message)
