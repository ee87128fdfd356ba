"""`broker streams`: runs and describes groups, reads tables, visits rows, resets groups, and shows their lag.

A group is given as MODULE:NAME, where NAME is a `Group` or a function that returns one; the working directory is
searched first. Ctrl-C or SIGTERM ends `run` after a last checkpoint, with exit code 130 or 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from asyncio.subprocess import Process
from base64 import b64encode
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import typer

from broker import Bytes, TopicNotFound, Unsupported
from broker.cli.arguments import KnownTopic, Yes, parse_duration
from broker.cli.errors import Exit, Failure
from broker.cli.loading import load_object
from broker.cli.output import counter, escaped, json_line, json_text, print_lines, show_table
from broker.cli.processes import (
    address_of,
    as_arguments,
    check_shared,
    exit_status,
    run_until_interrupted,
    serving_probes,
    start_process,
    stop_processes,
)
from broker.cli.rendering import bytes_field, printable
from broker.cli.session import AsJson, Session, command, new_app
from broker_streams import keys
from broker_streams.commits import Guarantee
from broker_streams.graph import Group, table_of
from broker_streams.operations import Reset, ResetTo, StoredGroup, find_group, lag
from broker_streams.partition import PartitionState
from broker_streams.processor import Processor
from broker_streams.stats import ProcessorState
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.memory import Memory
from broker_streams.stores.rocksdb import RocksDb
from broker_streams.stores.sqlite import Sqlite
from broker_streams.stores.store import StoreFactory
from broker_streams.view import View
from broker_streams.wording import counted

__all__ = ["app"]

app = new_app("streams", "Run, describe and reset groups of stream processors; read their tables.")
table_app = new_app("table", "Read tables.")
app.add_typer(table_app)

_CUT: Final = 60
"""Maximum length of a value in a table for people."""
_LINES: Final = 1000
"""Lines that are written at once."""
_JOIN_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.2


class StoreKind(StrEnum):
    """What `--store` takes."""

    LMDB = "lmdb"
    SQLITE = "sqlite"
    ROCKSDB = "rocksdb"
    MEMORY = "memory"

    def factory(self) -> StoreFactory:
        """The store of this name."""
        match self:
            case StoreKind.LMDB:
                return Lmdb()
            case StoreKind.SQLITE:
                return Sqlite()
            case StoreKind.ROCKSDB:
                return RocksDb()
            case StoreKind.MEMORY:
                return Memory()


GroupCode = Annotated[
    str, typer.Argument(metavar="MODULE:NAME", help="A group, or a function that returns one.", show_default=False)
]
GroupName = Annotated[
    str,
    typer.Argument(
        metavar="GROUP",
        help="Name of the group; MODULE:NAME if its table has a name of its own.",
        show_default=False,
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="Where stores are kept; by default below XDG_STATE_HOME or ~/.local/state.",
        show_default=False,
    ),
]
StoreOption = Annotated[StoreKind, typer.Option("--store", help="What keeps the rows.")]
GuaranteeOption = Annotated[
    Guarantee | None,
    typer.Option("--guarantee", help="By default the best that the broker has.", show_default=False),
]
Interval = Annotated[
    str, typer.Option("--checkpoint-interval", metavar="TIME", help="Time between checkpoints, such as 0.5s or 1m.")
]
Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Only keys that begin so.", show_default=False)]
StartKey = Annotated[str | None, typer.Option("--start", metavar="KEY", help="The first key.", show_default=False)]
StopKey = Annotated[
    str | None, typer.Option("--stop", metavar="KEY", help="The first key no longer wanted.", show_default=False)
]


# -- running -----------------------------------------------------------------------------------------------


@command(app, "run")
async def run(
    session: Session,
    group: GroupCode,
    *,
    state_dir: StateDir = None,
    store: StoreOption = StoreKind.LMDB,
    guarantee: GuaranteeOption = None,
    checkpoint_interval: Interval = "1s",
    checkpoint_messages: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="Messages after which there is a checkpoint before that.")
    ] = 10_000,
    standby: Annotated[
        str | None,
        typer.Option(
            metavar="PARTITIONS",
            help='Keep the tables of these partitions up to date for a takeover: "all", or numbers such as 0,2.',
            show_default=False,
        ),
    ] = None,
    recover_ahead: Annotated[
        bool, typer.Option("--recover-ahead", help="Recover all tables before joining the group.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of this member, unique and the same after a restart."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            metavar="COUNT",
            min=1,
            help="Run so many processes, each a member with a state directory of its own. If one ends, all end.",
        ),
    ] = 1,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve /live, /ready and /metrics at this address; port 0 is any free one. Of several processes, each "
            "takes the next port.",
        ),
    ] = None,
    member: Annotated[int, typer.Option(hidden=True, help="The number of a process among several.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run a processor of a group.

    It runs until it is interrupted, or fails. Progress is on standard error.
    """
    found = load_object(group, Group, "shop.clicks:group")
    interval, standby_of = parse_duration(checkpoint_interval).total_seconds(), _parse_standby(standby)
    address = None if listen is None else address_of(listen, member, processes)
    session.serves = True
    if processes > 1:
        check_shared(session)
        options: dict[str, Any] = {
            "--state-dir": state_dir,
            "--store": store,
            "--guarantee": guarantee,
            "--checkpoint-interval": checkpoint_interval,
            "--checkpoint-messages": checkpoint_messages,
            "--standby": standby,
            "--recover-ahead": recover_ahead,
            "--listen": listen,
            "--json": as_json,
            "--debug": session.options.debug,
            "--config": session.options.config,
        }
        await _run_processes(session, [group, *as_arguments(options)], processes, name)
        return
    processor = Processor(
        session.bus,
        found,
        state_dir=state_dir,
        store=store.factory(),
        guarantee=guarantee,
        checkpoint_interval=interval,
        checkpoint_messages=checkpoint_messages,
        standby=standby_of,
        recover_ahead=recover_ahead,
        name=name,
    )
    with _progress(session, member):
        # Before the group is joined, so that an address in use changes nothing.
        async with _probes(session, processor, address, member):
            await run_until_interrupted(
                session,
                processor.run(),
                processor.stop,
                note=f"Group {found.name!r} stops after a last checkpoint; interrupt again to stop now",
                of_several=member > 0,
            )


