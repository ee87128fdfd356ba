"""`Standstill`: notices that a member's process was stopped, or starved, for longer than the group waits for it.

librdkafka's own threads keep a session alive, whatever the application does; only what stops all of them ends it.

*Concurrency.* For the thread that owns the client. *Cancellation.* Nothing waits here. *Failure.* None.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

__all__ = ["Standstill"]

_BROKERS_SESSION: Final = 3.0
"""Seconds; where the brokers say how long a session is, a loss after so long a standstill is put down to that."""

_SHARE: Final = 0.7
"""Of a session, after which a standstill may end it: it counts from the last heartbeat before."""


class Standstill:
    """:param config: of the member's client. :param warn: told why partitions were lost, if it is for a standstill."""

    def __init__(self, config: Mapping[str, Any], warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._group: str = config["group.id"]
        milliseconds = config.get("session.timeout.ms")
        self._session = None if milliseconds is None else int(milliseconds) / 1000
        self._enough = _BROKERS_SESSION if self._session is None else _SHARE * self._session
        self._last = self._ended = monotonic()
        self._seconds = 0.0

    def move(self) -> None:
        """The thread does something, as it does all the time."""
        now = monotonic()
        if now - self._last >= self._enough:
            self._seconds, self._ended = now - self._last, now
        self._last = now

    @contextmanager
    def apart(self) -> Generator[None]:
        """The block may take long, with all threads at work."""
        self.move()
        try:
            yield
        finally:
            self._last = monotonic()

    def explain_loss(self) -> None:
        """Partitions are just being lost; each standstill is told once."""
        self.move()
        seconds, self._seconds = self._seconds, 0.0
        if seconds and self._last - self._ended <= (self._session or self._enough):
            self._warn(self._text(seconds))

    def _text(self, seconds: float) -> str:
        lost = f"This member of group {self._group!r} lost its partitions: its process stood still for {seconds:.1f} s"
        if self._session is None:
            return (
                f"{lost}, and its session is the brokers' group.consumer.session.timeout.ms, which takes the place of "
                "session_timeout_ms with group_protocol=consumer. Have nothing stop or starve it for so long"
            )
        return (
            f"{lost}, and session_timeout_ms is {round(self._session * 1000)}. Have nothing stop or starve it for so "
            "long, or raise session_timeout_ms"
        )
