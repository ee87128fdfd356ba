"""`broker pipeline`: run, inspect and explain the pipelines of Spark that are declared in TOML files.

Spark is imported when one of these commands runs, and not before. A run is stopped by Ctrl-C or SIGTERM after the
running batch, and at once by the second of them; it then ends with 130 or 143 as other commands do.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from broker.cli.rendering import json_text, show_table
from broker.cli.session import AsJson, Session, command, new_app
from broker.errors import ConfigurationError, MissingClient
from broker.hooks import logger

__all__ = ["app"]

app = new_app("pipeline", "Run and inspect pipelines of Spark that are declared in TOML files.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="The TOML file of the pipeline.", show_default=False)]


@command(app, "run", connect=False)
async def run(session: Session, file: File, *, as_json: AsJson = False) -> None:
    """Run a pipeline until it is stopped, or until there is no more where its trigger says so."""
    module = _spark("pipeline")
    pipeline = _pipeline(session, file)
    with _Display(session, pipeline.name) as display:
        under_way = module.Run(pipeline, display.show)
        work = asyncio.ensure_future(asyncio.to_thread(under_way.execute))
        try:
            batches = await asyncio.shield(work)
        except asyncio.CancelledError:
            under_way.stop()
            session.note(f"broker: {pipeline.name} stops after the running batch; once more to stop at once")
            while not work.done():
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    under_way.stop()
            work.result()
            raise
    if not as_json:
        session.note(f"{pipeline.name}: {batches} {'batch' if batches == 1 else 'batches'}, nothing more to do")


@command(app, "status", connect=False)
async def status(session: Session, file: File, *, as_json: AsJson = False) -> None:
    """Show the last committed batch of a pipeline, its offsets and its lag."""
    module = _spark("pipeline.inspecting")
    found: Any = await asyncio.to_thread(module.status, _pipeline(session, file))
    rows: list[tuple[Any, ...]] = [
        (f"{place.topic}[{place.partition}]", place.next, place.end, place.lag) for place in found.places
    ]
    rows += [
        (f"{queue.source}/{queue.subscription}", f"segment {queue.next}", "-", queue.lag) for queue in found.queues
    ]
    if as_json:
        session.answer(
            {
                "pipeline": found.pipeline,
                "checkpoint": found.checkpoint,
                "committed": found.committed,
                "planned": found.planned,
                "lag": found.lag,
                "partitions": [
                    {"topic": place.topic, "partition": place.partition, "next": place.next, "end": place.end}
                    for place in found.places
                ],
                "queues": [
                    {
                        "source": queue.source,
                        "subscription": queue.subscription,
                        "segment": queue.next,
                        "spooled": queue.spooled,
                        "waiting": queue.waiting,
                    }
                    for queue in found.queues
                ],
                "problem": found.problem or None,
            },
            "",
        )
    else:
        committed = "no batch is committed" if found.committed is None else f"batch {found.committed} is committed"
        planned = "" if found.planned is None else f", batch {found.planned} was begun"
        behind = "" if found.lag is None or not rows else f", {found.lag} behind"
        typer.echo(f"{found.pipeline}: {committed}{planned}{behind}")
        show_table(("PARTITION", "NEXT", "END", "LAG"), rows)
        if found.problem:
            session.note(f"broker: {found.problem}")


@command(app, "explain", connect=False)
async def explain(
    session: Session,
    file: File,
    *,
    spark: Annotated[bool, typer.Option("--spark/--no-spark", help="Spark's own plan too, which starts it.")] = True,
    as_json: AsJson = False,
) -> None:
    """Show what a pipeline is made of, and Spark's plan of it."""
    module = _spark("pipeline.inspecting")
    pipeline = _pipeline(session, file)
    parts = module.parts(pipeline)
    plan = ""
    if spark:
        made = _spark("session").session(pipeline.name, master=pipeline.master, config=pipeline.config)
        plan = module.explain(pipeline, made)
    if as_json:
        session.answer({"parts": dict(parts), "plan": plan or None}, "")
        return
    show_table(("PART", "WHAT"), parts)
    if plan:
        typer.echo(f"\n{plan}")


def _spark(module: str) -> Any:
    """A module of the package that stands on this one, and is imported by nothing in it."""
    try:
        return import_module(f"broker_spark.{module}")
    except ModuleNotFoundError as error:
        if error.name != "broker_spark":
            raise
        raise MissingClient("Pipelines need broker_spark", advice="Run: pip install 'anybroker[spark]'") from None


def _pipeline(session: Session, file: Path) -> Any:
    if session.options.config is not None or session.options.url is not None:
        raise ConfigurationError("A pipeline's file says where its brokers are", advice="Leave --url and --config out")
    return _spark("pipeline.toml_file").read_pipeline(file)


class _Warnings(logging.Handler):
    """Warnings and errors of the log as a line each. With --debug the log itself shows them."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text}: {type(error).__name__}: {error}"
        self._tell(" ".join(text.split()))


class _Display:
    """A line for each batch and warning; below, where a person looks, a bar that fills as the pipeline catches up."""

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._done = 0
        self._progress: Progress | None = None
        self._warnings = _Warnings(self._warn)
        if session.interactive:
            columns = (SpinnerColumn(), TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(name, total=None)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        if not self._session.options.debug:
            logger.addHandler(self._warnings)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self._warnings)
        if self._progress is not None:
            self._progress.stop()

    def show(self, report: Any) -> None:
        self._done += report.rows_in
        if self._session.as_json:
            told = {
                "pipeline": report.pipeline,
                "batch": report.batch,
                "rows_in": report.rows_in,
                "rows_out": dict(report.rows_out),
                "dead": report.dead,
                "lag": report.lag,
                "seconds": report.seconds,
            }
            sys.stdout.write(json_text(told) + "\n")
            sys.stdout.flush()
        else:
            self._line(str(report))
            if self._progress is not None:
                self._progress.update(self._task, completed=self._done, total=self._done + report.lag)

    def _warn(self, text: str) -> None:
        as_json = self._session.as_json
        self._line(json_text({"event": "Warned", "message": text}) if as_json else f"broker: {text}")

    def _line(self, text: str) -> None:
        """A line of standard error, above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            self._session.note(text)
