"""Run a command beside a Pulsar standalone of its own: `python -m tests.servers.run_pulsar COMMAND [ARGUMENT ...]`.

The command gets the broker in BROKER_URL; its exit status is returned. The broker and its data end with it.
Without a command Pulsar is only fetched, and its classes are kept ready for the JVM, if they have not been.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.servers.kafka_jars import jars_of
from tests.servers.pulsar import POM, PulsarServer, archive_classes
from tests.servers.run_kafka import run_beside

__all__ = ["main"]


def main(command: Sequence[str]) -> int:
    return run_beside(PulsarServer, command, fetch=_fetch, about=__doc__)


def _fetch() -> None:
    jars_of(POM, "pulsar")
    archive_classes()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
