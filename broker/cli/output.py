"""The one place through which the command line prints.

What servers and producers send may hold terminal escapes, line ends that forge a line, and controls that reorder text.
Text shows such characters as escapes; JSON has them as `\\uXXXX`, which means the same to a program. Only `raw_line` is
exact, to a pipe or a file. *Concurrency.* One thread prints.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "ask",
    "counter",
    "escaped",
    "escaped_lines",
    "json_line",
    "json_text",
    "log_to_stderr",
    "logged_to_stderr",
    "print_above",
    "print_line",
    "print_lines",
    "progress_console",
    "raw_line",
    "show_table",
]


def escaped(text: str) -> str:
    """The text on one line, with escapes for all unprintable characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaped_lines(text: str) -> str:
    """The same for each line of a text, of which only the ends of lines stay."""
    return "\n".join(map(escaped, text.split("\n")))


def json_text(value: object) -> str:
    """One JSON document on one line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if text.isprintable():
        return text
    # All of these are within texts, where JSON allows an escape for any character.
    return "".join(c if c.isprintable() else _json_escape(c) for c in text)


def _json_escape(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else json.dumps(character)[1:-1]


def json_line(value: object) -> bytes:
    """One JSON document as a line of output."""
    return json_text(value).encode() + b"\n"


def raw_line(data: bytes) -> bytes:
    """A body as a line of output: exact for a pipe or a file, escaped for a terminal."""
    if sys.stdout.isatty():
        data = escaped_lines(data.decode("utf-8", "backslashreplace")).encode()
    return data + b"\n"


def print_line(text: str, *, err: bool = False) -> None:
    """Print one line on standard output, or on standard error."""
    typer.echo(escaped(text), err=err)


def print_lines(text: str, *, err: bool = False) -> None:
    """Print a text of several lines."""
    typer.echo(escaped_lines(text), err=err)


def ask(question: str) -> None:
    """Print a question on standard error, without an end of the line."""
    typer.echo(f"{escaped(question)} ", nl=False, err=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bool:
    """Print a table on standard output. Without rows it prints nothing and returns False."""
    # Imported late: commands with --json print no table.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        # People copy the first column, so it is never wrapped.
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(Text("-" if cell is None else escaped(str(cell))) for cell in row))
    if not table.row_count:
        return False
    if sys.stdout.isatty():
        Console(file=sys.stdout, highlight=False).print(table)
        return True
    # A pipe has no width: nothing is wrapped or padded.
    text = io.StringIO()
    Console(file=text, width=10_000, highlight=False).print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))
    sys.stdout.flush()
    return True


@contextmanager
def counter(what: str, *, shown: bool, total: int | None = None) -> Generator[Callable[[int], None]]:
    """Draw `what` and a number on standard error until the block ends; yields the function that sets the number."""
    if not shown:
        yield lambda _: None
        return
    # Imported late: slow to import, and rarely needed.
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as progress:
        task = progress.add_task(escaped(what), total=total)
        yield lambda number: progress.update(task, completed=number)


def progress_console() -> Console:
    """Where progress is drawn: standard error."""
    from rich.console import Console

    return Console(stderr=True)


def print_above(progress: Progress, text: str) -> None:
    """Print one line on standard error, above the progress that is drawn there."""
    progress.console.print(escaped(text), highlight=False, markup=False)


class _Formatter(logging.Formatter):
    """A record is one line, and a traceback has no other control characters than its ends of lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        return escaped(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return escaped_lines(super().format(record))


def log_to_stderr() -> None:
    """Print all records of the log on standard error, unless the log is configured already."""
    root = logging.getLogger()
    if root.handlers:
        return
    root.addHandler(_stderr_handler())
    root.setLevel(logging.DEBUG)


@contextmanager
def logged_to_stderr(level: int) -> Generator[bool]:
    """Print records from this level on while the block runs; False if the log is configured already."""
    root = logging.getLogger()
    if any(not isinstance(handler, logging.NullHandler) for handler in root.handlers):
        yield False
        return
    handler = _stderr_handler()
    handler.setLevel(level)
    root.addHandler(handler)
    try:
        yield True
    finally:
        root.removeHandler(handler)


def _stderr_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler
