"""What comes into a publishing pipeline: the burst that the next message goes to, and the bounds of the whole.

Synchronous, on one event loop. Most messages come by `put_plain`, which is all that happens to them before their burst
leaves: bounds are counted by the burst, and its own allowance says how much of them is left to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.driver.limits import MessageLimits, PipelineSettings
from broker.outbound import OutboundMessage
from broker.publishing.entries import Burst
from broker.receipts import Receipt

__all__ = ["Intake"]


class Intake:
    """
    :param limits: of the backend, for messages that were not checked.
    :param full: takes a burst that nothing is added to any more.
    """

    __slots__ = (
        "_bytes",
        "_full",
        "_harmless",
        "_harmless_key",
        "_loop",
        "_messages",
        "_open",
        "_room",
        "_settings",
        "_space",
    )

    def __init__(self, settings: PipelineSettings, limits: MessageLimits, full: Callable[[Burst], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._harmless = limits.harmless
        self._harmless_key = limits.harmless_text
        self._full = full
        self._open = Burst([], [])
        self._messages = self._bytes = 0
        """Of the pipeline but for the open burst."""
        self._room = self._space = 0
        """Messages and bytes that the open burst takes without more ado."""

    @property
    def messages(self) -> int:
        """Those in the pipeline."""
        return self._messages + len(self._open.messages)

    @property
    def has_open(self) -> bool:
        """Whether the open burst has a message."""
        return bool(self._open.messages)

    @property
    def is_full(self) -> bool:
        """Whether the open burst is as much as a call to the backend takes."""
        settings = self._settings
        return len(self._open.messages) >= settings.max_batch or self._open.size >= settings.max_batch_bytes

    def has_room(self, size: int) -> bool:
        """Whether the pipeline takes a message of so many bytes."""
        messages, settings = self.messages, self._settings
        if messages >= settings.max_messages:
            return False
        return not messages or self._bytes + self._open.size + size <= settings.max_bytes

    def put_plain(self, message: OutboundMessage) -> asyncio.Future[Receipt] | None:
        """Queue a plain message behind others of the open burst; None leaves it to a check and `add`."""
        data, key, burst = message.data, message.key, self._open
        if data is None:
            return None
        size = len(data)
        if key is not None:
            length = len(key)
            if length > self._harmless_key:
                return None
            size += length
        messages, total = burst.messages, burst.size + size
        if size > self._harmless or not 0 < len(messages) < self._room or total > self._space:
            return None
        burst.size = total
        future: asyncio.Future[Receipt] = asyncio.Future(loop=self._loop)
        messages.append(message)
        burst.futures.append(future)
        return future

    def add(self, message: OutboundMessage, size: int, future: asyncio.Future[Receipt]) -> None:
        """Queue a message that there is room for."""
        burst = self._open
        burst.messages.append(message)
        burst.futures.append(future)
        burst.size += size

    def shut(self) -> None:
        """Whatever comes now leaves behind the open burst, if that has a message."""
        burst = self._open
        if burst.messages:
            self._messages += len(burst.messages)
            self._bytes += burst.size
            self._open = Burst([], [])
            self._full(burst)

    def gone(self, count: int, size: int) -> None:
        """So many messages and bytes have left the pipeline; `allow` is to be called then."""
        self._messages -= count
        self._bytes -= size

    def allow(self) -> None:
        """See how much the open burst takes by `put_plain`."""
        settings = self._settings
        self._room = min(settings.max_batch, settings.max_messages - self._messages)
        self._space = min(settings.max_batch_bytes, settings.max_bytes - self._bytes)

    def forbid(self) -> None:
        """Take nothing by `put_plain` before the next `allow`."""
        self._room = 0
