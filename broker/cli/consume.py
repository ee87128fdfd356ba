"""`broker consume`: print the messages of a subscription, the records of a group, or those of a log, which it follows.

A message is acked, and a record committed, after its whole line was written and, where the output is a pipe, read from
it. On Ctrl-C, SIGTERM or a broken pipe, such messages are acked and the rest is released; a message whose line was cut
or never read is redelivered.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from broker.cli.arguments import TIME_OR_AGE, Rate, TopicName, parse_start
from broker.cli.completion import complete_subscription
from broker.cli.errors import Exit, Failure
from broker.cli.output import json_line, raw_line
from broker.cli.rendering import envelope_json, envelope_line
from broker.cli.session import AsJson, Session, command, new_app
from broker.messages import Message
from broker.names import ephemeral
from broker.records import Record, RecordBatch

__all__ = ["app"]

app = new_app("consume")

BATCH: Final = 100
LOOK_SECONDS: Final = 1.0
"""How often an idle command checks whether the reader of its output is still there."""
LAST_SECONDS: Final = 3.0
"""How long an interrupted command waits for the reader of its output to read what is in the pipe."""

Render = Callable[[Message[Any] | Record[Any]], bytes]


@command(app, "consume")
async def consume(
    session: Session,
    topic: TopicName,
    *,
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription",
            "-s",
            metavar="NAME",
            help="The subscription; a missing one is created.",
            show_default=False,
            autocompletion=complete_subscription,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            metavar="NAME",
            help="With --records: the group whose positions move.",
            show_default=False,
            autocompletion=complete_subscription,
        ),
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Read records of the log, in order, with partition and offset.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Read the log without a group or subscription, then follow it; settles nothing."),
    ] = False,
    use_ephemeral: Annotated[bool, typer.Option("--ephemeral", help="Use a temporary subscription or group.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", metavar="COUNT", min=1, help="Stop after this many messages.", show_default=False
        ),
    ] = None,
    stop_when_idle: Annotated[
        float | None,
        typer.Option(
            "--stop-when-idle",
            metavar="SECONDS",
            min=0,
            help="Stop when no message arrived for this time.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="WHERE", help=f"Where a new subscription, or --follow, begins: earliest, latest, {TIME_OR_AGE}."
        ),
    ] = "earliest",
    no_create: Annotated[bool, typer.Option("--no-create", help="Fail if the subscription does not exist.")] = False,
    rate: Rate = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Print only the bodies, each followed by a newline; a terminal gets them escaped."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print messages and ack them, until interrupted."""
    if as_json and raw:
        raise Failure("--json and --raw exclude each other", advice="Give one of them", code=Exit.USAGE)
    begin = parse_start(start)
    loop = _PrintLoop(session, limit, stop_when_idle, _renderer(as_json, raw), rate)
    if follow:
        if records or subscription or group or use_ephemeral or no_create or rate is not None:
            raise Failure(
                "--follow reads without a group or subscription",
                advice="Leave out --records, --subscription, --group, --ephemeral, --no-create and --rate",
                code=Exit.USAGE,
            )
        positions = await session.bus.log.position_at(topic, begin) if isinstance(begin, datetime) else None
        others = "latest" if begin == "latest" else "earliest"
        async with session.bus.log.follow(topic, positions, others=others) as followed:
            await loop.run(followed.next_batch, _settle_nothing)
        return
    if (records and subscription) or (group and not records):
        raise Failure(
            "--subscription is for messages, --group for records",
            advice="Use --subscription NAME, or --records --group NAME",
            code=Exit.USAGE,
        )
    name = group if records else subscription
    if (name is None) is not use_ephemeral:
        option = "--group" if records else "--subscription"
        given = f"Neither {option} nor --ephemeral is given"
        if name is not None:
            given = f"{option} and --ephemeral exclude each other"
        raise Failure(given, advice=f"Give {option} NAME, --ephemeral or --follow", code=Exit.USAGE)
    reader = ephemeral() if name is None else name
    if records:
        async with session.bus.records(topic, group=reader, start=begin, max_rate=rate) as log:
            await loop.run(log.next_batch, _commit)
        return
    most = BATCH if limit is None else min(limit, BATCH)
    async with session.bus.messages(
        topic, subscription=reader, start=begin, create=not no_create, max_outstanding=most, max_rate=rate
    ) as inbox:
        await loop.run(inbox.next_batch, _ack)


def _renderer(as_json: bool, raw: bool) -> Render:
    if as_json:
        return lambda envelope: json_line(envelope_json(envelope))
    if raw:
        return lambda envelope: raw_line(envelope.data or b"")
    return envelope_line


async def _ack(batch: Any, first: int, end: int) -> None:
    if end - first == len(batch):
        await batch.ack()
    else:
        await asyncio.gather(*(message.ack() for message in batch[first:end]))


async def _settle_nothing(batch: object, first: int, end: int) -> None:
    pass


async def _commit(batch: RecordBatch[Any], first: int, end: int) -> None:
    if end - first == len(batch):
        await batch.commit()
        return
    # A commit settles all lower offsets of its partition.
    last = {(record.topic, record.partition): record for record in batch[first:end]}
    for record in last.values():
        await record.commit()


class _PrintLoop:
    """Fetches batches, prints them, and settles the messages whose lines were read."""

    def __init__(
        self, session: Session, limit: int | None, idle: float | None, render: Render, rate: float | None
    ) -> None:
        self._session = session
        self._limit = limit
        self._idle = idle
        self._render = render
        self._most = BATCH
        if rate is not None:
            # Small batches, since the rate holds between batches; its pauses are not idleness.
            self._most = max(1, min(BATCH, int(rate / 10)))
            self._idle = None if idle is None else idle + self._most / rate
        self.count = 0

    async def run(self, next_batch: Callable[..., Any], settle: Callable[[Any, int, int], Any]) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time()
        try:
            while self._limit is None or self.count < self._limit:
                wait = (
                    LOOK_SECONDS
                    if self._idle is None
                    else min(LOOK_SECONDS, max(0.0, latest + self._idle - loop.time()))
                )
                most = self._most if self._limit is None else min(self._most, self._limit - self.count)
                batch = await next_batch(most, timeout=wait)
                if batch:
                    await self._print(batch, settle)
                    latest = loop.time()
                elif self._idle is not None and loop.time() >= latest + self._idle:
                    break
                elif self._session.out.broken():
                    raise BrokenPipeError
        finally:
            if not self._session.as_json and self._session.interactive:
                self._session.note(f"{self.count} {'message' if self.count == 1 else 'messages'}")

    async def _print(self, batch: Sequence[Any], settle: Callable[[Any, int, int], Any]) -> None:
        out = self._session.out
        ends: list[int] = []
        parts: list[bytes] = []
        end = out.written
        for envelope in batch:
            part = self._render(envelope)
            end += len(part)
            parts.append(part)
            ends.append(end)
        settled = 0

        async def settle_taken() -> None:
            nonlocal settled
            taken = bisect_right(ends, out.taken)
            if taken > settled:
                first, settled = settled, taken
                self.count += taken - first
                await settle(batch, first, taken)

        try:
            await out.write(b"".join(parts))
            while settled < len(ends):
                await out.wait_taken(ends[settled])
                await settle_taken()
        except asyncio.CancelledError:
            with suppress(TimeoutError, BrokenPipeError):
                await asyncio.wait_for(out.wait_taken(out.written), LAST_SECONDS)
            await settle_taken()
            raise
        except BrokenPipeError:
            await settle_taken()
            raise
