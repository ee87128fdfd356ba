"""Run a command beside a double of Service Bus: `python -m tests.servers.servicebus.serve [COMMAND [ARGUMENT ...]]`.

The command finds the double in BROKER_URL, and its exit status is ours; the double and its messages are gone when it
ends. Without a command the double runs until it is interrupted, and its URL is printed.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence

from tests.servers.run_kafka import run_with, unfit
from tests.servers.servicebus.double import ServiceBusDouble, missing
from tests.servers.servicebus.limits import SHORTEST_LOCK

__all__ = ["main"]


def main(command: Sequence[str]) -> int:
    if (status := unfit(command, __doc__)) is not None:
        return status
    if (reason := missing()) is not None:
        sys.stderr.write(f"{reason}\n")
        return 1
    with ServiceBusDouble(shortest_lock=SHORTEST_LOCK) as double:
        if command:
            return run_with(command, double.url)
        sys.stdout.write(f"A test double of Azure Service Bus, until Ctrl-C:\n{double.url}\n")
        sys.stdout.flush()
        _wait()
    return 0


def _wait() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
