"""Writes letters: messages that must be on the broker before their originals may be settled.

A failed write is repeated until it succeeds or the consumer closes. A letter that the broker refuses as it is, is made
smaller in steps. Used on one event loop; cancelling a write leaves its outcome unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from broker.errors import BackendError, BrokerError, InvalidMessage, PublishError
from broker.outbound import OutboundMessage

__all__ = ["LetterPump", "MakeLetter", "describe"]

MakeLetter = Callable[[InvalidMessage | None], OutboundMessage]
"""Makes one shape of a letter, told why the shape before was refused."""

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 30.0


class LetterPump:
    """Writes and repeats, until `close`."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Repeat no failed write from now on; one that is under way may still succeed."""
        self._closing.set()

    async def write(
        self,
        shapes: Sequence[MakeLetter],
        publish: Callable[[OutboundMessage], Awaitable[object]],
        failed: Callable[[BrokerError, float], None],
        *,
        stubborn: bool,
    ) -> None:
        """Return when the letter is on the broker.

        :param shapes: the largest first; each is made once at most.
        :param failed: called with each failure and the seconds until the next try.
        :param stubborn: try again also when all shapes were refused.
        :raises InvalidMessage: all shapes were refused.
        :raises BrokerError: a write failed, and `close` was called.
        """
        letters = [shapes[0](None)]
        pause = _FIRST_PAUSE
        shape = 0
        while True:
            try:
                await publish(letters[shape])
            except Exception as raised:
                refused = _refusal(raised)
                shape += 1
                if refused is not None and shape < len(shapes):
                    # Each is made once: a second attempt has the id of the first, which may have been stored.
                    if shape == len(letters):
                        letters.append(shapes[shape](refused))
                    continue
                if refused is not None and not stubborn:
                    raise refused from None
                shape = 0
                failure = raised if isinstance(raised, BrokerError) else BackendError(describe(raised), native=raised)
                if self._closing.is_set():
                    raise failure from None
                failed(failure, pause)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._closing.wait()
                pause = min(_LONGEST_PAUSE, 2 * pause)
            else:
                return


def describe(error: BaseException) -> str:
    """The error in words, whatever its own text does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which has no text"


def _refusal(raised: Exception) -> InvalidMessage | None:
    """Why the letter itself cannot be written, whenever it is tried."""
    if isinstance(raised, PublishError):
        return next((outcome for outcome in raised.outcomes if isinstance(outcome, InvalidMessage)), None)
    return raised if isinstance(raised, InvalidMessage) else None
