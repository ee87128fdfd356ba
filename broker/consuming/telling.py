"""Tells observers what came to a consumer and what was settled; called only where somebody listens.

One event for each batch. Synchronous, on the consumer's event loop; never raises, as `Hooks.emit` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from broker.errors import BrokerError
from broker.hooks import Hooks, Received, Settled
from broker.messages import Message, Outcome
from broker.spi import Settlement

__all__ = ["tell_received", "tell_received_again", "tell_settled"]

# Attributes of an enum class cost a slow look-up each; these are read per message.
_ACK = Outcome.ACK
_NACK = Outcome.NACK
_RELEASE = Outcome.RELEASE


def tell_received(hooks: Hooks, topic: str, messages: Sequence[Message[Any]], size: int) -> None:
    """These were fetched, of so many bytes together."""
    now = monotonic()
    for message in messages:
        message.received_at = now
    hooks.emit(Received(topic=topic, messages=messages, bytes=size))


def tell_received_again(hooks: Hooks, topic: str, message: Message[Any]) -> None:
    """It comes again from memory; when it came first stays what it was."""
    hooks.emit(Received(topic=topic, messages=(message,), bytes=0))


def tell_settled(
    hooks: Hooks, topic: str, settlements: Sequence[Settlement], results: Sequence[BrokerError | None]
) -> None:
    """These were carried out, or refused, which is told elsewhere; nothing if all were refused."""
    nacked = released = refused = 0
    handled: list[Message[Any]] = []
    for settlement, error in zip(settlements, results, strict=True):
        outcome = settlement.outcome
        if error is not None:
            refused += 1
        elif outcome is _NACK:
            nacked += 1
        elif outcome is _RELEASE:
            released += 1
        elif settlement.message.outcome is _ACK:
            handled.append(settlement.message)
    acked = len(settlements) - refused - nacked - released
    if acked or nacked or released:
        hooks.emit(Settled(topic=topic, acked=acked, nacked=nacked, released=released, handled=handled))
