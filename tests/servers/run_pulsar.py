"""Run a command beside a Pulsar standalone of its own: `python -m tests.servers.run_pulsar COMMAND [ARGUMENT ...]`.

The command finds the broker in BROKER_URL, and its exit status is ours; the broker and its data are gone when it ends.
Without a command Pulsar is only fetched, if it has not been.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.servers.kafka_jars import jars_of
from tests.servers.pulsar import POM, PulsarServer
from tests.servers.run_kafka import run_with

__all__ = ["main"]


def main(command: Sequence[str]) -> int:
    try:
        jars_of(POM, "pulsar")
        if not command:
            return 0
        server = PulsarServer().start()
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        return run_with(command, server.url)
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
