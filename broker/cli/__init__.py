"""The command `broker`, for every backend.

`main()` is the console script. It never raises: it prints an error as one line on standard error and returns an exit
code of `broker.cli.errors`. Only this package imports the libraries of the extra `cli`.

A package adds a command with an entry point of the group `broker.cli`: its name is the command, its object a
`typer.Typer`. `broker.cli.session.command` gives a function the options, the connection and the error handling of the
built-in commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]

NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. `arguments` are those after the program's name."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # A daemon may have closed it.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - it lives as long as the process
    for name in NEEDED:
        if find_spec(name) is None:
            sys.stderr.write(f"broker: The command line needs {name}. Run: pip install 'anybroker[cli]'\n")
            return 1
    from broker.cli.app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
