"""`broker groups`: list, describe, reset and delete groups of record consumers, over all topics."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from broker.cli.arguments import TIME_OR_AGE, Yes, parse_name, parse_time
from broker.cli.completion import complete_topic
from broker.cli.errors import Exit, Failure, error_json
from broker.cli.rendering import native_rows
from broker.cli.session import AsJson, Session, command, new_app
from broker.driver.contract import Start
from broker.driver.group_admin import GroupInfo, PositionChange

__all__ = ["app"]

app = new_app("groups", "List, describe, reset and delete consumer groups.")

GroupName = Annotated[
    str,
    typer.Argument(
        metavar="GROUP",
        parser=parse_name,
        help="Name of the group; one that is not portable is the broker's own name.",
        show_default=False,
    ),
]


@command(app, "list")
async def list_groups(session: Session, *, as_json: AsJson = False) -> None:
    """List all groups and their state."""
    groups = await session.bus.admin.groups()
    session.table(
        [{"group": group.name, "state": group.state, "native": dict(group.native)} for group in groups],
        ("GROUP", "STATE"),
        [(group.name, group.state) for group in groups],
        empty="There are no groups",
    )


@command(app, "describe")
async def describe_group(session: Session, group: GroupName, *, as_json: AsJson = False) -> None:
    """Show the members, positions and lag of a group."""
    info = await session.bus.admin.describe_group(group)
    rows: list[tuple[str, Any]] = [
        ("name", info.name),
        ("state", info.state),
        ("protocol", info.protocol or None),
        *((f"member.{member.id}", _member(member.client, member.host, member.partitions)) for member in info.members),
        *(
            (f"{place.topic}[{place.partition}]", f"position {position}, {info.lag.get(place, 'unknown')} behind")
            for place, position in sorted(info.positions.items())
        ),
        *native_rows(info.native),
    ]
    session.table(_group_json(info), ("FIELD", "VALUE"), rows, empty="")


@command(app, "reset")
async def reset(
    session: Session,
    group: GroupName,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help=f"The new position: earliest, latest, an offset, {TIME_OR_AGE}.",
            show_default=False,
        ),
    ] = None,
    shift: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="Move by this many offsets; negative to go back.", show_default=False),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            "-t",
            metavar="TOPIC",
            parser=parse_name,
            help="Only this topic; may be repeated. By default all topics of the group.",
            autocompletion=complete_topic,
        ),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="NUMBER", help="Only this partition; may be repeated.", min=0),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes without making them.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Move the positions of a group that has no members."""
    if (to is None) == (shift is None):
        given = "Neither --to nor --shift is given" if to is None else "Both --to and --shift are given"
        raise Failure(given, advice="Give --to or --shift", code=Exit.USAGE)
    admin = session.bus.admin
    where = None if to is None else _parse_position(to)
    topics, partitions = topic or [], partition or []
    changes = await admin.reset_group(group, to=where, shift=shift, topics=topics, partitions=partitions, dry_run=True)
    if not dry_run:
        moving = sum(change.before != change.after for change in changes)
        await session.confirm(f"Move group {group!r} on {moving} of {len(changes)} partitions?", yes)
        changes = await admin.reset_group(
            group, to=where, shift=shift, topics=topics, partitions=partitions, dry_run=False
        )
    session.table(
        [_change_json(group, change, dry_run) for change in changes],
        ("PARTITION", "BEFORE", "AFTER", "BY", "RESULT"),
        [_change_row(change, dry_run) for change in changes],
        empty=f"Group {group!r} has no positions",
    )
    for change in changes:
        if change.error is not None:
            session.report(change.error)
            session.code = Exit.FAILED


@command(app, "delete")
async def delete(session: Session, group: GroupName, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a group that has no members, and its positions on all topics."""
    admin = session.bus.admin
    info = await admin.describe_group(group)
    await session.confirm(f"Delete group {group!r} with its positions on {len(info.positions)} partitions?", yes)
    await admin.delete_group(group)
    session.answer({"deleted": group}, f"Deleted group {group!r}")


def _parse_position(text: str) -> Start | int:
    if text == "earliest" or text == "latest":
        return text
    if text.isdecimal() and text.isascii():
        return int(text)
    return parse_time("--to", text, "earliest, latest, an offset, ")


def _member(client: str, host: str, partitions: Any) -> str:
    assigned = " ".join(f"{topic}[{partition}]" for topic, partition in partitions)
    return f"{client} at {host}: {assigned or 'no partition'}"


def _group_json(info: GroupInfo) -> dict[str, Any]:
    return {
        "group": info.name,
        "state": info.state,
        "protocol": info.protocol,
        "members": [
            {
                "id": member.id,
                "client": member.client,
                "host": member.host,
                "partitions": [list(place) for place in member.partitions],
            }
            for member in info.members
        ],
        "positions": [
            {"topic": place.topic, "partition": place.partition, "position": at, "lag": info.lag.get(place)}
            for place, at in sorted(info.positions.items())
        ],
        "native": dict(info.native),
    }


def _change_json(group: str, change: PositionChange, dry_run: bool) -> dict[str, Any]:
    return {
        "group": group,
        "topic": change.partition.topic,
        "partition": change.partition.partition,
        "before": change.before,
        "after": change.after,
        "dry_run": dry_run,
        "error": None if change.error is None else error_json(change.error),
    }


def _change_row(change: PositionChange, dry_run: bool) -> tuple[object, ...]:
    by = None if change.before is None else f"{change.after - change.before:+d}"
    result = "dry run" if dry_run else "done" if change.error is None else "failed"
    return (f"{change.partition.topic}[{change.partition.partition}]", change.before, change.after, by, result)
