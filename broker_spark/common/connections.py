"""One connection per process and URL, kept for the next task, since Spark keeps its Python workers.

*Concurrency.* Any thread. A forked child opens its own. *Failure.* One that cannot be opened is not kept. Connections
close with their process.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import Final

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError
from broker_spark.runtime.workers import collect_less_often

__all__ = ["bus_of", "check_reachable"]

_lock: Final = Lock()
_open: Final[dict[tuple[int, str], Bus]] = {}


def bus_of(url: str) -> Bus:
    """An open connection, this process's own.

    :raises ConfigurationError: the URL is wrong, or no other process would reach the same broker.
    :raises ConnectionFailed, AuthenticationFailed: the broker does not take us.
    """
    place = (os.getpid(), url)
    with _lock:
        found = _open.get(place)
        if found is None:
            found = check_reachable(url)
            found.open()
            _open[place] = found
            collect_less_often()
        return found


def check_reachable(url: str) -> Bus:
    """The unopened connection, if other processes reach the same broker by its URL. No I/O.

    :raises ConfigurationError: it is a broker of this process only, or the URL is wrong.
    """
    bus = connect(url)
    if not bus.capabilities.shared:
        raise ConfigurationError(
            f"{bus.url!r} is a broker within one process, and Spark runs several",
            advice="Use embedded:///directory, with a directory that all of them see, or a server's URL",
        )
    return bus
