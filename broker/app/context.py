"""`Context`: what a handler of an app gets beside its payload, if it has a parameter of this type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from broker.errors import ConfigurationError
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.threads.messages import BlockingMessage
from broker.threads.portal import Portal

if TYPE_CHECKING:
    from broker.bus import Bus

__all__ = ["BlockingContext", "Context", "make_context"]

S = TypeVar("S", default=None)


@dataclass(frozen=True, slots=True)
class Context(Generic[S]):
    """Of one call of an `async def` handler.

    :ivar message: the message; an ack by the handler counts.
    :ivar state: what the lifespan of the app has yielded.
    """

    message: Message[Any]
    state: S
    _bus: Bus | None = None

    @property
    def bus(self) -> Bus:
        """The bus, to publish on: `await context.bus.topic("invoices").publish(...)`.

        :raises ConfigurationError: `make_context` was called without one.
        """
        if self._bus is None:
            raise ConfigurationError("The context has no bus", advice="Pass one: make_context(..., bus=bus)")
        return self._bus


@dataclass(frozen=True, slots=True)
class BlockingContext(Generic[S]):
    """Of one call of a plain function, which runs in a thread; `message` and `state` as in `Context`."""

    message: BlockingMessage[Any]
    state: S
    _bus: Bus
    _portal: Portal

    def publish(
        self,
        topic: str,
        payload: Any,
        codec: Any = None,
        *,
        key: bytes | str | None = None,
        id: str | None = None,
    ) -> Receipt:
        """Publish a message; returns when the broker has stored it.

        :param payload: what `Topic.publish` takes; other fields by `OutboundMessage` or `OutboundPayload`.
        :param codec: an `AnyCodec` of the payload; None takes bytes.
        :raises BrokerError: the message was not published, or may not have been.
        """

        async def publish() -> Receipt:
            return await self._bus.topic(topic, codec).publish(payload, key=key, id=id)

        return self._portal.call(publish)


def make_context(state: S = None, *, message: Message[Any] | None = None, bus: Bus | None = None) -> Context[S]:
    """A context for a test that calls a handler itself: `await bill(Order(...), make_context(State(db)))`.

    :param message: by default an empty one of topic "fake-topic".
    :param bus: for a handler that publishes; such as one in memory.
    """
    # Only tests have pytest, which the package imports.
    from broker.testing.fakes import make_message

    return Context(message or make_message(OutboundMessage(None)), state, bus)
