"""`broker dead`: look at dead letters, and send them back to where they came from.

Listing reads only. A redrive publishes each letter before it removes it, so an interruption may repeat one and
loses none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from broker.cli.exits import Exit, Failure
from broker.cli.log_view import read_last
from broker.cli.peek import CUT, next_of
from broker.cli.rendering import cut, envelope_json, escaped, json_line, printable, show_table
from broker.cli.session import AsJson, Session, command, new_app
from broker.messages import DEAD_LETTER_PREFIX, Message, Record

__all__ = ["app"]

app = new_app("dead", "List dead letters and redrive them.")

DeadTopic = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The dead-letter topic, such as orders.dead.", show_default=False)
]


@command(app, "list")
async def list_dead(
    session: Session,
    topic: DeadTopic,
    *,
    count: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many to show, the newest.")] = 20,
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription", "-s", help="Show what this one gets next, and give it back.", show_default=False
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not cut errors and bodies.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show dead letters with the reason, the error, the attempts and where they came from."""
    found: Sequence[Message[Any] | Record[Any]]
    records = session.bus.capabilities.records
    if subscription is not None:
        found = await next_of(session, topic, subscription, count)
    elif records is not None and records.log_reader:
        found = await read_last(session.bus.log, topic, None, count)
    else:
        raise Failure(
            f"{session.bus.capabilities.backend} keeps no log that could be read",
            advice="Give --subscription to see what that one gets next",
            code=Exit.USAGE,
        )
    if as_json:
        await session.out.write(b"".join(json_line(dead_json(letter)) for letter in found))
        return
    limit = None if full else CUT
    rows = [_row(letter, limit) for letter in found]
    if not show_table(("ID", "REASON", "ATTEMPTS", "ORIGIN", "ERROR", "KEY", "DATA"), rows):
        session.note(f"There are no dead letters in {topic!r}")


@command(app, "redrive")
async def redrive(
    session: Session,
    topic: DeadTopic,
    *,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Stop after so many.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish dead letters to the topic each came from; every subscription of that topic gets them."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        progress = stack.enter_context(
            Progress(*columns, console=Console(stderr=True), transient=True, disable=not session.interactive)
        )
        task = progress.add_task("Redriven", total=limit)
        report = await session.bus.admin.redrive(
            topic, limit=limit, progress=lambda moved: progress.update(task, completed=moved)
        )
    value = {"topic": topic, "moved": report.moved, "by_topic": dict(report.by_topic), "skipped": report.skipped}
    targets = ", ".join(f"{count} to {name!r}" for name, count in sorted(report.by_topic.items()))
    text = f"Moved {report.moved} {'letter' if report.moved == 1 else 'letters'}" + (f": {targets}" if targets else "")
    if report.skipped:
        text += f"; {report.skipped} without an origin stay"
    session.answer(value, text)


def dead_letter_fields(letter: Message[Any] | Record[Any]) -> dict[str, str | None]:
    """What the attributes of a dead letter tell of its death, under stable names."""
    found = letter.attributes
    return {
        name: found.get(f"{DEAD_LETTER_PREFIX}{name}")
        for name in ("reason", "error", "attempts", "topic", "subscription", "id", "time")
    }


def dead_json(letter: Message[Any] | Record[Any]) -> dict[str, Any]:
    """A dead letter for programs: its message, without the dead-letter attributes, and `dead_letter` with these."""
    value = envelope_json(letter)
    value["attributes"] = {k: v for k, v in letter.attributes.items() if not k.startswith(DEAD_LETTER_PREFIX)}
    told: dict[str, Any] = dead_letter_fields(letter)
    if (told["attempts"] or "").isdigit():
        told["attempts"] = int(told["attempts"])
    return value | {"dead_letter": told}


def _row(letter: Message[Any] | Record[Any], limit: int | None) -> list[str]:
    told = {name: escaped(value) if value else "-" for name, value in dead_letter_fields(letter).items()}
    origin = told["topic"] if told["subscription"] == "-" else f"{told['topic']} / {told['subscription']}"
    place = told["id"] if told["id"] != "-" else escaped(letter.id)
    return [
        place,
        cut(told["reason"], limit),
        told["attempts"],
        origin,
        cut(told["error"], limit),
        printable(letter.key, limit),
        printable(letter.data, limit),
    ]
