"""A publish target whose answers a test scripts, and which records the messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from broker.capabilities import Capabilities, Limits, PublishCapabilities
from broker.errors import BrokerError
from broker.hooks import Hooks
from broker.outbound import OutboundMessage
from broker.publishing.pipeline import PipelineSettings
from broker.publishing.topic import TopicFacade
from broker.receipts import Receipt

Answer = Callable[[OutboundMessage], BrokerError | Receipt | None]


class ScriptedTarget:
    """Answers at once, unless `gate` is closed; `answer` gives single messages another outcome."""

    def __init__(self) -> None:
        self.calls: list[list[OutboundMessage]] = []
        self.published: list[OutboundMessage] = []
        self.answer: Answer = lambda _: None
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()
        self.running = 0
        self.closed = 0

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        self.calls.append(list(messages))
        self.called.set()
        self.running += 1
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        outcomes: list[Receipt | BrokerError] = []
        for message in messages:
            answer = self.answer(message)
            if answer is None:
                self.published.append(message)
            outcomes.append(answer or Receipt(message.id or str(len(self.published)), offset=len(self.published)))
        return outcomes

    async def close(self) -> None:
        self.closed += 1

    @property
    def bodies(self) -> list[bytes | None]:
        return [message.data for message in self.published]


def capabilities(limits: Limits | None = None, **abilities: bool) -> Capabilities:
    return Capabilities(backend="test", publish=PublishCapabilities(limits=limits or Limits(), **abilities))


def topic_of(
    target: ScriptedTarget,
    *,
    able: Capabilities | None = None,
    hooks: Hooks | None = None,
    pipeline: PipelineSettings | None = None,
) -> TopicFacade[bytes]:
    return TopicFacade(
        "orders",
        lambda: target,
        None,
        able or capabilities(),
        hooks or Hooks(),
        pipeline=pipeline or PipelineSettings(),
    )
