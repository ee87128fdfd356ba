"""What services of the command line share: the drain at an interrupt, probes, and several processes.

A process of several ends when the one that started it does, since it reads its standard input to the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from broker.cli.arguments import parse_address
from broker.cli.errors import Exit, Failure
from broker.cli.session import Session
from broker.cli.streams import Source
from broker.errors import Unsupported
from broker.metrics import Metrics
from broker.probes import Page, ProbeServer, probe

__all__ = [
    "address_of",
    "as_arguments",
    "check_shared",
    "exit_status",
    "run_until_interrupted",
    "serving_probes",
    "start_process",
    "stop_processes",
    "was_killed",
]

_LAST_PORT: Final = 65_535
_CHILD: Final = "import sys; from broker.cli import main; sys.exit(main())"


def check_shared(session: Session) -> None:
    """:raises Unsupported: each process would have a broker of its own."""
    capabilities = session.bus.capabilities
    if not capabilities.shared:
        raise Unsupported(
            f"{capabilities.backend} cannot be shared by processes", advice="Run one process, or name another broker"
        )


def address_of(text: str, member: int, processes: int) -> tuple[str, int]:
    """Where a process listens: the first of several at the port that is given, and so on.

    :raises Failure: the text is no address, or there are too few ports.
    """
    host, port = parse_address(text)
    if port and port + processes - 1 > _LAST_PORT:
        raise Failure(
            f"--listen is {text!r}, and there are {processes} processes",
            advice=f"Each takes the next port, up to {_LAST_PORT}: give a lower one",
            code=Exit.USAGE,
        )
    return host, port + member - 1 if port and member else port


async def start_process(session: Session, command: Sequence[str], arguments: Sequence[str]) -> Process:
    """Start a command of this program. Ctrl-C in a terminal does not reach the process, so that it gets one signal."""
    environment = dict(os.environ)
    if session.options.url is not None:
        # Not as an argument: others may see those.
        environment["BROKER_URL"] = session.options.url
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD, *command, *arguments), stdin=PIPE, env=environment, start_new_session=True
    )


async def stop_processes(children: Sequence[Process]) -> None:
    """Ask processes to stop and wait for them; an interrupt kills them."""
    for child in children:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.terminate()
    try:
        await asyncio.gather(*(child.wait() for child in children))
    except asyncio.CancelledError:
        for child in children:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
        await asyncio.gather(*(child.wait() for child in children))
        raise


async def run_until_interrupted(
    session: Session, work: Coroutine[Any, Any, object], stop: Callable[[], object], *, note: str, of_several: bool
) -> None:
    """Run until the work ends. An interrupt calls `stop` and waits for the end; a second one cancels the work.

    :param note: printed at the first interrupt.
    :param of_several: a process that a supervisor may signal beside its parent: it stops once, and when the parent is
        gone.
    """
    task = asyncio.ensure_future(work)
    orphaned = asyncio.ensure_future(_stop_with_parent(stop)) if of_several else None
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        if not of_several:
            session.note(note)
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                if not of_several:
                    session.serves = False
                    task.cancel()
        if not task.cancelled():
            task.result()
        raise
    finally:
        if orphaned is not None:
            orphaned.cancel()


@asynccontextmanager
async def serving_probes(
    session: Session, address: tuple[str, int] | None, trouble: Callable[[], str], tell: Callable[[str], object]
) -> AsyncGenerator[None]:
    """Serve `/live`, `/ready` and `/metrics` while the block runs, if there is an address.

    :param trouble: returns why the service is not ready; empty if it is.
    :param tell: called with a line that has the address.
    """
    if address is None:
        yield
        return
    metrics = Metrics(session.bus)
    pages: dict[str, Page] = {
        # The answer says that the event loop is not blocked. A restart helps against nothing else.
        "/live": probe(lambda: ""),
        "/ready": probe(trouble),
        "/metrics": lambda: (200, metrics.text()),
    }
    try:
        async with ProbeServer(*address, pages) as server:
            tell(f"Probes and metrics are at {server.url}")
            yield
    finally:
        metrics.close()


async def _stop_with_parent(stop: Callable[[], object]) -> None:
    """Call `stop` when the process that started this one is gone: it holds the other end of standard input."""
    while await Source().read():
        pass
    stop()


def exit_status(child: Process) -> int:
    """The exit code of a process, as a shell tells it."""
    code = child.returncode or 0
    return code if code >= 0 else 128 - code


def as_arguments(options: Mapping[str, Any]) -> Iterator[str]:
    """Options of a command line, without those that are None or False."""
    for option, value in options.items():
        if value is True:
            yield option
        elif value is not None and value is not False:
            yield from (option, str(value))


def was_killed(child: Process) -> bool:
    """Whether a signal other than SIGTERM ended the process."""
    return child.returncode is not None and child.returncode < 0 and child.returncode != -signal.SIGTERM
