"""Run a command beside a Kafka broker of its own: `python -m tests.servers.run_kafka COMMAND [ARGUMENT ...]`.

The command gets the broker in BROKER_URL; its exit status is returned. The broker and its data end with it.
Without a command Kafka is only fetched, if it is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from tests.servers.kafka import KafkaServer
from tests.servers.kafka_jars import distribution

__all__ = ["main", "run_beside", "run_with", "unfit"]


class _Server(Protocol):
    """One that a URL names; entering it starts it, and closes it where that fails."""

    @property
    def url(self) -> str: ...

    def __enter__(self) -> object: ...

    def close(self) -> None: ...


def main(command: Sequence[str]) -> int:
    return run_beside(KafkaServer, command, fetch=distribution, about=__doc__)


def run_beside(
    make: Callable[[], _Server], command: Sequence[str], *, fetch: Callable[[], object], about: str | None
) -> int:
    """Fetch a server and run the command with it; return its exit status, or 1 if the server is unavailable.

    :param about: what --help prints.
    """
    if (status := unfit(command, about)) is not None:
        return status
    try:
        fetch()
        if not command:
            return 0
        server = make()
        server.__enter__()
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        return run_with(command, server.url)
    finally:
        server.close()


def unfit(command: Sequence[str], about: str | None) -> int | None:
    """Print the help, or that there is no such command, and return the exit status; None for a command to run."""
    if not command:
        return None
    if command[0] in {"-h", "--help"}:
        sys.stdout.write(about or "")
        return 0
    if shutil.which(command[0]) is None:
        sys.stderr.write(f"There is no command {command[0]!r}; --help says how to name one\n")
        return 127
    return None


def run_with(command: Sequence[str], url: str) -> int:
    """Run the command with BROKER_URL set; return its exit status."""
    with subprocess.Popen(list(command), env={**os.environ, "BROKER_URL": url}) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the terminal signals the command too, which needs the broker to end well


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
