"""`broker peek`: look at messages without consuming them.

Where the broker has a log it is read without any group, so nobody notices. With --subscription, the next messages
of that subscription are fetched and given back; where the broker counts that as a delivery, they show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from broker.cli.exits import Exit, Failure
from broker.cli.log_view import read_from, read_last
from broker.cli.rendering import envelope_json, envelope_row, json_line, show_table
from broker.cli.session import AsJson, Session, command, new_app
from broker.cli.times import parse_time
from broker.cli.topics import KnownTopic, parse_name
from broker.messages import Message
from broker.records import Record

__all__ = ["app", "next_of", "show"]

app = new_app("peek")

CUT = 80
"""Characters of a body that a table shows."""


@command(app, "peek")
async def peek(
    session: Session,
    topic: KnownTopic,
    *,
    count: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many to show.")] = 10,
    offset: Annotated[
        int | None,
        typer.Option(
            "--from", metavar="OFFSET", min=0, help="Begin here instead of showing the last.", show_default=False
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Begin at this time instead of showing the last.", show_default=False),
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="One partition only.", show_default=False)] = None,
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription",
            "-s",
            parser=parse_name,
            help="Show what this subscription gets next, and give it back.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not cut bodies and attributes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show messages without consuming them.

    These are the last ones, or those from a position on.
    """
    if subscription is not None:
        if offset is not None or since is not None or partition is not None:
            raise Failure(
                "--subscription shows what comes next",
                advice="Leave out --from, --since and --partition",
                code=Exit.USAGE,
            )
        await show(session, await next_of(session, topic, subscription, count), full=full)
        return
    if offset is not None and since is not None:
        raise Failure("--from and --since exclude each other", code=Exit.USAGE)
    capabilities = session.bus.capabilities
    if capabilities.records is None or not capabilities.records.log_reader:
        raise Failure(
            f"{capabilities.backend} keeps no log that could be read",
            advice="Give --subscription to see what that one gets next",
            code=Exit.USAGE,
        )
    reader = session.bus.log
    if since is not None:
        positions = await reader.position_at(topic, parse_time(since))
        found = await read_from(reader, topic, positions, partition, count)
    elif offset is not None:
        bounds = await reader.bounds(topic)
        found = await read_from(reader, topic, dict.fromkeys(bounds, offset), partition, count)
    else:
        found = await read_last(reader, topic, partition, count)
    await show(session, found, full=full)


async def next_of(
    session: Session, topic: str, subscription: str, count: int, *, seconds: float = 2.0
) -> list[Message[Any]]:
    """The next messages of a subscription, given back before this returns.

    :raises SubscriptionNotFound: there is none; it is not created.
    """
    found: list[Message[Any]] = []
    async with session.bus.messages(topic, subscription=subscription, create=False, max_outstanding=count) as inbox:
        while len(found) < count:
            batch = await inbox.next_batch(count - len(found), timeout=seconds)
            if not batch:
                break
            found += batch
    return found


async def show(session: Session, found: Sequence[Message[Any] | Record[Any]], *, full: bool) -> None:
    """Print them as a table, or as JSON lines."""
    if session.as_json:
        await session.out.write(b"".join(json_line(envelope_json(envelope)) for envelope in found))
        return
    limit = None if full else CUT
    columns = ("ID" if found and isinstance(found[0], Message) else "OFFSET", "TIME (UTC)", "KEY", "DATA", "ATTRIBUTES")
    if not show_table(columns, [envelope_row(envelope, limit) for envelope in found]):
        session.note("There is nothing to see")
