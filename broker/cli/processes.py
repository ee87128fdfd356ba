"""Commands that run in several processes: how these are started and stopped, and what each of them listens at.

A process ends when the one that started it does, since it reads its standard input to the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from broker.cli.arguments import parse_address
from broker.cli.errors import Exit, Failure
from broker.cli.session import Session
from broker.cli.streams import Source
from broker.errors import Unsupported

__all__ = [
    "address_of",
    "as_arguments",
    "check_shared",
    "exit_status",
    "start_process",
    "stop_processes",
    "stop_with_parent",
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


async def stop_with_parent(stop: Callable[[], object]) -> None:
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
    """Whether a signal ended the process that nobody here has sent."""
    return child.returncode is not None and child.returncode < 0 and child.returncode != -signal.SIGTERM