# -- probes ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _probes(
    session: Session, processor: Processor, address: tuple[str, int] | None, member: int
) -> AsyncGenerator[None]:
    """Serve the probes and metrics of a processor, if there is an address."""
    if address is None:
        yield
        return
    joined = asyncio.ensure_future(_wait_until_ready(processor))

    def trouble() -> str:
        return _not_ready(processor, joined=joined.done(), connected=session.bus.connected)

    try:
        async with serving_probes(session, address, trouble, partial(_tell, session, member)):
            yield
    finally:
        joined.cancel()


async def _wait_until_ready(processor: Processor) -> None:
    async for state in processor.states():
        if state is ProcessorState.RUNNING:
            break
    # `run` raises the same error.
    with suppress(Exception):
        await processor.ready()


def _not_ready(processor: Processor, *, joined: bool, connected: bool) -> str:
    """Why a processor is not ready; empty if it is. Makes no call.

    :param joined: whether the member has got its partitions, or is a spare.
    :param connected: whether the connection to the broker is up.
    """
    if processor.state is not ProcessorState.RUNNING:
        return f"the processor is {processor.state}"
    if not connected:
        return "the connection to the broker is broken"
    if not processor.healthy:
        return "the last fetch failed"
    states = processor.partitions
    if waiting := [number for number, state in sorted(states.items()) if state is not PartitionState.RUNNING]:
        return ", ".join(f"partition {number} is {states[number]}" for number in waiting)
    return "" if joined else "the group has not given it partitions yet"


# -- several processes -------------------------------------------------------------------------------------


async def _run_processes(session: Session, arguments: Sequence[str], count: int, name: str | None) -> None:
    """Run members in processes until one ends, or an interrupt; then stop the others."""
    children: list[Process] = []
    try:
        for number in range(1, count + 1):
            own = [] if name is None else ["--name", f"{name}-{number}"]
            children.append(
                await start_process(session, ("streams", "run"), [*arguments, *own, "--member", str(number)])
            )
        waiting = [asyncio.ensure_future(child.wait()) for child in children]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        number, ended = next((n, child) for n, child in enumerate(children, 1) if child.returncode is not None)
        session.code = exit_status(ended)
        session.note(f"broker: process {number} of {count} ended with {session.code}; the others stop")
    finally:
        await stop_processes(children)
        # One that was asked to stop while it started has nothing to finish.
        failed = [exit_status(child) for child in children if child.returncode not in (0, -signal.SIGTERM)]
        if failed and session.code == Exit.DONE:
            session.code = failed[0]


