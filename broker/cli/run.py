"""`broker run`: runs an app, in one process or several workers, with probes.

SIGTERM or Ctrl-C: the app takes no more messages, is not ready any more, and ends after its running handlers, with exit
code 0 or 130. A second one ends it at once. A worker that is killed is started again; one that fails ends all.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from broker.cli.errors import Exit
from broker.cli.loading import load_object
from broker.cli.output import logged_to_stderr
from broker.cli.processes import (
    address_of,
    as_arguments,
    check_shared,
    exit_status,
    run_until_interrupted,
    serving_probes,
    start_process,
    stop_processes,
    was_killed,
)
from broker.cli.session import AsJson, Session, command, new_app
from broker.driver.concurrency import Backoff

if TYPE_CHECKING:
    from broker.app import App, Running

__all__ = ["app"]

app = new_app("run")

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0


@command(app, "run")
async def run(
    session: Session,
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="An App, or a function that returns one.", show_default=False)
    ],
    *,
    workers: Annotated[
        int,
        typer.Option("--workers", metavar="COUNT", min=1, help="Run so many processes, which share the messages."),
    ] = 1,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve /live, /ready and /metrics at this address; port 0 is any free one. Of several workers, each "
            "takes the next port.",
        ),
    ] = None,
    member: Annotated[int, typer.Option(hidden=True, help="The number of a worker among several.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run an app.

    It runs until it is interrupted, fails, or all of its consumers are idle.
    """
    from broker.app import App

    found = load_object(target, App, "shop.billing:app")
    address = None if listen is None else address_of(listen, member, workers)
    session.serves = True
    if workers > 1:
        check_shared(session)
        options: dict[str, Any] = {
            "--listen": listen,
            "--workers": 1,
            "--json": as_json,
            "--debug": session.options.debug,
            "--config": session.options.config,
        }
        await _run_workers(session, [target, *as_arguments(options)], workers)
        return
    with ExitStack() as stack:
        if not session.options.debug:
            session.shows_log = stack.enter_context(logged_to_stderr(logging.WARNING))
        await _run_app(session, found, address, member)


async def _run_app(session: Session, app: App[Any], address: tuple[str, int] | None, member: int) -> None:
    """Run until an interrupt, then drain; a second interrupt does not wait for running handlers."""
    running: Running | None = None
    stopping = False

    def trouble() -> str:
        if stopping:
            return f"app {app.name} stops"
        return f"app {app.name} starts" if running is None else running.trouble

    async def work() -> None:
        nonlocal running
        async with app.running(session.bus) as opened:
            running = opened
            if stopping:
                opened.stop()
            await opened.wait()

    def stop() -> None:
        nonlocal stopping
        stopping = True
        if running is not None:
            running.stop()

    def tell(text: str) -> None:
        session.note(f"worker {member}: {text}" if member else text)

    async with serving_probes(session, address, trouble, tell):
        await run_until_interrupted(
            session,
            work(),
            stop,
            note=f"App {app.name} stops; interrupt again to stop now",
            of_several=member > 0,
        )


async def _run_workers(session: Session, arguments: Sequence[str], count: int) -> None:
    """Run workers until an interrupt, or until one fails or all are idle; start those again that were killed."""
    backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
    children: dict[int, Process] = {}

    async def start(number: int) -> None:
        children[number] = await start_process(session, ("run",), [*arguments, "--member", str(number)])

    try:
        for number in range(1, count + 1):
            await start(number)
        waiting = {asyncio.ensure_future(child.wait()): number for number, child in children.items()}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                number = waiting.pop(ended)
                child = children[number]
                if was_killed(child):
                    delay = backoff.next()
                    name = signal.Signals(-(child.returncode or 0)).name
                    session.note(f"broker: worker {number} was ended by {name}; it starts again in {delay:.1f} s")
                    await asyncio.sleep(delay)
                    await start(number)
                    waiting[asyncio.ensure_future(children[number].wait())] = number
                elif (code := exit_status(child)) != Exit.DONE:
                    session.code = code
                    session.note(f"broker: worker {number} of {count} ended with {code}; the others stop")
                    return
    finally:
        await stop_processes(list(children.values()))
