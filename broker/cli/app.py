"""The root of the command line: options, built-in commands and those of other packages, loaded when named.

A command's module is imported when the command is used or listed, so that `broker topics` pays for nothing else,
and a broken plug-in spoils its own command only.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperGroup

from broker.cli.exits import Exit, Failure, sentence
from broker.cli.session import Config, Debug, Options, Url

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ENTRY_POINT_GROUP", "app", "run"]

ENTRY_POINT_GROUP: Final = "broker.cli"

BUILT_IN: Final = (
    "topics",
    "subscriptions",
    "publish",
    "consume",
    "peek",
    "lag",
    "groups",
    "dead",
    "tracker",
    "queue",
    "pipeline",
    "doctor",
)
"""Each is `app` of the module `broker.cli.NAME`."""


class _Commands(MutableMapping[str, Any]):
    """The commands by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._plugins: dict[str, EntryPoint] | None = None

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            from importlib.metadata import entry_points

            self._plugins = {
                point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in BUILT_IN
            }
        return self._plugins

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name in BUILT_IN:
                found = import_module(f"broker.cli.{name}").app
            else:
                point = self._entry_points()[name]
                try:
                    found = point.load()
                except Exception as error:
                    raise Failure(f"The command {name!r} of {point.value!r} cannot be loaded: {error}") from error
            made = typer.main.get_command(found)
            made.name = name
            self._loaded[name] = made
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        yield from BUILT_IN
        yield from sorted(self._entry_points())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in BUILT_IN or name in self._loaded or name in self._entry_points()


class _LazyGroup(TyperGroup):
    """A group whose commands are loaded by name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        names: list[str] = []
        for name in self.commands:
            try:
                self.commands[name]
            except Failure as error:
                typer.echo(sentence(error), err=True)
            else:
                names.append(name)
        return names


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"anybroker {version('anybroker')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    url: Url = None,
    config: Config = None,
    debug: Debug = False,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Work with the topics and messages of any broker.

    The broker is named by --url or the variable BROKER_URL, such as nats://localhost:4222 or embedded:///var/lib/app.

    Exit codes: 0 done, 1 failed, 2 usage or settings, 3 no such topic or subscription, 4 no connection,
    5 refused, 6 not all was published, 130 interrupted, 141 the reader of the output went away, 143 terminated.
    """
    del version
    context.obj = Options(url, config, debug)


def run(arguments: list[str]) -> int:
    """Run the command line; every error is one sentence on standard error."""
    try:
        code = app(arguments, prog_name="broker", standalone_mode=False)
        return code if isinstance(code, int) else Exit.DONE
    except typer.Exit as end:
        return end.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except BrokenPipeError:
        return Exit.BROKEN_PIPE
    except Failure as error:
        typer.echo(sentence(error), err=True)
        return error.code
    except Exception as error:
        # What the parser of the command line raises; its class differs between the versions of typer.
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        text = explain()
        if not text:
            return Exit.USAGE
        if text.startswith("Usage:"):
            # No argument at all: the help is the answer.
            typer.echo(text, err=True)
            return Exit.USAGE
        path = getattr(getattr(error, "ctx", None), "command_path", "broker")
        stop = "" if text.endswith(("?", ".")) else "."
        typer.echo(f"broker: {text}{stop} See `{path} --help`", err=True)
        return Exit.USAGE
