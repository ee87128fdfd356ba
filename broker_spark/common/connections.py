"""One open connection per process and URL, reused by later tasks, since Spark reuses its Python workers.

*Concurrency.* Any thread; a forked child opens its own connections. *Failure.* A connection that cannot be opened is
not kept. Connections close with their process.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import Final

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError
from broker_spark.runtime.workers import collect_less_often, leave_out_broken_pipes

__all__ = ["bus_of", "check_reachable"]

_lock: Final = Lock()
_open: Final[dict[tuple[int, str], Bus]] = {}


def bus_of(url: str) -> Bus:
    """The open connection of this process.

    :raises ConfigurationError: the URL is wrong, or other processes cannot reach the broker.
    :raises ConnectionFailed, AuthenticationFailed: the broker refuses.
    """
    place = (os.getpid(), url)
    with _lock:
        found = _open.get(place)
        if found is None:
            found = check_reachable(url)
            found.open()
            _open[place] = found
            collect_less_often()
            leave_out_broken_pipes()
        return found


def check_reachable(url: str) -> Bus:
    """The unopened connection, if other processes can reach the broker by its URL. No I/O.

    :raises ConfigurationError: the broker exists in this process only, or the URL is wrong.
    """
    bus = connect(url)
    if not bus.capabilities.shared:
        raise ConfigurationError(
            f"{bus.url!r} is a broker within one process, but Spark runs several processes",
            advice="Use embedded:///directory, with a directory that all of them see, or a server's URL",
        )
    return bus