@contextmanager
def _progress(session: Session, member: int = 0) -> Generator[None]:
    """Print what the processor logs: recovery and its progress, warnings. With --debug the log shows it."""
    if session.options.debug:
        yield
        return
    source, handler = logging.getLogger("broker_streams"), _Lines(session, member)
    before = source.level
    source.addHandler(handler)
    source.setLevel(logging.INFO)
    try:
        yield
    finally:
        source.setLevel(before)
        source.removeHandler(handler)


class _Lines(logging.Handler):
    """Prints each record as a line, or an event in JSON.

    :param member: the number of this process among several; 0 is alone.
    """

    def __init__(self, session: Session, member: int) -> None:
        super().__init__(logging.INFO)
        self._session = session
        self._member = member

    def emit(self, record: logging.LogRecord) -> None:
        kind = "Warned" if record.levelno >= logging.WARNING else "Progress"
        _tell(self._session, self._member, " ".join(record.getMessage().split()), kind)


def _tell(session: Session, member: int, text: str, kind: str = "Progress") -> None:
    """Print a line, or an event in JSON, of this process."""
    if session.as_json:
        event: dict[str, Any] = {"event": kind, "message": text}
        session.note(json_text(event | ({"process": member} if member else {})))
    else:
        session.note(f"broker[{member}]: {text}" if member else f"broker: {text}")


# -- the graph ---------------------------------------------------------------------------------------------


@command(app, "describe", connect=False)
async def describe(
    session: Session,
    group: GroupCode,
    *,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Draw it as a Mermaid flowchart.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show topics, tables, windows, timers and policies of a group."""
    found = load_object(group, Group, "shop.clicks:group")
    if as_json:
        session.answer(_group_json(found), "")
    else:
        print_lines(found.mermaid() if mermaid else found.describe())


def _group_json(group: Group) -> dict[str, Any]:
    return {
        "group": group.name,
        "table": group.table,
        "loop": None if group.loop is None else group.loop_topic,
        "inputs": [topic for edge in group.inputs for topic in edge.topics],
        "joins": [join.table for join in group.joins],
        "lookups": [lookup.table for lookup in group.lookups],
        "outputs": [output.topic for output in group.outputs],
        "windows": [window.name for window in group.windows],
        "timers": [timer.name for timer in group.timers],
        "visitors": [visitor.name for visitor in group.visitors],
        "partitioner": group.fingerprint()["partitioner"],
        "order": group.order,
        "mermaid": group.mermaid(),
    }


# -- tables ------------------------------------------------------------------------------------------------


@command(table_app, "get")
async def get(
    session: Session,
    table: KnownTopic,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key of the row.", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the row of a key.

    The log of the table is read, without a copy on disk.
    """
    wire = keys.encode(key)
    with _known_table(table):
        value = None if keys.is_reserved(wire) else await _find_row(session, table, wire)
    if value is None:
        raise Failure(
            f"Table {table!r} has no row {key!r}",
            advice=f"List rows with `broker streams table items {table}`",
            code=Exit.NOT_FOUND,
        )
    session.answer(_row_json(wire, value), printable(value))


@command(table_app, "items")
async def items(
    session: Session,
    table: KnownTopic,
    *,
    prefix: Prefix = "",
    start: StartKey = None,
    stop: StopKey = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", metavar="COUNT", min=1, help="At most so many rows.", show_default=False),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten values.")] = False,
    as_json: AsJson = False,
) -> None:
    """List rows in the order of their keys.

    The log of the table is read into memory.
    """
    async with _viewing(session, table) as view:
        rows = islice(view.items(prefix=prefix, start=start, stop=stop), limit)
        if as_json:
            await _write_rows(session, rows)
        else:
            width = None if full else _CUT
            shown = [(printable(keys.encode(key)), printable(value, width)) for key, value in rows]
            if not show_table(("KEY", "VALUE"), shown):
                session.note(f"Table {table!r} has no such rows")


@command(table_app, "export")
async def export(session: Session, table: KnownTopic, *, as_json: AsJson = False) -> None:
    """Write all rows as lines of JSON, in the order of their keys.

    A line has `key` and `value`: the value itself if it is JSON, otherwise `value_base64`; a key that is not UTF-8 is
    in `key_base64`.
    """
    async with _viewing(session, table) as view:
        count = await _write_rows(session, view.items())
    if session.interactive and not as_json:
        session.note(counted(count, "row"))


