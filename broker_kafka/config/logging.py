"""Where librdkafka's log lines go: the logger `broker.kafka`. Safe from any thread."""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["CLIENT_LOG"]


class _ClientLog:
    """What confluent-kafka takes for a logger.

    Every attempt to reconnect writes a line of its own; what matters of them is told by `bus.hooks`, so these are for
    debugging.
    """

    _NOISE: Final = frozenset({"CLOSE", "COORD", "ERROR", "FAIL", "GETPID", "MAXPOLL", "REQTMOUT", "TERMINATE"})

    _ONCE: Final = frozenset({"SHARECONSUMER"})
    """Each share consumer says that it is a preview, and one consumer of ours has several."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("broker.kafka")
        self._told: set[object] = set()

    def log(self, level: int, message: str, *values: object) -> None:
        facility = values[0] if values else ""
        self._logger.log(logging.DEBUG if facility in self._NOISE | self._told else level, message, *values)
        if facility in self._ONCE:
            self._told.add(facility)


CLIENT_LOG: Final = _ClientLog()
