"""`broker pipeline`: run, inspect, try and replay Spark pipelines declared in TOML files.

Spark is imported only when one of these commands runs. Ctrl-C or SIGTERM stops a run after the current batch, and the
exit code is 130 or 0. A second one stops it at once, with 130 or 143.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Self, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from broker.cli.arguments import Listen, parse_address
from broker.cli.output import json_text, print_above, print_line, print_lines, progress_console, show_table
from broker.cli.session import AsJson, Session, command, new_app
from broker.errors import ConfigurationError, MissingClient
from broker.hooks import logger
from broker.probes import ProbeServer, probe

__all__ = ["app"]

_TICK_SECONDS = 0.5
"""How often the progress of a replay is drawn."""

app = new_app("pipeline", "Run, inspect, try and replay Spark pipelines.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="The TOML file of the pipeline.", show_default=False)]


@command(app, "run", connect=False)
async def run(
    session: Session,
    file: File,
    *,
    listen: Listen = None,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline.

    It ends when it is interrupted or, with the trigger "available-now", when it has read its input.
    """
    address = None if listen is None else parse_address(listen)
    module = _spark("pipeline")
    pipeline = _pipeline(session, file)
    metrics = module.BatchMetrics()
    session.serves = True
    async with AsyncExitStack() as stack:
        display = stack.enter_context(_Display(session, pipeline.name))

        def report(batch: Any) -> None:
            metrics(batch)
            display.show(batch)

        under_way = module.Run(pipeline, report)
        if address is not None:
            pages = {"/health": probe(under_way.trouble), "/metrics": lambda: (200, metrics.text())}
            server = await stack.enter_async_context(ProbeServer(*address, pages))
            session.note(f"Health and metrics are at {server.url}")
        work = asyncio.ensure_future(asyncio.to_thread(under_way.execute))
        try:
            batches = await asyncio.shield(work)
        except asyncio.CancelledError:
            under_way.stop()
            session.note(f"broker: {pipeline.name} stops after the current batch; interrupt again to stop now")
            while not work.done():
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    session.serves = False
                    under_way.stop()
            work.result()
            raise
    if not as_json:
        session.note(f"{pipeline.name}: {batches} {'batch' if batches == 1 else 'batches'}, nothing more to do")


@command(app, "status", connect=False)
async def status(session: Session, file: File, *, as_json: AsJson = False) -> None:
    """Show the last committed batch of a pipeline, with its offsets and lag."""
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
        planned = "" if found.planned is None else f", batch {found.planned} was started"
        behind = "" if found.lag is None or not rows else f", {found.lag} behind"
        print_line(f"{found.pipeline}: {committed}{planned}{behind}")
        show_table(("PARTITION", "NEXT", "END", "LAG"), rows)
        if found.problem:
            session.note(f"broker: {found.problem}")


