"""Run a command beside a Kafka broker of its own: `python -m tests.servers.run_kafka COMMAND [ARGUMENT ...]`.

The command finds the broker in BROKER_URL, and its exit status is ours; the broker and its data are gone when it ends.
Without a command Kafka is only fetched, if it has not been.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.servers.kafka import KafkaServer
from tests.servers.kafka_jars import distribution

__all__ = ["main", "run_beside"]


def main(command: Sequence[str]) -> int:
    try:
        distribution()
        if not command:
            return 0
        server = KafkaServer().start()
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        return run_beside(command, server.url)
    finally:
        server.close()


def run_beside(command: Sequence[str], url: str) -> int:
    """Run the command with BROKER_URL; its exit status."""
    with subprocess.Popen(list(command), env={**os.environ, "BROKER_URL": url}) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the terminal told the command too, which needs the broker to end well


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
