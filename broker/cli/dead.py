"""`broker dead`: look at dead letters, and send them back to where they came from.

Listing settles and moves nothing. A redrive publishes each letter before it settles it, so an interruption may
repeat some and loses none.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from broker.cli.exits import Exit, describe
from broker.cli.progress import counter
from broker.cli.rendering import bytes_field, cut, escaped, json_line, json_text, printable, show_table, timestamp
from broker.cli.session import AsJson, Session, command, new_app
from broker.cli.topics import parse_name
from broker.redrive import DeadLetter

__all__ = ["app"]

app = new_app("dead", "List dead letters and redrive them.")

CUT = 60
"""Characters of an error or body that a table shows."""


DeadTopic = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC",
        parser=parse_name,
        help="The dead-letter topic, such as orders.dead, or the broker's own name of one.",
        show_default=False,
    ),
]


@command(app, "list")
async def list_dead(
    session: Session,
    topic: DeadTopic,
    *,
    count: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many to show, the oldest first.")] = 20,
    full: Annotated[bool, typer.Option("--full", help="Do not cut errors and bodies.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show dead letters with reason, error, attempts and origin.

    These are the letters that a redrive would move next. Messages that tell neither reason nor origin are no dead
    letters: they are counted and not shown.
    """
    found = await session.bus.admin.list_dead(topic, limit=count)
    letters = [letter for letter in found if letter.reason is not None or letter.topic is not None]
    foreign = len(found) - len(letters)
    if as_json:
        await session.out.write(b"".join(json_line(letter_json(letter)) for letter in letters))
        if foreign:
            session.note(json_text({"topic": topic, "not_dead_letters": foreign, "message": _foreign(topic, foreign)}))
        return
    columns = ("ID", "TIME (UTC)", "REASON", "ATTEMPTS", "ORIGIN", "ERROR", "KEY", "DATA")
    limit = None if full else CUT
    if not show_table(columns, [_row(letter, limit) for letter in letters]):
        session.note(f"There are no dead letters in {topic!r}")
    if foreign:
        session.note(_foreign(topic, foreign))


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
    """Publish dead letters to the topic each came from.

    Every subscription of that topic gets them. What cannot be moved stays. Exit code 1 if any could not, or is held by
    another redrive.
    """
    with counter("Redriven", shown=session.interactive, total=limit) as count:
        report = await session.bus.admin.redrive(topic, limit=limit, progress=count)
    value = {
        "topic": topic,
        "moved": report.moved,
        "by_topic": report.by_topic,
        "skipped": report.skipped,
        "failed": report.failed,
        "repeatable": report.repeatable,
        "elsewhere": report.elsewhere,
        "errors": {name: describe(error) for name, error in report.errors.items()},
    }
    parts = [f"{moved} moved to {name!r}" for name, moved in sorted(report.by_topic.items())] or ["None moved"]
    if report.skipped:
        parts.append(f"{report.skipped} without an origin stay")
    if report.failed:
        parts.append(f"{report.failed} could not be moved and stay")
    if report.repeatable:
        parts.append(f"{report.repeatable} may be moved again by the next redrive")
    if report.elsewhere:
        parts.append(
            f"{report.elsewhere} are held by another redrive, or were by one that was killed: redrive again when "
            "their leases have ended"
        )
    session.answer(value, ", ".join(parts))
    for name, error in sorted(report.errors.items()):
        if not as_json:
            session.note(f"broker: publishing to {name!r} failed: {error}")
    if report.failed or report.elsewhere:
        session.code = Exit.FAILED


def letter_json(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter for programs: the original, and what became of it; `topic` is the origin."""
    return {
        "topic": letter.topic,
        "subscription": letter.subscription,
        "reason": letter.reason,
        "error": letter.error,
        "attempts": letter.attempts,
        "partition": letter.partition,
        "offset": letter.offset,
        "time": timestamp(letter.time),
        "id": letter.id,
        **bytes_field("key", letter.key),
        **bytes_field("data", letter.data),
        "attributes": dict(letter.attributes),
    }


def _foreign(topic: str, count: int) -> str:
    what = "1 message carries" if count == 1 else f"{count} messages carry"
    return (
        f"{what} no dead-letter reason: not dead letters, and a redrive leaves them in {topic!r}; "
        f"see them with `broker peek {topic}`"
    )


def _origin(letter: DeadLetter) -> str | None:
    """Topic and place, such as `orders[2]@71`, as far as the letter tells them."""
    if letter.topic is None or letter.offset is None:
        return letter.topic
    partition = "" if letter.partition is None else f"[{letter.partition}]"
    return f"{letter.topic}{partition}@{letter.offset}"


def _row(letter: DeadLetter, limit: int | None) -> list[str]:
    def told(text: str | None) -> str:
        return cut(escaped(text), limit) if text else "-"

    return [
        escaped(letter.id or "-"),
        letter.time.strftime("%Y-%m-%d %H:%M:%S") if letter.time else "-",
        told(letter.reason),
        "-" if letter.attempts is None else str(letter.attempts),
        told("/".join(part for part in (_origin(letter), letter.subscription) if part)),
        told(letter.error),
        printable(letter.key, limit),
        printable(letter.data, limit),
    ]
