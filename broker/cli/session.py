"""What every command of the line shares: the connection, signals, errors and the options --url, --config and --debug.

A command is an async function of a `Session`. It runs in an event loop of its own; the first Ctrl-C or SIGTERM
cancels it, and it may still settle and close what it holds; its errors become one sentence and an exit code.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate

import typer
from typing_extensions import ParamSpec

from broker.cli.exits import Exit, Failure, exit_code, sentence
from broker.cli.rendering import json_text, show_table
from broker.cli.streams import Sink, Source
from broker.hooks import Connected, Disconnected, Event, FetchFailed, LeasesNotRenewed, Warned

if TYPE_CHECKING:
    from broker.bus import Bus
    from broker.driver.settings import BackendSettings

__all__ = ["AsJson", "Options", "Session", "command", "new_app"]

P = ParamSpec("P")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="The broker, such as nats://localhost; else BROKER_URL.", show_default=False
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="A TOML file with a table of settings per URL scheme.", show_default=False
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show log lines and tracebacks.")]


@dataclass(slots=True)
class Options:
    """The options that stand before or behind the command's name."""

    url: str | None = None
    config: Path | None = None
    debug: bool = False

    def settings(self) -> BackendSettings:
        """The settings to connect with: of --url, of BROKER_URL, or of the file given by --config.

        :raises ConfigurationError: the file or the URL cannot be used.
        :raises Failure: no broker is named, or two are.
        """
        from broker.registry import load_backend
        from broker.urls import scheme_of

        url = (self.url or os.environ.get("BROKER_URL") or "").strip()
        if self.config is not None:
            scheme = scheme_of(url) if url else _only_table(self.config)
            if url.partition(":")[2]:
                advice = f"Give only the scheme with it: --url {scheme}:"
                raise Failure("Both a URL and --config say how to connect", advice=advice, code=Exit.USAGE)
            return load_backend(scheme).settings_type.from_toml(self.config, table=scheme)
        if not url:
            raise Failure(
                "No broker is named", advice="Give --url, such as --url embedded:, or set BROKER_URL", code=Exit.USAGE
            )
        return load_backend(scheme_of(url)).settings_type.from_url(url)

    def source(self) -> str:
        """Where `settings` come from, for people."""
        return f"--config {self.config}" if self.config else "--url" if self.url else "BROKER_URL"


def _only_table(path: Path) -> str:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failure(f"--config {str(path)!r} cannot be read: {error}", code=Exit.USAGE) from None
    tables = [name for name, value in content.items() if isinstance(value, dict)]
    if not tables:
        raise Failure(
            f"--config {str(path)!r} has no table",
            advice="Put its settings into one with the scheme of a URL, such as [kafka]",
            code=Exit.USAGE,
        )
    if len(tables) > 1:
        raise Failure(
            f"--config {str(path)!r} has {len(tables)} tables",
            advice=f"Choose one with its scheme: --url {tables[0]}:",
            code=Exit.USAGE,
        )
    return tables[0]


