"""Run a command beside Google's Pub/Sub emulator: `python -m tests.servers.run_pubsub COMMAND [ARGUMENT ...]`.

The command finds the emulator in BROKER_URL, and its exit status is ours; the emulator and what it holds are gone when
it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.servers.pubsub import PubSubServer
from tests.servers.run_kafka import run_beside

__all__ = ["main"]


def main(command: Sequence[str]) -> int:
    if not command:
        sys.stderr.write("Name a command to run\n")
        return 2
    return run_beside(PubSubServer, command, fetch=lambda: None, about=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
