"""`broker peek`: show messages without consuming them.

Reads the log of the topic without a group. With --subscription, fetches the next messages of the subscription and
releases them, which some brokers count as a delivery.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from broker.cli.arguments import TIME_OR_AGE, KnownTopic, parse_name, parse_time
from broker.cli.completion import complete_subscription
from broker.cli.errors import Exit, Failure
from broker.cli.output import json_line, show_table
from broker.cli.rendering import envelope_json, envelope_row
from broker.cli.session import AsJson, Session, command, new_app
from broker.driver.contract import Bounds
from broker.messages import Message
from broker.protocols import LogReader
from broker.records import Record

__all__ = ["app"]

app = new_app("peek")

CUT = 80
"""Maximum length of a body in a table."""
IDLE: Final = 2.0
"""Seconds to wait for the next message of a subscription."""


@command(app, "peek")
async def peek(
    session: Session,
    topic: KnownTopic,
    *,
    count: Annotated[
        int, typer.Option("--limit", "-n", metavar="COUNT", min=1, help="Show at most this many messages.")
    ] = 10,
    offset: Annotated[
        int | None,
        typer.Option("--from", metavar="OFFSET", min=0, help="Show messages from this offset on.", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help=f"Show messages from there on: {TIME_OR_AGE}.", show_default=False),
    ] = None,
    partition: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=0, help="Only this partition.", show_default=False)
    ] = None,
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription",
            "-s",
            metavar="NAME",
            parser=parse_name,
            help="Show the next messages of this subscription, and release them.",
            show_default=False,
            autocompletion=complete_subscription,
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten bodies and attributes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show messages without consuming them.

    By default the last messages of the topic; with --from or --since, the first messages from there on.
    """
    if subscription is not None:
        if offset is not None or since is not None or partition is not None:
            raise Failure(
                "--subscription excludes --from, --since and --partition", advice="Leave them out", code=Exit.USAGE
            )
        await _show(session, await _next_of(session, topic, subscription, count), full=full)
        return
    if offset is not None and since is not None:
        raise Failure("--from and --since exclude each other", advice="Give one of them", code=Exit.USAGE)
    capabilities = session.bus.capabilities
    if capabilities.records is None or not capabilities.records.log_reader:
        raise Failure(
            f"{capabilities.backend} has no log to read",
            advice="Use --subscription to show the next messages of a subscription",
            code=Exit.USAGE,
        )
    reader = session.bus.log
    if since is not None:
        positions = await reader.position_at(topic, parse_time("--since", since))
        found = await _read_from(reader, topic, positions, partition, count)
    elif offset is not None:
        bounds = await reader.bounds(topic)
        found = await _read_from(reader, topic, dict.fromkeys(bounds, offset), partition, count)
    else:
        found = await _read_last(reader, topic, partition, count)
    await _show(session, found, full=full)


async def _next_of(session: Session, topic: str, subscription: str, count: int) -> list[Message[Any]]:
    """The next messages of a subscription; closing the consumer releases them."""
    found: list[Message[Any]] = []
    async with session.bus.messages(topic, subscription=subscription, create=False, max_outstanding=count) as inbox:
        while len(found) < count:
            batch = await inbox.next_batch(count - len(found), timeout=IDLE)
            if not batch:
                break
            found += batch
    return found


async def _show(session: Session, found: Sequence[Message[Any] | Record[Any]], *, full: bool) -> None:
    if session.as_json:
        await session.out.write(b"".join(json_line(envelope_json(envelope)) for envelope in found))
        return
    limit = None if full else CUT
    columns = ("ID" if found and isinstance(found[0], Message) else "OFFSET", "TIME (UTC)", "KEY", "DATA", "ATTRIBUTES")
    if not show_table(columns, [envelope_row(envelope, limit) for envelope in found]):
        session.note("There are no messages")


async def _read_last(reader: LogReader, topic: str, partition: int | None, count: int) -> list[Record[bytes]]:
    """The last `count` records of one partition or of all, oldest first.

    :raises Failure: the partition does not exist.
    """
    bounds = _chosen(await reader.bounds(topic), topic, partition)
    found: list[Record[bytes]] = []
    for number, bound in bounds.items():
        found += await _tail(reader, topic, number, bound, count)
    found.sort(key=_age)
    return found[-count:]


async def _read_from(
    reader: LogReader, topic: str, positions: Mapping[int, int], partition: int | None, count: int
) -> list[Record[bytes]]:
    """The first `count` records from these positions on, oldest first.

    :raises Failure: the partition does not exist.
    """
    bounds = _chosen(await reader.bounds(topic), topic, partition)
    found: list[Record[bytes]] = []
    for number, bound in bounds.items():
        start = max(bound.first, positions.get(number, bound.first))
        read = 0
        if start < bound.next:
            async for batch in reader.read(topic, number, start, bound.next, max_records=count):
                found += batch[: count - read]
                read += len(batch)
                if read >= count:
                    break
    found.sort(key=_age)
    return found[:count]


async def _tail(reader: LogReader, topic: str, partition: int, bound: Bounds, count: int) -> list[Record[bytes]]:
    # Offsets may have gaps, so the window grows until it holds enough records.
    window = count
    while True:
        start = max(bound.first, bound.next - window)
        last: deque[Record[bytes]] = deque(maxlen=count)
        if start < bound.next:
            async for batch in reader.read(topic, partition, start, bound.next):
                last.extend(batch)
        if len(last) == count or start == bound.first:
            return list(last)
        window *= 4


def _chosen(bounds: Mapping[int, Bounds], topic: str, partition: int | None) -> Mapping[int, Bounds]:
    if partition is None:
        return bounds
    if partition not in bounds:
        known = ", ".join(map(str, sorted(bounds)))
        raise Failure(
            f"Topic {topic!r} has no partition {partition}", advice=f"Its partitions are {known}", code=Exit.NOT_FOUND
        )
    return {partition: bounds[partition]}


def _age(record: Record[Any]) -> tuple[float, int, int]:
    moment = record.broker_time or record.publish_time
    return (moment.timestamp() if moment else 0.0, record.partition, record.offset)