@dataclass(slots=True)
class Session:
    """One run of a command.

    :ivar as_json: programs read the output.
    :ivar out: standard output by bytes; tables go through `rendering.show_table`.
    :ivar code: the exit code if the command ends by itself.
    """

    options: Options
    as_json: bool = False
    code: int = Exit.DONE
    _bus: Bus | None = None
    _out: Sink | None = None
    _signal: int | None = field(default=None, init=False)

    @property
    def bus(self) -> Bus:
        """The open connection.

        :raises RuntimeError: the command was declared with `connect=False`.
        """
        if self._bus is None:
            raise RuntimeError("This command was declared without a connection")
        return self._bus

    @property
    def out(self) -> Sink:
        if self._out is None:
            self._out = Sink()
        return self._out

    @property
    def interactive(self) -> bool:
        """Whether a person watches standard error, where progress is drawn."""
        return sys.stderr.isatty() and not self.as_json

    def note(self, text: str) -> None:
        """Say something to the person on standard error."""
        typer.echo(text, err=True)

    def answer(self, value: object, text: str) -> None:
        """Print the result: `value` as JSON for programs, `text` for people."""
        typer.echo(json_text(value) if self.as_json else text)

    def table(self, value: object, columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
        """Print the result: `value` as JSON for programs, a table for people; `empty` is said when it has no row."""
        if self.as_json:
            typer.echo(json_text(value))
        elif not show_table(columns, rows):
            self.note(empty)

    def report(self, error: BaseException) -> None:
        """Write an error as its one sentence, without ending the command."""
        self.note(sentence(error, as_json=self.as_json))

    async def confirm(self, question: str, yes: bool) -> None:
        """Ask before something that cannot be undone.

        :raises Failure: the answer is not yes, or nobody can be asked.
        """
        if yes:
            return
        if not sys.stdin.isatty():
            raise Failure(
                "This cannot be undone, and nobody is there to confirm it", advice="Give --yes", code=Exit.USAGE
            )
        typer.echo(f"{question} [y/N] ", nl=False, err=True)
        answer = (await Source().read()).strip().lower()
        if answer not in {b"y", b"yes"}:
            raise Failure("Nothing was changed")

    def run(self, body: Callable[[Session], Awaitable[object]], *, connect: bool) -> int:
        """Run the command to its end and return the exit code."""
        _log(self.options.debug)
        try:
            with asyncio.Runner() as runner:
                runner.run(self._guarded(body, connect))
            return self.code
        except (asyncio.CancelledError, KeyboardInterrupt):
            return 128 + (self._signal or signal.SIGINT)
        except BrokenPipeError:
            # What Python still has to flush at its end goes nowhere, instead of failing there.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Exit.BROKEN_PIPE
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if self.options.debug:
                raise
            self.report(error)
            return exit_code(error)

    async def _guarded(self, body: Callable[[Session], Awaitable[object]], connect: bool) -> None:
        with self._signals():
            async with AsyncExitStack() as stack:
                if connect:
                    # Imported here, so that --help and completion stay quick.
                    from broker.bus import connect as open_bus

                    bus = await stack.enter_async_context(open_bus(self.options.settings()))
                    bus.hooks.listen(self._observe)
                    self._bus = bus
                await body(self)

    @contextmanager
    def _signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def stop(number: int) -> None:
            self._signal = number
            if task is not None:
                task.cancel()

        numbers = (signal.SIGINT, signal.SIGTERM)
        # Outside the main thread, or where the platform has no such thing, the caller handles signals.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            for number in numbers:
                loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                for number in numbers:
                    loop.remove_signal_handler(number)

    def _observe(self, event: Event) -> None:
        """Tell what an operator should know while a command goes on."""
        match event:
            case Disconnected():
                text = "the connection broke; reconnecting"
            case Connected(again=True):
                text = "connected again"
            case FetchFailed(error=error):
                text = f"{error}; trying again"
            case LeasesNotRenewed(messages=messages, error=error):
                text = f"{len(messages)} leases were not renewed: {error}"
            case Warned(text=warning):
                text = warning
            case _:
                return
        kind = type(event).__name__
        self.note(json_text({"event": kind, "message": text}) if self.as_json else f"broker: {text}")


def _log(debug: bool) -> None:
    """Log lines only when asked for: errors are told once, in a sentence."""
    root = logging.getLogger()
    if debug:
        logging.basicConfig(
            level=logging.DEBUG, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
    elif not root.handlers:
        root.addHandler(logging.NullHandler())


def new_app(name: str, text: str | None = None) -> typer.Typer:
    """An app for one command, or for a group of them that `text` describes."""
    return typer.Typer(
        name=name,
        help=text,
        no_args_is_help=text is not None,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def command(
    app: typer.Typer, name: str, *, connect: bool = True
) -> Callable[
    [Callable[Concatenate[Session, P], Awaitable[object]]], Callable[Concatenate[Session, P], Awaitable[object]]
]:
    """Declare an async function as a command of a typer app; its first parameter is the Session, the rest are typer's.

    It gets --url, --config and --debug, an open connection unless `connect` is false, and `session.as_json` from a
    parameter `as_json: AsJson`.
    """

    def declare(
        function: Callable[Concatenate[Session, P], Awaitable[object]],
    ) -> Callable[Concatenate[Session, P], Awaitable[object]]:
        signature = inspect.signature(function, eval_str=True)
        _, *parameters = signature.parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter("url", keyword, default=None, annotation=Url),
            inspect.Parameter("config", keyword, default=None, annotation=Config),
            inspect.Parameter("debug", keyword, default=False, annotation=Debug),
        ]
        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

        @functools.wraps(function)
        def call(context: typer.Context, **values: Any) -> None:
            given = context.obj if isinstance(context.obj, Options) else Options()
            options = Options(
                url=values.pop("url") or given.url,
                config=values.pop("config") or given.config,
                debug=values.pop("debug") or given.debug,
            )
            session = Session(options, as_json=bool(values.get("as_json")))
            code = session.run(lambda session: function(session, **values), connect=connect)  # pyright: ignore[reportCallIssue]
            raise typer.Exit(code)

        shown = [parameter.replace(kind=keyword) for parameter in parameters]
        call.__signature__ = inspect.Signature([context, *shown, *added])  # pyright: ignore[reportAttributeAccessIssue]
        call.__annotations__ = {p.name: p.annotation for p in (context, *shown, *added)}
        # Type hints are taken from what is wrapped where there is such a thing.
        del call.__wrapped__
        app.command(name)(call)
        return function

    return declare
