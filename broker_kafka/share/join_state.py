"""`JoinState`: whether and since when a consumer has partitions of its share group, which tells when it is idle."""

from __future__ import annotations

import asyncio
from typing import Final

from broker import BrokerError, OperationTimeout
from broker_kafka.settings import KafkaSettings

__all__ = ["JoinState"]

_FIRST_FETCH: Final = 0.5
"""Seconds that the first fetch takes beyond `fetch_wait_max_ms`: the brokers look up the group's coordinator."""


class JoinState:
    """For one event loop.

    :param what: the consumer, for errors.
    """

    def __init__(self, what: str, settings: KafkaSettings) -> None:
        self._what = what
        self._timeout: Final = settings.request_timeout
        self._first_answer: Final = settings.fetch_wait_max_ms / 1000 + _FIRST_FETCH
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._joined_at: float | None = None
        self._decided = asyncio.Event()
        self._failure: BrokerError | None = None

    def succeeded(self) -> None:
        """A member has partitions, or messages."""
        if self._joined_at is None:
            self._joined_at = self._loop.time()
            self._decided.set()

    def failed(self, error: BrokerError) -> None:
        """A member cannot join; retriable errors are ignored."""
        if self._joined_at is None and not error.retriable:
            self._failure = error
            self._decided.set()

    async def wait(self) -> None:
        """Wait until a member has joined.

        :raises BrokerError: none can. :raises OperationTimeout: none did within `request_timeout`.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._decided.wait()
        except TimeoutError as error:
            raise OperationTimeout(
                f"{self._what}: no partition was assigned in {self._timeout:g} s",
                advice="A new group waits for the brokers' group.share.heartbeat.interval.ms; raise request_timeout",
            ) from error
        if self._joined_at is None and self._failure is not None:
            raise self._failure

    def is_idle(self) -> bool:
        """Whether no message means that there is none: a fetch was answered since, or no member ever joins."""
        now = self._loop.time()
        if self._joined_at is None:
            return now - self._opened_at >= self._timeout
        return now - self._joined_at >= self._first_answer
