"""The messages that wait to be handed over, in arrival order. Synchronous; used on one event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from broker.messages import Message

__all__ = ["ArrivalOrder", "Ready"]


class Ready(Protocol):
    """Decides which message is handed over next."""

    def put_all(self, messages: Sequence[Message[Any]]) -> Sequence[tuple[Message[Any], float]]:
        """Keep these; those that must be given back to the broker instead, and for how many seconds."""
        ...

    def put_again(self, message: Message[Any]) -> None:
        """It failed before and its delay is over."""
        ...

    def replace(self, message: Message[Any], copy: Message[Any]) -> None:
        """The copy stands for the message from now on."""
        ...

    def take(self) -> Message[Any] | None:
        """The next message that may be handed over now."""
        ...

    def take_some(self, most: int) -> list[Message[Any]]:
        """The next `most`, or as many as may be handed over now."""
        ...

    def done(self, message: Message[Any]) -> None:
        """It was settled for good: what waits behind it may follow."""
        ...

    def abandon(self, message: Message[Any]) -> list[Message[Any]]:
        """Its lease ended; what waits behind it and must be given back with it."""
        ...

    def passed_over(self, messages: Sequence[Message[Any]]) -> None:
        """These were not handed over, and come again: what is put later of their keys is to follow them."""
        ...

    def forget(self, message: Message[Any]) -> None:
        """Expect nothing of what was given back before it, or with it: another consumer has it by now."""
        ...

    def drain(self) -> list[Message[Any]]:
        """Everything that waits, taken out."""
        ...

    def __len__(self) -> int:
        """How many could be handed over now."""
        ...


class ArrivalOrder:
    """First come, first served."""

    __slots__ = ("_messages",)

    def __init__(self) -> None:
        self._messages: deque[Message[Any]] = deque()

    def put_all(self, messages: Sequence[Message[Any]]) -> Sequence[tuple[Message[Any], float]]:
        self._messages.extend(messages)
        return ()

    def put_again(self, message: Message[Any]) -> None:
        self._messages.append(message)

    def replace(self, message: Message[Any], copy: Message[Any]) -> None:
        return

    def take(self) -> Message[Any] | None:
        return self._messages.popleft() if self._messages else None

    def take_some(self, most: int) -> list[Message[Any]]:
        if most >= len(self._messages):
            return self.drain()
        popleft = self._messages.popleft
        return [popleft() for _ in range(most)]

    def done(self, message: Message[Any]) -> None:
        return

    def abandon(self, message: Message[Any]) -> list[Message[Any]]:
        return []

    def passed_over(self, messages: Sequence[Message[Any]]) -> None:
        return

    def forget(self, message: Message[Any]) -> None:
        return

    def drain(self) -> list[Message[Any]]:
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def __len__(self) -> int:
        return len(self._messages)
