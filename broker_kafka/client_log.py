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

    def __init__(self) -> None:
        self._logger = logging.getLogger("broker.kafka")

    def log(self, level: int, message: str, *values: object) -> None:
        facility = values[0] if values else ""
        self._logger.log(logging.DEBUG if facility in self._NOISE else level, message, *values)


CLIENT_LOG: Final = _ClientLog()
