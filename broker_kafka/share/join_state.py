"""`JoinState`: since when a consumer takes part in its share group, which says when it is idle."""

from __future__ import annotations

import asyncio
from typing import Final

from broker import BrokerError, OperationTimeout
from broker_kafka.settings import KafkaSettings

__all__ = ["JoinState"]

_ANSWERED: Final = 0.5
"""Seconds that the first request takes beyond `fetch_wait_max_ms`: the brokers look up where the group is."""


class JoinState:
    """For one event loop.

    :param what: the consumer, for errors.
    """

    def __init__(self, what: str, settings: KafkaSettings) -> None:
        self._what = what
        self._timeout: Final = settings.request_timeout
        self._first_answer: Final = settings.fetch_wait_max_ms / 1000 + _ANSWERED
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._begun_at: float | None = None
        self._told = asyncio.Event()
        self._failure: BrokerError | None = None

    def begun(self) -> None:
        """A member has partitions, or messages."""
        if self._begun_at is None:
            self._begun_at = self._loop.time()
            self._told.set()

    def failed(self, error: BrokerError) -> None:
        """A member cannot take part, if that does not pass."""
        if self._begun_at is None and not error.retriable:
            self._failure = error
            self._told.set()

    async def wait(self) -> None:
        """Wait until it takes part.

        :raises BrokerError: it cannot. :raises OperationTimeout: it does not within `request_timeout`.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._told.wait()
        except TimeoutError as error:
            raise OperationTimeout(
                f"{self._what}: no partition was assigned in {self._timeout:g} s",
                advice="A new group waits for the brokers' group.share.heartbeat.interval.ms; raise request_timeout",
            ) from error
        if self._begun_at is None and self._failure is not None:
            raise self._failure

    def is_idle(self) -> bool:
        """Whether no message means that none waits: a request was answered since, or it never comes to take part."""
        now = self._loop.time()
        if self._begun_at is None:
            return now - self._opened_at >= self._timeout
        return now - self._begun_at >= self._first_answer
