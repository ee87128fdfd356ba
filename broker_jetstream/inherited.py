"""What a consumer that died left behind, brought back into the order of the stream. Pure.

The server delivers again in the order in which leases end, and a lease that was renewed ends late: after a crash
the later messages of a key would come before its earlier ones. They all come before anything new, though, so a
key-ordered source gathers them when it opens, and sorts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from broker import Message
from broker_jetstream.headers import deliveries_of, sequence_of

__all__ = ["GATHER_SECONDS", "GATHER_STEP", "in_stream_order", "is_inherited"]

GATHER_SECONDS: Final = 0.25
"""Silence after which nothing more is expected to come again now."""
GATHER_STEP: Final = 64
"""Messages asked for at a time, so that little that is new is taken from other consumers."""


def is_inherited(message: Message[Any]) -> bool:
    """Whether it was delivered before, be it only to be given back."""
    return not message.raw.first and deliveries_of(message.raw.reply) > 1


def in_stream_order(messages: Sequence[Message[Any]]) -> list[Message[Any]]:
    """Those that were delivered before by their place in the stream, then the others as they came."""
    again = sorted(filter(is_inherited, messages), key=lambda message: sequence_of(message.raw.reply))
    return [*again, *(message for message in messages if not is_inherited(message))]
