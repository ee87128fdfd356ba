"""The topic that a consumer's dead letters go to, and that each is kept there until it is redriven.

A broker without history keeps a message only for the subscriptions that are there when it comes, and drops what none
waits for. There the subscription that redrives read is made before the first letter is written, and again before the
next one if the topic was gone meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from broker.capabilities import ConfirmedAck, MessageCapabilities
from broker.errors import NotFound
from broker.hooks import Event
from broker.messages import Message
from broker.names import REDRIVE_SUBSCRIPTION
from broker.outbound import OutboundMessage
from broker.protocols import Topic
from broker.spi import Backend, MessageSubscription

__all__ = ["LetterTopic", "confirms"]


class LetterTopic:
    """One dead-letter topic, for one consumer; used on one event loop."""

    def __init__(self, backend: Backend, topic: Callable[[str], Topic[bytes]], name: str) -> None:
        """:param topic: the bus's; asked for each time, because the application may close its topics."""
        self._backend = backend
        self._topic = topic
        self._name = name
        messages = backend.capabilities.messages
        self._forgets = messages is not None and not messages.history
        self._kept = False

    async def open(self) -> None:
        """Look whether letters can be written: that is better known before the first message is handled.

        :raises NotFound: the topic does not exist.
        :raises BrokerError: nobody knows.
        """
        await self._backend.admin().describe_topic(self._name)
        await self._keep()

    async def publish(self, letter: OutboundMessage) -> None:
        """Return when the letter is on the broker, and kept.

        :raises BrokerError: it is not, or nobody knows.
        """
        await self._keep()
        try:
            await self._topic(self._name).publish(letter)
        except NotFound:
            self._kept = False
            raise

    async def _keep(self) -> None:
        if self._kept or not self._forgets:
            return
        if REDRIVE_SUBSCRIPTION not in await self._backend.admin().list_subscriptions(self._name):
            # Made as a redrive makes it: what it asks for may be fixed then.
            asked = MessageSubscription(
                topic=self._name,
                subscription=REDRIVE_SUBSCRIPTION,
                confirm_acks=confirms(self._backend.capabilities.messages),
                max_outstanding=1,
            )
            source = await self._backend.subscribe(asked, _Unheard())
            await source.close()
        self._kept = True


class _Unheard:
    """A SourceListener for a source that fetches nothing."""

    def lost(self, messages: Sequence[Message[Any]]) -> None: ...

    def passed_over(self, messages: Sequence[Message[Any]]) -> None: ...

    def event(self, event: Event) -> None: ...


def confirms(family: MessageCapabilities | None) -> bool:
    """Whether a redrive has its acks confirmed."""
    return family is not None and family.confirmed_ack is not ConfirmedAck.NEVER