@command(app, "explain", connect=False)
async def explain(
    session: Session,
    file: File,
    *,
    spark: Annotated[
        bool, typer.Option("--spark/--no-spark", help="Also show the plan of Spark, which starts Spark.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Show the parts of a pipeline, and the plan of Spark."""
    module = _spark("pipeline.inspecting")
    pipeline = _pipeline(session, file)
    parts = module.parts(pipeline)
    plan = ""
    if not spark and (unchecked := module.unchecked(pipeline)):
        session.note(f"broker: without Spark, nothing checks {', '.join(unchecked)}")
    if spark:
        made = _spark("session").session(pipeline.name, master=pipeline.master, config=pipeline.config)
        plan = module.explain(pipeline, made)
    if as_json:
        session.answer({"parts": dict(parts), "plan": plan or None}, "")
        return
    show_table(("PART", "WHAT"), parts)
    if plan:
        print_lines(f"\n{plan}")


@command(app, "dry-run", connect=False)
async def dry_run(
    session: Session,
    file: File,
    *,
    rows: Annotated[int, typer.Option(help="Rows to read of each source.", min=1)] = 20,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="POSITION", help="Read from here on: earliest, a time or offsets. [default: the newest]"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a pipeline makes of a few rows, and its plan. Writes nothing."""
    pipeline = _pipeline(session, file)
    made = _spark("session").session(pipeline.name, master=pipeline.master, config=pipeline.config)
    found: Any = await asyncio.to_thread(
        _spark("pipeline.sampling").sample, pipeline, rows=rows, start=start, spark=made
    )
    inspecting = _spark("pipeline.inspecting")
    parts, plan = inspecting.parts(pipeline), inspecting.explain(pipeline, made)
    out = [{name: _plain(value) for name, value in zip(found.columns, row, strict=True)} for row in found.rows]
    dead: list[Any] = [_plain(row) for row in found.dead]
    if as_json:
        session.answer(
            {
                "rows_in": dict(found.rows_in),
                "rows_out": dict(found.rows_out),
                "rows": out,
                "dead": dead,
                "parts": dict(parts),
                "plan": plan,
            },
            "",
        )
        return
    counts = [(f"sources.{name}", count) for name, count in found.rows_in.items()]
    counts += [(f"sinks.{name}", count) for name, count in found.rows_out.items()]
    show_table(("PART", "ROWS"), [*counts, ("dead_letters", len(dead))])
    if out:
        print_line("")
        show_table([name.upper() for name in found.columns], [[_cell(each) for each in row.values()] for row in out])
    if dead:
        print_line("")
        shown = ("topic", "partition", "offset", "reason", "value")
        show_table([name.upper() for name in shown], [[row[name] for name in shown] for row in dead])
    print_line("")
    show_table(("PART", "WHAT"), parts)
    print_lines(f"\n{plan}")


@command(app, "replay", connect=False)
async def replay(
    session: Session,
    file: File,
    *,
    start: Annotated[
        str, typer.Option("--from", metavar="POSITION", help="Where to start: earliest, a time or offsets.")
    ],
    end: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="POSITION",
            help="Where to end: latest, a time or offsets. [default: where the next batch of the pipeline begins]",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="A name for this replay; its files and tables are called after it.")],
    as_json: AsJson = False,
) -> None:
    """Process a range of the topics again, into places of its own."""
    module = _spark("pipeline.replaying")
    pipeline = _pipeline(session, file)
    made = _spark("session").session(pipeline.name, master=pipeline.master, config=pipeline.config)
    planned: Any = await asyncio.to_thread(module.Replay, pipeline, made, name=name, start=start, end=end)
    if not as_json:
        ranges = [each for found in planned.ranges.values() for each in found]
        rows = [(f"{each.topic}[{each.partition}]", each.start, each.stop, each.stop - each.start) for each in ranges]
        show_table(("PARTITION", "FROM", "TO", "OFFSETS"), rows)
        sinks = planned.pipeline.all_sinks()
        targets = [each for each in _spark("pipeline.inspecting").parts(planned.pipeline) if each[0] in sinks]
        show_table(("SINK", "WHAT"), targets)
    with _Display(session, f"{pipeline.name}, replay {name}") as display:
        work = asyncio.ensure_future(asyncio.to_thread(planned.execute))
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=_TICK_SECONDS)
                if session.interactive:
                    display.advance(*planned.progress())
        except asyncio.CancelledError:
            planned.stop()
            session.note(f"broker: replay {name} stops; run it again under its name to replace what it wrote")
            await asyncio.wait((work,))
            work.exception()
            raise
        display.show(work.result())


def _plain(value: Any) -> Any:
    """A value of a row for JSON and for people: bytes as text."""
    as_dict = getattr(value, "asDict", None)
    if as_dict is not None:
        value = as_dict()
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(each) for each in cast("list[Any]", value)]
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes | bytearray) else value


def _cell(value: Any) -> Any:
    """A plain value in a table."""
    return json_text(cast("Any", value)) if isinstance(value, dict | list) else value


def _spark(module: str) -> Any:
    """A module of broker_spark, which `broker` imports nowhere else."""
    try:
        return import_module(f"broker_spark.{module}")
    except ModuleNotFoundError as error:
        if error.name != "broker_spark":
            raise
        raise MissingClient(
            "Pipelines need the package broker_spark, which is not installed",
            advice="Run: pip install 'anybroker[spark]'",
        ) from None


def _pipeline(session: Session, file: Path) -> Any:
    if session.options.config is not None or session.options.url is not None:
        raise ConfigurationError(
            "--url and --config do not apply to pipelines: the file of a pipeline names its brokers",
            advice="Leave them out",
        )
    return _spark("pipeline.toml_file").read_pipeline(file)


class _Warnings(logging.Handler):
    """Prints warnings and errors of the log as one line each. With --debug the log shows them."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text}: {type(error).__name__}: {error}"
        self._write(" ".join(text.split()))


class _Display:
    """Prints a line for each batch and warning; on a terminal also a progress bar of the lag."""

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._done = 0
        self._progress: Progress | None = None
        self._warnings = _Warnings(self._warn)
        if session.interactive:
            columns = (SpinnerColumn(), TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=progress_console(), transient=True)
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
            value = {
                "pipeline": report.pipeline,
                "batch": report.batch,
                "rows_in": report.rows_in,
                "rows_out": dict(report.rows_out),
                "dead": report.dead,
                "failed": dict(report.failed),
                "late": report.late,
                "lag": report.lag,
                "seconds": report.seconds,
            }
            print_line(json_text(value))
        else:
            self._line(str(report))
            if self._progress is not None:
                self._progress.update(self._task, completed=self._done, total=self._done + report.lag)

    def advance(self, done: int, total: int) -> None:
        """Draw how many tasks are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total or None)

    def _warn(self, text: str) -> None:
        as_json = self._session.as_json
        self._line(json_text({"event": "Warned", "message": text}) if as_json else f"broker: {text}")

    def _line(self, text: str) -> None:
        """Write a line to standard error, above the bar."""
        if self._progress is not None:
            print_above(self._progress, text)
        else:
            self._session.note(text)