@contextmanager
def _known_table(table: str) -> Generator[None]:
    """Say of a missing table who creates it: a topic that was created by hand would be an empty table, or none."""
    try:
        yield
    except TopicNotFound as error:
        group = table.removesuffix(table_of(""))
        who = "A group" if group in ("", table) else f"Group {group!r}"
        raise TopicNotFound(
            f"Table {table!r} does not exist",
            native=error,
            advice=f"Check the name: `broker topics list`. {who} creates its table when it first runs",
        ) from error


@asynccontextmanager
async def _viewing(session: Session, table: str) -> AsyncGenerator[View[bytes]]:
    """A view that is ready."""
    async with AsyncExitStack() as stack:
        with _known_table(table):
            view = await stack.enter_async_context(View(session.bus, table, Bytes()))
        with counter(f"Reading {table}", shown=session.interactive) as show:
            ready = asyncio.ensure_future(view.ready())
            try:
                while not (await asyncio.wait((ready,), timeout=_LOOK_SECONDS))[0]:
                    show(view.stats().read)
                ready.result()
            finally:
                ready.cancel()
        yield view


async def _find_row(session: Session, table: str, key: bytes) -> bytes | None:
    """The last value of a key. The partition in which the broker would put it is read first."""
    bus = session.bus
    partitions = await bus.log.partitions(table)
    home = None
    with suppress(Unsupported):
        home = await bus.partition_of(table, key)
    for partition in sorted(partitions, key=lambda number: (number != home, number)):
        found: bytes | None = None
        async for batch in bus.log.read(table, partition):
            for each, data in batch.rows("key", "data"):
                if each == key:
                    found = data
        if found is not None:
            return found
    return None


async def _write_rows(session: Session, rows: Iterator[tuple[str, bytes]]) -> int:
    """Write rows as lines of JSON; return their number."""
    count = 0
    while chunk := list(islice(rows, _LINES)):
        await session.out.write(b"".join(json_line(_row_json(keys.encode(key), value)) for key, value in chunk))
        count += len(chunk)
    return count


def _row_json(key: bytes, value: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = bytes_field("key", key)
    try:
        # What JSON does not have would not be JSON in the output either.
        fields["value"] = json.loads(value.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        fields["value_base64"] = b64encode(value).decode()
    return fields


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


# -- visits ------------------------------------------------------------------------------------------------


@command(app, "visit")
async def visit(
    session: Session,
    group: GroupCode,
    visitor: Annotated[str, typer.Argument(metavar="VISITOR", help="Name of the visitor.", show_default=False)],
    *,
    meta: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="The second argument of the visitor; by default None.", show_default=False),
    ] = None,
    state_dir: StateDir = None,
    store: StoreOption = StoreKind.LMDB,
    guarantee: GuaranteeOption = None,
    as_json: AsJson = False,
) -> None:
    """Call a visitor for every row of a group that does not run.

    A visit happens in the processors that have the rows, and no message reaches them from here. So this command joins
    the group as a member of its own, visits, and leaves; it handles no messages. Stop the other members first: while
    one of them keeps a partition nothing is visited. In a program that runs, call `processor.visit`.
    """
    found = load_object(group, Group, "shop.clicks:group")
    value = _parse_meta(meta)
    processor = Processor(session.bus, found, state_dir=state_dir, store=store.factory(), guarantee=guarantee)
    # Asked before the group is joined.
    known = [each.name for each in found.visitors]
    if visitor not in known:
        raise Failure(
            f"Group {found.name!r} has no Visitor {visitor!r}",
            advice=f"It has {', '.join(map(repr, known)) or 'none'}",
            code=Exit.USAGE,
        )
    processor.pause()
    with _progress(session):
        async with processor:
            await _wait_for_all(session, processor)
            count = await processor.visit(visitor, value)
    session.answer(
        {"group": found.name, "visitor": visitor, "visited": count},
        f"Visited {counted(count, 'row')} of group {found.name!r}",
    )


