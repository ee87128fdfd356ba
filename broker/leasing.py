"""What a message source may do about leases besides renewing them, and the clock that leases are measured by.

Optional parts of the contract of `broker.spi`; the core looks whether a source has them. They are called on the loop;
`lease_time` is safe from any thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

from broker.messages import Message

__all__ = ["LosesOver", "TellsLeaseLeft", "lease_time"]


@runtime_checkable
class LosesOver(Protocol):
    """A source that knows when leases end, also of what was not renewed in time; optional."""

    def lose_over(self, messages: Sequence[Message[Any]]) -> None:
        """These are about to be handed over: tell `listener.lost` of those whose leases are over, others with them.

        Called for each hand-over, of one message or many: it is quick, and does no I/O.
        """
        ...


@runtime_checkable
class TellsLeaseLeft(Protocol):
    """A source in lease mode `fixed` that knows when each lease ends; optional."""

    def lease_left(self, message: Message[Any]) -> float:
        """The seconds for which the message is still ours; not above 0 if it is not."""
        ...


# Without a frame of its own: it is called for each hand-over.
lease_time: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic
)
"""Seconds by a clock that goes on while the machine is suspended, as that of the brokers does.

A loop's clock stands still then: who wakes would take a lease that others have by now for its own. Elsewhere than on
Linux it is `time.monotonic`.
"""
