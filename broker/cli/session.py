"""`Session` and `command`: connection, signals, errors and global options of every command.

A command is an async function with a `Session`. Ctrl-C and SIGTERM cancel it, so that it can settle and close. An error
becomes one line on standard error and an exit code.
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
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate

import typer
from typing_extensions import ParamSpec

from broker.cli.errors import Exit, Failure, error_line, error_text, exit_code
from broker.cli.output import ask, json_text, log_to_stderr, print_line, print_lines, show_table
from broker.cli.streams import Sink, Source
from broker.hooks import Connected, Disconnected, Event, FetchFailed, LeasesNotRenewed, Warned, WritesFailed

if TYPE_CHECKING:
    from broker.bus import Bus
    from broker.driver.settings import BackendSettings

__all__ = ["AsJson", "Options", "Session", "command", "new_app"]

P = ParamSpec("P")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="URL of the broker, such as nats://localhost; by default the variable BROKER_URL.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file of settings, with a table for each URL scheme.",
        show_default=False,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Print log messages and tracebacks.")]


@dataclass(slots=True)
class Options:
    """The global options, which may stand before or after the command's name."""

    url: str | None = None
    config: Path | None = None
    debug: bool = False

    def settings(self) -> BackendSettings:
        """The settings from --config, --url or BROKER_URL.

        :raises ConfigurationError: the file or the URL is invalid.
        :raises Failure: no broker is named, or two are.
        """
        from broker.registry import load_backend
        from broker.urls import scheme_of

        url = (self.url or os.environ.get("BROKER_URL") or "").strip()
        if self.config is not None:
            scheme = scheme_of(url) if url else _only_table(self.config)
            if url.partition(":")[2]:
                raise Failure(
                    "Both a URL and --config name a broker",
                    advice=f"Give only the scheme with --config: --url {scheme}:",
                    code=Exit.USAGE,
                )
            return load_backend(scheme).settings_type.from_toml(self.config, table=scheme)
        if not url:
            raise Failure(
                "No broker is named",
                advice="Give --url, for instance --url embedded:, or set BROKER_URL",
                code=Exit.USAGE,
            )
        return load_backend(scheme_of(url)).settings_type.from_url(url)

    def source(self) -> str:
        """The origin of the settings, for people."""
        return f"--config {self.config}" if self.config else "--url" if self.url else "BROKER_URL"


def _only_table(path: Path) -> str:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failure(
            f"--config {str(path)!r} cannot be read: {error}", advice="Check its path and content", code=Exit.USAGE
        ) from None
    tables = [name for name, value in content.items() if isinstance(value, dict)]
    if not tables:
        raise Failure(
            f"--config {str(path)!r} has no table",
            advice="Put the settings into a table named after the URL scheme, such as [kafka]",
            code=Exit.USAGE,
        )
    if len(tables) > 1:
        raise Failure(
            f"--config {str(path)!r} has {len(tables)} tables",
            advice=f"Select one by its scheme: --url {tables[0]}:",
            code=Exit.USAGE,
        )
    return tables[0]


@dataclass(slots=True)
class Session:
    """A running command.

    :ivar as_json: whether to print JSON.
    :ivar code: the exit code if the command returns.
    :ivar serves: the command is a service, which SIGTERM ends in an orderly way: then the exit code is `code` too.
    :ivar shows_log: the command prints the log, so that events which are also logged are not printed.
    """

    options: Options
    as_json: bool = False
    code: int = Exit.DONE
    serves: bool = False
    shows_log: bool = False
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
        """Standard output in bytes, for lines that are escaped already; all else goes through `broker.cli.output`."""
        if self._out is None:
            self._out = Sink()
        return self._out

    @property
    def interactive(self) -> bool:
        """Whether standard error is a terminal, so that progress is drawn."""
        return sys.stderr.isatty() and not self.as_json

    def note(self, text: str) -> None:
        """Print a line on standard error; unprintable characters are escaped."""
        print_line(text, err=True)

    def answer(self, value: object, text: str) -> None:
        """Print the result: `value` as JSON for programs, `text` for people."""
        print_line(json_text(value) if self.as_json else text)

    def table(self, value: object, columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
        """Print the result: `value` as JSON for programs, a table for people, or `empty` without rows."""
        if self.as_json:
            print_line(json_text(value))
        elif not show_table(columns, rows):
            self.note(empty)

    def report(self, error: BaseException) -> None:
        """Print an error on standard error; the command continues."""
        self.note(error_line(error, as_json=self.as_json))

    async def confirm(self, question: str, yes: bool) -> None:
        """Ask before a change that cannot be undone.

        :raises Failure: the answer is not yes, or standard input is not a terminal.
        """
        if yes:
            return
        if not sys.stdin.isatty():
            raise Failure(
                "Standard input is not a terminal, so the command cannot ask for confirmation",
                advice="Give --yes",
                code=Exit.USAGE,
            )
        ask(f"{question} [y/N]")
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
            if self.serves and self._signal == signal.SIGTERM:
                return self.code
            return 128 + (self._signal or signal.SIGINT)
        except BrokenPipeError:
            # Otherwise the flush at the interpreter's exit would fail.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Exit.BROKEN_PIPE
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if self.options.debug:
                print_lines("".join(traceback.format_exception(error)).rstrip(), err=True)
            else:
                self.report(error)
            return exit_code(error)

    async def _guarded(self, body: Callable[[Session], Awaitable[object]], connect: bool) -> None:
        with self._signals():
            async with AsyncExitStack() as stack:
                if connect:
                    # Imported late, so that --help is fast.
                    from broker.bus import connect as open_bus

                    bus = open_bus(self.options.settings())
                    bus.hooks.listen(self._observe)
                    self._bus = await stack.enter_async_context(bus)
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
        # Not available outside the main thread, and on some platforms.
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
        """Print the events that matter to an operator."""
        if self.shows_log and not isinstance(event, Disconnected | Connected):
            return
        match event:
            case Disconnected():
                text = "the connection broke; reconnecting"
            case Connected(again=True):
                text = "reconnected"
            case FetchFailed(error=error):
                text = f"{error_text(error)}; retrying"
            case LeasesNotRenewed(messages=messages, error=error):
                text = f"{len(messages)} leases were not renewed: {error_text(error)}"
            case WritesFailed(error=error):
                text = error_text(error)
            case Warned(text=warning):
                text = warning
            case _:
                return
        kind = type(event).__name__
        self.note(json_text({"event": kind, "message": text}) if self.as_json else f"broker: {text}")


def _log(debug: bool) -> None:
    """Log only with --debug; errors are printed once, as a line."""
    if debug:
        log_to_stderr()
    elif not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())


def new_app(name: str, text: str | None = None) -> typer.Typer:
    """A typer app for one command, or for a group of commands with the description `text`."""
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
    """Decorate an async function as a command of a typer app. Its first parameter is the `Session`.

    Adds --url, --config and --debug. `session.bus` is open unless `connect` is false. `session.as_json` is the value of
    a parameter `as_json: AsJson`.
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
        # typer would read the type hints of the wrapped function.
        del call.__wrapped__
        app.command(name)(call)
        return function

    return declare
