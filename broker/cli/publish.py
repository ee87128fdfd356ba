"""`broker publish`: publish messages from arguments, standard input or a file.

The command looks for the topic before it reads, so that a wrong name takes no input from a pipe. After an error, an
invalid line or Ctrl-C it waits for the messages that it has enqueued: every message of the input is either published or
reported. Receipts are printed in the order of the input. At most `WINDOW` messages are in flight.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from broker.cli import message_input
from broker.cli.arguments import Rate, TopicName
from broker.cli.errors import Exit, Failure, error_json, exit_code
from broker.cli.message_input import Common, Item
from broker.cli.output import counter, json_line
from broker.cli.session import AsJson, Session, command, new_app
from broker.cli.streams import Source
from broker.errors import BrokerError, NotAuthorized, Unsupported
from broker.outbound import OutboundMessage
from broker.protocols import Topic
from broker.receipts import Receipt
from broker.token_bucket import TokenBucket

__all__ = ["app"]

app = new_app("publish")

WINDOW: Final = 2000
DRAIN_SECONDS: Final = 10.0
"""How long an interrupted command waits for messages in flight."""


@command(app, "publish")
async def publish(
    session: Session,
    topic: TopicName,
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA", help="Bodies; by default standard input is read.", show_default=False),
    ] = None,
    *,
    jsonl: Annotated[
        bool,
        typer.Option(
            "--jsonl",
            help="Each line is a JSON object with data, data_base64 or payload, and optional key, attributes, id, …",
        ),
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="The whole input is one message.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="PATH", help="Read this file instead of standard input.", show_default=False
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="KEY", help="The key of every message.", show_default=False)
    ] = None,
    attribute: Annotated[
        list[str] | None,
        typer.Option(
            "--attribute",
            "-a",
            metavar="NAME=VALUE",
            help="An attribute of every message; may be repeated.",
            show_default=False,
        ),
    ] = None,
    message_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="The id of the message, if there is only one.", show_default=False),
    ] = None,
    ttl: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Seconds after which the broker may drop a message.", show_default=False),
    ] = None,
    delay: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Seconds before a message is delivered.", show_default=False)
    ] = None,
    partition: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="The partition to append to.", show_default=False)
    ] = None,
    publish_time_as: Annotated[
        str | None,
        typer.Option(
            "--publish-time-as",
            metavar="NAME",
            help="With --jsonl: keep publish_time as this attribute, and publish with the present time.",
            show_default=False,
        ),
    ] = None,
    rate: Rate = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Report messages that cannot be published, and continue.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Publish arguments, lines or JSON lines.

    Each argument is a message. Without arguments, each line of standard input is a message.

    With --json, print the receipt of each message as a line.
    """
    if data and (jsonl or whole or file):
        raise Failure(
            "Arguments exclude --jsonl, --whole and --file",
            advice="Give either arguments or these options",
            code=Exit.USAGE,
        )
    if jsonl and whole:
        raise Failure("--jsonl and --whole exclude each other", advice="Give one of them", code=Exit.USAGE)
    if message_id is not None and not whole and len(data or ()) != 1:
        raise Failure(
            f"--id is {message_id!r}, but there may be several messages",
            advice="Use --jsonl, with an id in each line",
            code=Exit.USAGE,
        )
    common = Common(
        key=key,
        attributes=message_input.parse_attributes(attribute or []),
        id=message_id,
        ttl=ttl,
        delay=delay,
        partition=partition,
        publish_time_as=publish_time_as,
    )
    work = _Publishing(session, session.bus.topic(topic), "argument" if data else "line", keep_going, rate)
    work.single = whole or len(data or ()) == 1
    with ExitStack() as stack:
        if data:
            items = message_input.from_arguments(data, common)
        else:
            await _find(session, topic)
            source = Source(stack.enter_context(_opened(file)) if file else None)
            if file is None and sys.stdin.isatty():
                session.note("Reading messages from the terminal, one per line; Ctrl-D ends")
            read = (
                message_input.from_json_lines
                if jsonl
                else message_input.from_whole
                if whole
                else message_input.from_lines
            )
            items = read(source, common)
        # Registered before the counter, so that it runs after the counter is erased.
        stack.callback(work.summarize)
        await work.run(items, stack.enter_context(counter("Published", shown=session.interactive)))


async def _find(session: Session, topic: str) -> None:
    """:raises TopicNotFound: the topic does not exist."""
    # Publishing needs no right to look.
    with suppress(NotAuthorized, Unsupported):
        await session.bus.admin.topic_identity(topic)


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise Failure(
            f"--file {str(path)!r} cannot be read: {error.strerror}",
            advice="Check its path and permissions",
            code=Exit.USAGE,
        ) from None


