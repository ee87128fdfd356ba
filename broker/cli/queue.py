"""`broker queue`: what a queue that is tracked holds, and what an operator does about it.

`inspect`, `lag` and `peek` read only, and disturb nobody. `purge` asks first, and is refused while the queue is in use.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from broker.cli import dead, lag
from broker.cli.rendering import attribute_pairs, bytes_field, cut, escaped, json_line, printable, show_table
from broker.cli.session import AsJson, Session, command, new_app
from broker.cli.topics import Yes
from broker.cli.tracker import Subscription, queues_of
from broker.driver.queue_tracking import PurgedQueue, QueuedMessage

__all__ = ["app"]

app = new_app("queue", "Inspect, peek at, redrive and purge the queues whose leases are tracked.")

CUT = 60
"""Characters of a body that a table shows."""


@command(app, "inspect")
async def inspect(session: Session, subscription: Subscription, *, as_json: AsJson = False) -> None:
    """Show the messages that are handed out and not done, the oldest first."""
    leases = await queues_of(session).open_leases(subscription)
    session.table(
        [asdict(lease) for lease in leases],
        ("MESSAGE", "STATE", "ATTEMPT", "AGE", "DUE IN", "HOLDER", "REASON"),
        [
            (
                f"{escaped(lease.topic)}[{lease.partition}] {lease.offset}",
                lease.state,
                lease.attempt,
                f"{lease.age:.1f} s",
                f"{lease.due_in:.1f} s",
                escaped(lease.holder) or None,
                escaped(lease.reason) or None,
            )
            for lease in leases
        ],
        empty=f"Nothing of {subscription!r} is open",
    )


@command(app, "peek")
async def peek(
    session: Session,
    subscription: Subscription,
    *,
    count: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many to show.")] = 10,
    full: Annotated[bool, typer.Option("--full", help="Do not cut bodies and attributes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show messages that are not done, without taking them.

    First those that are handed out, the oldest first; then those that nobody has taken.
    """
    found = await queues_of(session).queued_messages(subscription, count)
    if as_json:
        await session.out.write(b"".join(json_line(_message_json(message)) for message in found))
        return
    limit = None if full else CUT
    columns = ("MESSAGE", "STATE", "ATTEMPT", "DUE IN", "KEY", "DATA", "ATTRIBUTES")
    if not show_table(columns, [_message_row(message, limit) for message in found]):
        session.note(f"Queue {subscription!r} is empty")


command(app, "redrive")(dead.redrive)
command(app, "lag")(lag.lag)


@command(app, "purge")
async def purge(
    session: Session,
    subscription: Subscription,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be dropped, and drop nothing.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Drop all messages that are not done; no consumer or tracker of the queue may run.

    Other subscriptions of the topics keep theirs.
    """
    queues = queues_of(session)
    if dry_run:
        found = await queues.purge_queue(subscription, dry_run=True)
        session.answer(_purge_json(subscription, found, dry_run), f"{_told(found)} would be dropped")
        return
    if not yes:
        found = await queues.purge_queue(subscription, dry_run=True)
        await session.confirm(f"Drop {_told(found)} of queue {subscription!r}?", yes)
    dropped = await queues.purge_queue(subscription)
    session.answer(_purge_json(subscription, dropped, dry_run), f"Dropped {_told(dropped)}")


def _message_json(message: QueuedMessage) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "state": message.state,
        "attempt": message.attempt,
        "due_in": message.due_in,
        "id": message.id,
        **bytes_field("key", message.key),
        **bytes_field("data", message.data),
        "attributes": dict(message.attributes),
    }


def _message_row(message: QueuedMessage, limit: int | None) -> list[object]:
    return [
        f"{message.topic}[{message.partition}] {message.offset}",
        message.state,
        message.attempt,
        None if message.due_in is None else f"{message.due_in:.1f} s",
        printable(message.key, limit),
        printable(message.data, limit),
        cut(attribute_pairs(message.attributes), limit) or None,
    ]


def _purge_json(subscription: str, purged: PurgedQueue, dry_run: bool) -> dict[str, Any]:
    return {"subscription": subscription, "open": purged.open, "ready": purged.ready, "dry_run": dry_run}


def _told(purged: PurgedQueue) -> str:
    return f"{purged.open} open and {purged.ready} ready messages"