async def _wait_for_all(session: Session, processor: Processor) -> None:
    """Wait until a processor has all partitions of its group, and they are recovered.

    :raises Failure: other members keep some.
    """
    wanted = set(await session.bus.log.partitions(processor.group.table))
    with suppress(TimeoutError):
        async with asyncio.timeout(_JOIN_SECONDS):
            # No event tells of partitions.
            while wanted - processor.partitions.keys() and processor.state is not ProcessorState.STOPPED:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)
    if processor.state is ProcessorState.STOPPED:
        # Raises why.
        await processor.ready()
    if missing := wanted - processor.partitions.keys():
        raise Failure(
            f"Partitions {', '.join(map(str, sorted(missing)))} of group {processor.group.name!r} belong to other "
            "members, so nothing was visited",
            advice="Stop these members, or call processor.visit in them",
        )
    await processor.ready()


def _parse_meta(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise Failure(
            f"--meta is not JSON: {error}", advice='Write it like 3, "text" or {"a": 1}', code=Exit.USAGE
        ) from None


# -- positions ---------------------------------------------------------------------------------------------


@command(app, "lag")
async def show_lag(session: Session, group: GroupName, *, as_json: AsJson = False) -> None:
    """Show how far a group is behind, by its last checkpoints."""
    stored, _ = await _stored(session, group)
    found = await lag(session.bus, stored)
    session.table(
        [
            {
                "group": stored.name,
                "topic": each.topic,
                "partition": each.partition,
                "position": each.position,
                "end": each.end,
                "behind": each.records,
            }
            for each in found
        ],
        ("PARTITION", "POSITION", "END", "BEHIND"),
        [(f"{escaped(each.topic)}[{each.partition}]", each.position, each.end, each.records) for each in found],
        empty=f"Group {stored.name!r} has no checkpoint",
    )


@command(app, "reset")
async def reset(
    session: Session,
    group: GroupName,
    *,
    to: Annotated[ResetTo, typer.Option(help="Where the inputs go on; a loop goes on at its end.")] = "earliest",
    table: Annotated[
        bool, typer.Option("--table", help="Also delete all rows of the table, timers and windows included.")
    ] = False,
    state_dir: StateDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; do nothing.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Start a group over: move its positions, delete its stores on this machine and, with --table, its rows.

    Refused while the group has members. Stores on other machines follow the table by themselves. Without --table the
    rows stay, and messages that are handled again change them again.
    """
    stored, code = await _stored(session, group)
    progress = session.note if session.interactive else _quiet
    work = Reset(session.bus, stored, to=to, rows=table, state_dir=state_dir, group=code, progress=progress)
    async with work:
        if not as_json:
            show_table(("WHAT", "NOW", "AFTER"), _planned(work, stored, table))
        deleted = 0
        if not dry_run:
            await session.confirm(f"Reset group {stored.name!r}?", yes)
            deleted = await work.run()
            if to == "earliest" and session.bus.capabilities.publish.deduplication:
                session.note(
                    "broker: this broker drops messages with the ids of recent ones; let its deduplication window pass "
                    "before the group runs, or outputs and messages of its loop that repeat are lost"
                )
        value: dict[str, Any] = {
            "group": stored.name,
            "to": to,
            "positions": [asdict(move) for move in work.moves],
            "stores": [str(store.path) for store in work.stores],
            "table": stored.table,
            "rows_deleted": deleted,
            "dry_run": dry_run,
        }
        rows = f", {counted(deleted, 'row')} deleted" if table else ""
        session.answer(value, "Nothing was changed" if dry_run else f"Reset group {stored.name!r} to {to}{rows}")


def _planned(work: Reset, stored: StoredGroup, table: bool) -> Iterator[tuple[object, ...]]:
    for move in work.moves:
        yield f"{escaped(move.topic)}[{move.partition}]", move.before, move.after
    for store in work.stores:
        yield str(store.path), counted(store.size, "byte"), "deleted"
    if table:
        yield f"rows of {escaped(stored.table)}", None, "deleted"


def _quiet(line: str) -> None: ...


async def _stored(session: Session, text: str) -> tuple[StoredGroup, Group | None]:
    """What the broker has of a group, and its code if that was named."""
    code = load_object(text, Group, "shop.clicks:group") if ":" in text else None
    return await find_group(session.bus, text if code is None else code.name, code), code


# -- arguments ---------------------------------------------------------------------------------------------


def _parse_standby(text: str | None) -> Literal["all"] | tuple[int, ...] | None:
    if text is None or text == "all":
        return text
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise Failure(
            f"--standby is {text!r}", advice='It takes "all", or numbers of partitions such as 0,2', code=Exit.USAGE
        ) from None
