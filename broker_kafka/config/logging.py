"""Sends librdkafka's log lines to the logger `broker.kafka`. Safe from any thread."""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["CLIENT_LOG"]


class _ClientLog:
    """The part of a logger that confluent-kafka uses."""

    _DEBUG_ONLY: Final = frozenset({"CLOSE", "COORD", "ERROR", "FAIL", "GETPID", "MAXPOLL", "REQTMOUT", "TERMINATE"})
    """One line for each attempt to reconnect; `bus.hooks` reports the connection."""

    _ONCE: Final = frozenset({"SHARECONSUMER"})
    """A line of each share consumer, of which a consumer has several: share groups are a preview."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("broker.kafka")
        self._logged: set[object] = set()

    def log(self, level: int, message: str, *values: object) -> None:
        facility = values[0] if values else ""
        self._logger.log(logging.DEBUG if facility in self._DEBUG_ONLY | self._logged else level, message, *values)
        if facility in self._ONCE:
            self._logged.add(facility)


CLIENT_LOG: Final = _ClientLog()