class _Publishing:
    """One run: a feeder enqueues items, a follower awaits their receipts in order, prints and counts."""

    def __init__(
        self, session: Session, topic: Topic[bytes], unit: str, keep_going: bool, rate: float | None = None
    ) -> None:
        self._session = session
        self._topic = topic
        self._count: Callable[[int], None] = lambda _: None
        self._unit = unit
        self._keep_going = keep_going
        self._queue: asyncio.Queue[tuple[int, asyncio.Future[Receipt] | Failure | BrokerError] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(WINDOW)
        self._time = asyncio.get_running_loop().time
        self._bucket = None if rate is None else TokenBucket(rate, self._time())
        self._published = 0
        self._duplicates = 0
        self._failed = 0
        self._unknown = 0
        self._stop = False
        self._last = 0
        self._first_refused = 0
        self.single = False
        """Whether the input is one message."""

    async def run(self, items: AsyncIterator[Item], count: Callable[[int], None]) -> None:
        """Publish all items; `count` is called with the number of published messages."""
        self._count = count
        feeder = asyncio.create_task(self._feed(items))
        follower = asyncio.create_task(self._follow(feeder))
        try:
            await asyncio.wait((follower,))
        except asyncio.CancelledError:
            # Wait for messages in flight, so that the count is correct.
            feeder.cancel()
            await asyncio.wait((follower,), timeout=DRAIN_SECONDS)
            raise
        finally:
            feeder.cancel()
            follower.cancel()
            ends = await asyncio.gather(feeder, follower, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    async def _feed(self, items: AsyncIterator[Item]) -> None:
        try:
            async for line, message in items:
                await self._room.acquire()
                if self._bucket is not None:
                    await self._pace(self._bucket)
                outcome = message if isinstance(message, Failure) else await self._enqueue(message)
                self._queue.put_nowait((line, outcome))
                if not isinstance(outcome, asyncio.Future) and not self._keep_going:
                    return
        finally:
            self._queue.put_nowait(None)

    async def _pace(self, bucket: TokenBucket) -> None:
        if (delay := bucket.delay(self._time())) > 0:
            await asyncio.sleep(delay)
        bucket.take(1, self._time())

    async def _enqueue(self, message: OutboundMessage) -> asyncio.Future[Receipt] | BrokerError:
        try:
            return await self._topic.enqueue(message)
        except BrokerError as error:
            return error

    async def _follow(self, feeder: asyncio.Task[None]) -> None:
        lines: list[bytes] = []
        while (entry := await self._queue.get()) is not None:
            line, outcome = entry
            self._last = line
            if isinstance(outcome, asyncio.Future):
                if not outcome.done():
                    await self._print(lines)
                    # asyncio.wait does not cancel the future when this task is cancelled.
                    await asyncio.wait((outcome,))
                self._settle(line, outcome, lines)
            else:
                self._refused(line, outcome)
            self._room.release()
            if self._stop:
                feeder.cancel()
            if self._queue.empty():
                await self._print(lines)
        await self._print(lines)

    def _settle(self, line: int, future: asyncio.Future[Receipt], lines: list[bytes]) -> None:
        if future.cancelled():
            self._unknown += 1
            return
        error = future.exception()
        if error is None:
            if future.result().duplicate:
                self._duplicates += 1
            else:
                self._published += 1
            if self._session.as_json:
                lines.append(json_line(_receipt_json(self._unit, line, future.result())))
        elif isinstance(error, BrokerError):
            self._refused(line, error)
        else:
            raise error

    async def _print(self, lines: list[bytes]) -> None:
        self._count(self._published)
        if lines:
            text = b"".join(lines)
            lines.clear()
            await self._session.out.write(text)

    def _refused(self, line: int, error: BrokerError | Failure) -> None:
        self._failed += 1
        if not self._stop or self._keep_going:
            self._report(line, error)
        if not self._keep_going and not self._stop:
            self._stop = True
            self._first_refused = line
        if self._session.code in {Exit.DONE, Exit.NOT_PUBLISHED}:
            self._session.code = exit_code(error)

    def _report(self, line: int, error: BrokerError | Failure) -> None:
        if self._session.as_json:
            self._session.note(json_line({self._unit: line, "error": error_json(error)}).decode().rstrip())
        elif isinstance(error, Failure):
            self._session.report(error)
        else:
            parts = error_json(error)
            self._session.report(
                Failure(f"{self._unit.capitalize()} {line}: {parts['message']}", advice=parts["advice"])
            )

    def summarize(self) -> None:
        """Print how many messages were published; programs count the receipts."""
        while not self._queue.empty():
            self._unknown += self._queue.get_nowait() is not None
        if self._session.as_json:
            return
        parts = [
            f"Published {self._published} {'message' if self._published == 1 else 'messages'} to {self._topic.name!r}"
        ]
        if self._duplicates:
            parts.append(f"{self._duplicates} dropped as {'a duplicate' if self._duplicates == 1 else 'duplicates'}")
        if self._failed:
            parts.append(f"{self._failed} not published")
        if self._unknown:
            parts.append(f"{self._unknown} without an answer")
        summary = ", ".join(parts)
        if self._stop and not self.single:
            summary += f"; stopped at {self._unit} {self._first_refused}"
            if self._last > self._first_refused:
                summary += f", when {self._unit}s up to {self._last} were under way"
            summary += ". Use --keep-going to continue after errors"
        self._session.note(summary)


def _receipt_json(unit: str, line: int, receipt: Receipt) -> dict[str, Any]:
    return {
        unit: line,
        "id": receipt.id,
        "partition": receipt.partition,
        "offset": receipt.offset,
        "duplicate": receipt.duplicate,
    }
