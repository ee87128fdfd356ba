"""`broker dead`: list dead letters and redrive them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from broker.cli.arguments import parse_name
from broker.cli.completion import complete_topic
from broker.cli.errors import Exit, error_json
from broker.cli.output import counter, escaped, json_line, json_text, show_table
from broker.cli.rendering import bytes_field, cut, printable, timestamp
from broker.cli.session import AsJson, Session, command, new_app
from broker.redrive import DeadLetter

__all__ = ["app"]

app = new_app("dead", "List dead letters and redrive them.")

CUT = 60
"""Maximum length of an error or body in a table."""
TOPICS = 10
"""Most topics that one line names: any producer may invent topics."""

DeadTopic = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC",
        parser=parse_name,
        help="Name of the dead-letter topic, such as orders.dead; one that is not portable is the broker's own name.",
        show_default=False,
        autocompletion=complete_topic,
    ),
]


@command(app, "list")
async def list_dead(
    session: Session,
    topic: DeadTopic,
    *,
    count: Annotated[
        int, typer.Option("--limit", "-n", metavar="COUNT", min=1, help="Show at most this many letters.")
    ] = 20,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten errors and bodies.")] = False,
    as_json: AsJson = False,
) -> None:
    """List dead letters with reason, error, attempts and origin, oldest first.

    A redrive would move these letters next. Messages with neither reason nor origin are not dead letters: they are
    counted and not shown. Nothing is settled or moved.
    """
    found = await session.bus.admin.list_dead(topic, limit=count)
    letters = [letter for letter in found if letter.reason is not None or letter.topic is not None]
    foreign = len(found) - len(letters)
    if as_json:
        await session.out.write(b"".join(json_line(_letter_json(letter)) for letter in letters))
        if foreign:
            session.note(json_text({"topic": topic, "not_dead_letters": foreign, "message": _foreign(topic, foreign)}))
        return
    columns = ("ID", "TIME (UTC)", "REASON", "ATTEMPTS", "ORIGIN", "ERROR", "KEY", "DATA")
    limit = None if full else CUT
    if not show_table(columns, [_row(letter, limit) for letter in letters]):
        session.note(f"There are no dead letters in {topic!r}")
    if foreign:
        session.note(_foreign(topic, foreign))
    if incomplete := sum(letter.cut is not None for letter in letters):
        session.note(_incomplete(incomplete))


@command(app, "redrive")
async def redrive(
    session: Session,
    topic: DeadTopic,
    *,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="TOPIC",
            parser=parse_name,
            help="A topic that letters may go back to, repeatable; letters of other topics stay.",
            show_default=False,
            autocompletion=complete_topic,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the letters of each topic, 10,000 letters at most; move nothing.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", metavar="COUNT", min=1, help="Stop after this many letters were moved.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish each dead letter to the topic it came from, if --to names that topic.

    Whoever may write to the dead-letter topic can name any topic in a letter: see the topics with --dry-run first.
    Every subscription of that topic receives the message again. A letter is settled after its message was published:
    an interruption may repeat messages and loses none.

    Letters that cannot be moved stay. The exit code is 1 if there are any, or if another redrive holds letters.
    """
    with counter("Redriven", shown=session.interactive, total=limit) as count:
        report = await session.bus.admin.redrive(topic, to=to, dry_run=dry_run, limit=limit, progress=count)
    value = {
        "topic": topic,
        "dry_run": dry_run,
        "moved": report.moved,
        "by_topic": report.by_topic,
        "skipped": report.skipped,
        "failed": report.failed,
        "not_allowed": report.not_allowed,
        "repeatable": report.repeatable,
        "elsewhere": report.elsewhere,
        "errors": {name: error_json(error) for name, error in report.errors.items()},
    }
    verb, stay = ("would move", "would stay") if dry_run else ("moved", "stay")
    parts = [f"{moved} {verb} to {name!r}" for name, moved in sorted(report.by_topic.items())] or [f"None {verb}"]
    if report.skipped:
        parts.append(f"{report.skipped} without an origin {stay}")
    if refused := sum(report.not_allowed.values()):
        parts.append(f"{refused} from topics that --to does not name {stay}: {_most(report.not_allowed)}")
    if failed := report.failed - refused:
        parts.append(f"{failed} could not be moved and {stay}")
    if report.repeatable:
        parts.append(f"{report.repeatable} may be moved again by the next redrive")
    if report.elsewhere:
        parts.append(
            f"{report.elsewhere} are held by another redrive, running or killed: redrive again when their leases have "
            "ended"
        )
    session.answer(value, ", ".join(parts))
    for name, error in sorted(report.errors.items()):
        if not as_json:
            session.note(f"broker: publishing to {name!r} failed: {error}")
    if report.failed or report.elsewhere:
        session.code = Exit.FAILED


def _most(counts: Mapping[str, int]) -> str:
    """The topics with the most letters."""
    names = sorted(counts, key=lambda name: (-counts[name], name))
    shown = [f"{cut(escaped(name), CUT)} ({counts[name]})" for name in names[:TOPICS]]
    return ", ".join(shown) + (f" and {len(names) - TOPICS} more" if len(names) > TOPICS else "")


def _letter_json(letter: DeadLetter) -> dict[str, Any]:
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
        "cut": letter.cut,
        "key_bytes": letter.key_bytes,
        "data_bytes": letter.data_bytes,
        **bytes_field("key", letter.key),
        **bytes_field("data", letter.data),
        "attributes": dict(letter.attributes),
    }


def _foreign(topic: str, count: int) -> str:
    what = "1 message carries" if count == 1 else f"{count} messages carry"
    return (
        f"{what} no dead-letter reason and would stay in {topic!r} at a redrive. Show messages with "
        f"`broker peek {topic}`"
    )


def _incomplete(count: int) -> str:
    what = "1 letter lacks" if count == 1 else f"{count} letters lack"
    return f"{what} a part of the message, and no redrive moves such a letter: --json shows in `cut` what it lacks"


def _origin(letter: DeadLetter) -> str | None:
    """Topic, partition and offset, such as `orders[2]@71`, as far as the letter has them."""
    if letter.topic is None or letter.offset is None:
        return letter.topic
    partition = "" if letter.partition is None else f"[{letter.partition}]"
    return f"{letter.topic}{partition}@{letter.offset}"


def _row(letter: DeadLetter, limit: int | None) -> list[str]:
    def shown(text: str | None) -> str:
        return cut(escaped(text), limit) if text else "-"

    return [
        escaped(letter.id or "-"),
        letter.time.strftime("%Y-%m-%d %H:%M:%S") if letter.time else "-",
        shown(letter.reason),
        "-" if letter.attempts is None else str(letter.attempts),
        shown("/".join(part for part in (_origin(letter), letter.subscription) if part)),
        shown(letter.error),
        _part(letter.key, letter.key_bytes, limit),
        _part(letter.data, letter.data_bytes, limit),
    ]


def _part(value: bytes | None, whole: int | None, limit: int | None) -> str:
    """A key or body, with its original size if the letter lacks a part of it."""
    return printable(value, limit) if whole is None else f"{printable(value, limit)} (of {whole} bytes)"
