"""The command `broker`: topics, publish, consume, peek, lag, dead letters and a doctor for any backend.

`main()` is the console script. It never raises: an error is one sentence on standard error and an exit code of
`broker.cli.exits`. The libraries of the extra `cli` are imported here and nowhere else in `broker`.

Another package adds a command by an entry point of the group `broker.cli`, whose name is the command and whose
object is a `typer.Typer` with one command or several. `command` and `Session` of `broker.cli.session` give it
the options, the connection and the errors of the built-in ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]

NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `arguments` are those after the program's name."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # A daemon may have closed them; what nobody can read is written to nobody.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - it lives as long as the process
    for name in NEEDED:
        if find_spec(name) is None:
            sys.stderr.write(f"broker: the command line needs {name}: pip install 'anybroker[cli]'\n")
            return 1
    from broker.cli.app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
