"""What the client omits when a member of a group closes, so that the group would miss it until its session ends.

Called in the thread that owns the client, right before `Consumer.close`; it never raises. It takes a second at most, or
a few where the group rebalances just then and waits for others.

`Standstill`: notices that a member's process was stopped, or starved, for longer than the group waits for it.

librdkafka's own threads keep a session alive, whatever the application does; only what stops all of them ends it.

*Concurrency.* For the thread that owns the client. *Cancellation.* Nothing waits here. *Failure.* None.
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

__all__ = ["Standstill", "prepare_to_leave"]


_JOIN_SECONDS: Final = 1.0
_REBALANCE_SECONDS: Final = 4.0
"""The others hear of a rebalance by their heartbeats, three seconds apart by default."""
_LOOK_AGAIN: Final = 0.01


def prepare_to_leave(client: Consumer, config: Mapping[str, Any], was_assigned: Callable[[], bool]) -> None:
    """Have the close that follows tell the group. The client has subscribed.

    :param config: of the client.
    :param was_assigned: whether its callback was ever told of partitions, perhaps of none.
    """
    try:
        # One that closes before the answer to its joining does not leave.
        until = monotonic() + _JOIN_SECONDS
        if config.get("group.protocol") == "consumer":
            while not _has_joined(client) and monotonic() < until:
                sleep(_LOOK_AGAIN)
        elif "group.instance.id" not in config:
            while not was_assigned() and monotonic() < until:
                client.poll(_LOOK_AGAIN)
            # A cooperative member joins once more while it closes; a static one is meant to stay.
            client.unsubscribe()
            # Who waits to join again unsubscribes after that, and a close that comes before does not leave.
            until = monotonic() + _REBALANCE_SECONDS
            while client.memberid() and monotonic() < until:
                client.poll(_LOOK_AGAIN)
    except (KafkaException, RuntimeError, BrokerError) as error:
        logger.debug("The group may miss a member until its session ends: %s", error)


def _has_joined(client: Consumer) -> bool:
    metadata: Any = client.consumer_group_metadata()
    return metadata is not None and parse_group_metadata(metadata).generation > 0


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
