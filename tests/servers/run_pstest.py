"""Run a command beside Google's pstest: `python -m tests.servers.run_pstest COMMAND [ARGUMENT ...]`.

The command finds the server in BROKER_URL, and its exit status is ours. Without a command the program is only built, if
it has not been; where it cannot be had that is said, and is no failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.servers.go_program import Missing
from tests.servers.pstest import PROGRAM, make_server
from tests.servers.run_kafka import run_beside

__all__ = ["main"]


def main(command: Sequence[str]) -> int:
    try:
        return run_beside(make_server, command, fetch=PROGRAM.path, about=__doc__)
    except Missing as error:
        sys.stderr.write(f"{error}\n")
        return 1 if command else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
