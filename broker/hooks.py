"""Events and interceptors, for logs, metrics and tracing. They cost one truth test when nobody listens.

Callbacks run on the event loop, in the place where the thing happened: they return at once and do not
raise (what they raise is logged and swallowed, since an observer must not change what it observes).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from broker.messages import Message
    from broker.outbound import OutboundMessage
    from broker.receipts import Receipt

__all__ = [
    "Connected",
    "DeadLetterFailed",
    "DeadLettered",
    "Disconnected",
    "Event",
    "FetchFailed",
    "FlowBlocked",
    "HandlerFailed",
    "HeldMessages",
    "Hooks",
    "LeaseExpired",
    "LeasesNotRenewed",
    "PartitionsAssigned",
    "PartitionsLost",
    "PartitionsRevoked",
    "PositionReset",
    "PositionsCommitted",
    "Published",
    "Received",
    "RecordsReceived",
    "RetryScheduled",
    "RetryWriteFailed",
    "SettleFailed",
    "Settled",
    "Warned",
]

logger = logging.getLogger("broker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something worth telling an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected(Event):
    """The connection is up; `again` after a break."""

    server: str
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected(Event):
    """The connection broke and is being restored."""

    server: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed(Event):
    """A retriable error while fetching; the fetch is repeated after `pause` seconds."""

    topic: str
    error: BaseException
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Event):
    """A call to publish ended; `outcomes` has a Receipt or an error per message, or None where there is no receipt."""

    topic: str
    outcomes: Sequence[Receipt | BaseException | None]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Event):
    """Messages came; one event per fetch, and one for each message that comes again from the consumer's memory.

    :ivar topic: what the consumer was opened for: the topic, or the topics of a group's records served as messages.
    :ivar bytes: of those that the broker sent; 0 for what comes from memory.
    """

    topic: str
    messages: Sequence[Message[Any]]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsReceived(Event):
    """Records were fetched; one event per topic and fetch."""

    topic: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionsCommitted(Event):
    """The broker stored positions of a group; one event per commit.

    :ivar positions: by topic and partition, the next offset to read.
    """

    positions: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFailed(Event):
    """A handler, or an `async with message` block, raised."""

    message: Message[Any]
    error: BaseException
    failures: int
    """How often it has failed here, this time included."""
    retry_in: float | None
    """Seconds until it comes again; None if it does not, or if it was settled, or lost, before the handler raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Event):
    """Messages were settled; one event per batch. Those that were refused are told by `SettleFailed` alone.

    :ivar topic: as of `Received`.
    :ivar acked: those that do not come again, given up and sent to retry topics ones included.
    :ivar nacked: those that come again after a delay, whether the broker or the consumer's memory keeps it.
    :ivar released: those that were given back unhandled.
    :ivar handled: those among the acked that were acked by whoever handled them.
    """

    topic: str
    acked: int = 0
    nacked: int = 0
    released: int = 0
    handled: Sequence[Message[Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleFailed(Event):
    """A settlement that nobody awaits was refused or got no answer."""

    message: Message[Any]
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired(Event):
    """A message is no longer held here, because `max_lease` passed or the broker took it back."""

    message: Message[Any]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesNotRenewed(Event):
    """Leases of messages that are held could not be renewed, and may end; it is tried again in a third of a lease."""

    messages: Sequence[Message[Any]]
    error: BaseException
    """What is told of the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettered(Event):
    """A message was written to the dead letters, or dropped by `DROP` (`target` is None)."""

    message: Message[Any]
    target: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFailed(Event):
    """Writing a dead letter failed; the write is repeated after `pause` seconds, the original is not acked."""

    message: Message[Any]
    target: str
    error: BaseException
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryScheduled(Event):
    """A message was written to a retry topic, where it waits for `delay` seconds at least."""

    message: Message[Any]
    target: str
    delay: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryWriteFailed(Event):
    """Writing to a retry topic failed; the write is repeated after `pause` seconds, the original is not acked."""

    message: Message[Any]
    target: str
    error: BaseException
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowBlocked(Event):
    """Nothing is fetched because too many messages are unsettled; `oldest` are those held longest."""

    outstanding: int
    oldest: Sequence[Message[Any]]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsAssigned(Event):
    """Partitions were given to this member; `current` is all it has now."""

    partitions: Sequence[tuple[str, int]]
    current: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsRevoked(Event):
    """Partitions are being given up; reported before they are released."""

    partitions: Sequence[tuple[str, int]]
    current: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsLost(Event):
    """Partitions went to another member before they could be given up."""

    partitions: Sequence[tuple[str, int]]
    current: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionReset(Event):
    """A group's position was not in the log any more, or not yet, and reading goes on elsewhere: records may be lost.

    :ivar policy: "earliest" or "latest", as configured.
    """

    partition: tuple[str, int]
    position: int
    to: int
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Event):
    """Anything else that an operator should read."""

    text: str


class HeldMessages(Protocol):
    """What one source of a consumer has fetched and not settled, as of now; may be read from any thread."""

    @property
    def topic(self) -> str:
        """As of `Received`."""
        ...

    @property
    def count(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class Hooks:
    """Where observers register; one per bus.

    Test `hooks.listening` before building an event, so that nothing is built for nobody.
    """

    __slots__ = ("_handling", "_held", "_listeners", "_publishing", "listening")

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], object]] = []
        self._publishing: list[Callable[[str, Sequence[OutboundMessage]], Sequence[OutboundMessage]]] = []
        self._handling: list[Callable[[Message[Any]], AbstractContextManager[object]]] = []
        self._held: list[HeldMessages] = []
        self.listening = False

    def listen(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` with every event; returns the function that removes it."""
        self._listeners.append(listener)
        self.listening = True

        def remove() -> None:
            self._listeners.remove(listener)
            self.listening = bool(self._listeners)

        return remove

    def on_publish(
        self, interceptor: Callable[[str, Sequence[OutboundMessage]], Sequence[OutboundMessage]]
    ) -> Callable[[], None]:
        """Let `interceptor(topic, messages)` replace messages before they go, for instance to add trace headers."""
        self._publishing.append(interceptor)
        return lambda: self._publishing.remove(interceptor)

    def around_handling(
        self, interceptor: Callable[[Message[Any]], AbstractContextManager[object]]
    ) -> Callable[[], None]:
        """Enter `interceptor(message)` around every handler and `async with message` block."""
        self._handling.append(interceptor)
        return lambda: self._handling.remove(interceptor)

    def show_held(self, held: HeldMessages) -> Callable[[], None]:
        """Let observers see what a consumer holds; returns the function that ends that."""
        self._held.append(held)
        return lambda: self._held.remove(held)

    @property
    def held(self) -> Sequence[HeldMessages]:
        """What the open consumers hold, one for each source; may be read from any thread."""
        return tuple(self._held)

    @property
    def publishing(self) -> Sequence[Callable[[str, Sequence[OutboundMessage]], Sequence[OutboundMessage]]]:
        return self._publishing

    @property
    def handling(self) -> Sequence[Callable[[Message[Any]], AbstractContextManager[object]]]:
        return self._handling

    def emit(self, event: Event) -> None:
        """Give the event to every listener."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                logger.exception("A hook failed on %s", type(event).__name__)
