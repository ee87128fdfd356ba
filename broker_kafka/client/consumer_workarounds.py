"""What the client library leaves out: leaving a group reliably, and noticing that the process was suspended.

Everything runs in the thread that owns the client.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException

from broker import BrokerError
from broker.driver import logger
from broker_kafka.codec.group_metadata import parse_group_metadata

__all__ = ["SuspensionWatch", "prepare_to_leave"]


_JOIN_SECONDS: Final = 1.0
_REBALANCE_SECONDS: Final = 4.0
"""Other members notice a rebalance with their heartbeats, three seconds apart by default."""
_LOOK_AGAIN: Final = 0.01


def prepare_to_leave(client: Consumer, config: Mapping[str, Any], was_assigned: Callable[[], bool]) -> None:
    """Make the `Consumer.close` that follows leave the group, which would otherwise wait for the end of the session.

    Never raises. Takes a second at most, or a few if the group rebalances just then.

    :param config: of the client, which has subscribed.
    :param was_assigned: whether the assignment callback has run, perhaps without partitions.
    """
    try:
        # A client that closes before its join is answered does not leave.
        until = monotonic() + _JOIN_SECONDS
        if config.get("group.protocol") == "consumer":
            while not _has_joined(client) and monotonic() < until:
                sleep(_LOOK_AGAIN)
        elif "group.instance.id" not in config:
            while not was_assigned() and monotonic() < until:
                client.poll(_LOOK_AGAIN)
            # A cooperative member joins once more while it closes; a static member is meant to stay.
            client.unsubscribe()
            # A member that waits to join again unsubscribes only after that, and an earlier close does not leave.
            until = monotonic() + _REBALANCE_SECONDS
            while client.memberid() and monotonic() < until:
                client.poll(_LOOK_AGAIN)
    except (KafkaException, RuntimeError, BrokerError) as error:
        logger.debug("The group may wait for a member until its session ends: %s", error)


def _has_joined(client: Consumer) -> bool:
    metadata: Any = client.consumer_group_metadata()
    return metadata is not None and parse_group_metadata(metadata).generation > 0


_BROKERS_SESSION: Final = 3.0
"""Seconds; where the brokers set the session, a loss after such a suspension is explained by it."""

_SHARE: Final = 0.7
"""The part of a session after which a suspension may end it: the session counts from the heartbeat before."""


class SuspensionWatch:
    """Notices that the process was stopped, or starved, for longer than the group waits for a member.

    librdkafka's own threads keep a session alive, whatever the application does; only what stops all of them ends it.

    :param config: of the member's client.
    :param warn: called with the reason when partitions were lost because of a suspension.
    """

    def __init__(self, config: Mapping[str, Any], warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._group: str = config["group.id"]
        milliseconds = config.get("session.timeout.ms")
        self._session = None if milliseconds is None else int(milliseconds) / 1000
        self._enough = _BROKERS_SESSION if self._session is None else _SHARE * self._session
        self._last = self._ended = monotonic()
        self._seconds = 0.0

    def tick(self) -> None:
        """The thread runs."""
        now = monotonic()
        if now - self._last >= self._enough:
            self._seconds, self._ended = now - self._last, now
        self._last = now

    @contextmanager
    def excluded(self) -> Generator[None]:
        """The block may take long without a suspension."""
        self.tick()
        try:
            yield
        finally:
            self._last = monotonic()

    def explain_loss(self) -> None:
        """Partitions were lost; each suspension is reported once."""
        self.tick()
        seconds, self._seconds = self._seconds, 0.0
        if seconds and self._last - self._ended <= (self._session or self._enough):
            self._warn(self._text(seconds))

    def _text(self, seconds: float) -> str:
        lost = (
            f"This member of group {self._group!r} lost its partitions: its process was suspended for {seconds:.1f} s"
        )
        keep = "Keep the process from being stopped or starved for so long"
        if self._session is None:
            return (
                f"{lost}, longer than its session. With group_protocol=consumer the session is the brokers' "
                f"group.consumer.session.timeout.ms instead of session_timeout_ms. {keep}"
            )
        return f"{lost}, and session_timeout_ms is {round(self._session * 1000)}. {keep}, or raise session_timeout_ms"
