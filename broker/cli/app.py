"""The root command: global options, built-in commands and commands of other packages.

The module of a command is imported when the command runs or is listed: `broker topics` loads nothing else, and a broken
plug-in affects only its own command.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperGroup

from broker.cli.errors import Exit, Failure, error_line
from broker.cli.output import print_line, print_lines
from broker.cli.session import Config, Debug, Options, Url

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ENTRY_POINT_GROUP", "app", "run"]

ENTRY_POINT_GROUP: Final = "broker.cli"

BUILT_IN: Final = {
    "topics": "broker.cli.topics:app",
    "subscriptions": "broker.cli.subscriptions:app",
    "publish": "broker.cli.publish:app",
    "consume": "broker.cli.consume:app",
    "peek": "broker.cli.peek:app",
    "lag": "broker.cli.subscriptions:lag_app",
    "groups": "broker.cli.groups:app",
    "dead": "broker.cli.dead:app",
    "run": "broker.cli.run:app",
    "tracker": "broker.cli.queue:tracker_app",
    "queue": "broker.cli.queue:app",
    "pipeline": "broker.cli.pipeline:app",
    "streams": "broker_streams.command:app",
    "doctor": "broker.cli.doctor:app",
}
"""Commands, as MODULE:ATTRIBUTE."""


class _Commands(MutableMapping[str, Any]):
    """The commands by name, each imported when it is looked up."""

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
                module, _, attribute = BUILT_IN[name].partition(":")
                found = getattr(import_module(module), attribute)
            else:
                point = self._entry_points()[name]
                try:
                    found = point.load()
                except Exception as error:
                    raise Failure(
                        f"The command {name!r} of {point.value!r} cannot be loaded: {error}",
                        advice="Fix or uninstall its package",
                    ) from error
            loaded = typer.main.get_command(found)
            loaded.name = name
            self._loaded[name] = loaded
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
    """A group that loads its commands by name."""

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
                print_line(error_line(error), err=True)
            else:
                names.append(name)
        return names


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print_line(f"anybroker {version('anybroker')}")
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

    Name the broker with --url or the variable BROKER_URL, for instance nats://localhost:4222 or
    embedded:///var/lib/app.

    Exit codes: 0 done, 1 failed, 2 invalid usage or settings, 3 topic or subscription not found, 4 no connection,
    5 refused by the server, 6 not all published, 130 interrupted, 141 output closed, 143 terminated.
    """
    del version
    context.obj = Options(url, config, debug)


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; an error is one line on standard error."""
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
        print_line(error_line(error), err=True)
        return error.code
    except Exception as error:
        # A usage error; its class differs between the versions of typer.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        text = format_message()
        if not text:
            return Exit.USAGE
        if text.startswith("Usage:"):
            # Without arguments typer raises the help.
            print_lines(text, err=True)
            return Exit.USAGE
        path = getattr(getattr(error, "ctx", None), "command_path", "broker")
        stop = "" if text.endswith(("?", ".")) else "."
        print_line(f"broker: {text}{stop} See `{path} --help`", err=True)
        return Exit.USAGE
