"""A counter on standard error while a person waits; nothing at all where nobody looks. Drawn by a thread of rich's."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["counter"]


@contextmanager
def counter(what: str, *, shown: bool, total: int | None = None) -> Generator[Callable[[int], None]]:
    """Draw `what` and a number until the block ends; gives the function that sets the number."""
    if not shown:
        yield lambda _: None
        return
    # What most commands run without, and a tenth of what they load.
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda number: progress.update(task, completed=number)
