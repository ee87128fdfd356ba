"""A MessageSource driven by the test: what it delivers, how it answers, and a record of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from types import MappingProxyType
from typing import Any

from broker.capabilities import ConfirmedAck, LeaseMode, Limits, MessageCapabilities
from broker.consuming.consumer import MessageConsumer
from broker.consuming.dead_letters import DeadLetterWriter
from broker.consuming.engine import Engine, OpenSource
from broker.consuming.options import ConsumerOptions
from broker.consuming.retry.policy import DROP, Drop, Retry
from broker.driver.contract import Settlement, SourceListener
from broker.errors import BrokerError, LeaseLost
from broker.hooks import Event, Hooks
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from broker.protocols import AnyCodec

NONE: Mapping[str, str] = MappingProxyType({})


class Raw:
    def __init__(self, id: str, key: bytes | None, attempt: int, attributes: Mapping[str, str]) -> None:
        self.id = id
        self.key = key
        self.attempt = attempt
        self.attributes = attributes


class RawView:
    def id(self, raw: Raw, /) -> str:
        return raw.id

    def key(self, raw: Raw, /) -> bytes | None:
        return raw.key

    def attributes(self, raw: Raw, /) -> Mapping[str, str]:
        return raw.attributes

    def publish_time(self, raw: Raw, /) -> datetime | None:
        return None

    def broker_time(self, raw: Raw, /) -> datetime | None:
        return None

    def delivery_attempt(self, raw: Raw, /) -> int | None:
        return raw.attempt

    def native(self, raw: Raw, /) -> Raw:
        return raw


VIEW = RawView()


class ScriptedSource:
    """Redelivers what is nacked or released, at once or after the delay, unless `redelivers` is off."""

    def __init__(self, *, redelivers: bool = True) -> None:
        self.redelivers = redelivers
        self.waiting: list[Message[Any]] = []
        self.settled: list[Settlement] = []
        self.settle_calls = 0
        self.extended: list[str] = []
        self.errors: list[BrokerError] = []
        self.refuse: dict[str, BrokerError] = {}
        self.settle_gate = asyncio.Event()
        self.settle_gate.set()
        self.fetched = 0
        self.closed = False
        self.listener: SourceListener | None = None
        self._arrived = asyncio.Event()

    def add(
        self,
        *ids: str,
        key: bytes | None = None,
        data: bytes | None = b"data",
        attempt: int = 1,
        attributes: Mapping[str, str] = NONE,
    ) -> None:
        for message_id in ids:
            raw = Raw(message_id, key, attempt, attributes)
            self.waiting.append(Message("orders", data, raw, VIEW, None, len(data or b"")))
        self._arrived.set()

    def fail(self, error: BrokerError) -> None:
        self.errors.append(error)
        self._arrived.set()

    def outcomes(self, outcome: Outcome) -> list[str]:
        return [s.message.id for s in self.settled if s.outcome is outcome]

    # -- MessageSource -----------------------------------------------------------------------------------

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        if not self.waiting and not self.errors:
            self._arrived.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        if self.errors:
            raise self.errors.pop(0)
        batch: list[Message[Any]] = []
        while self.waiting and len(batch) < max_messages and max_bytes > 0:
            batch.append(self.waiting.pop(0))
            max_bytes -= batch[-1].size
        self.fetched += len(batch)
        return batch

    def interrupt(self) -> None:
        self._arrived.set()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self.settle_calls += 1
        await self.settle_gate.wait()
        results: list[BrokerError | None] = []
        for settlement in settlements:
            message = settlement.message
            refusal = self.refuse.get(message.id)
            results.append(refusal)
            if refusal is not None:
                continue
            self.settled.append(settlement)
            if self.redelivers and settlement.outcome in (Outcome.NACK, Outcome.RELEASE) and not self.closed:
                raw = message.raw
                asyncio.get_running_loop().call_later(
                    settlement.delay or 0.0,
                    lambda raw=raw, message=message: self.add(
                        raw.id, key=raw.key, data=message.data, attempt=raw.attempt + 1, attributes=raw.attributes
                    ),
                )
        return results

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self.extended.extend(message.id for message in messages)
        return [error if isinstance(error := self.refuse.get(message.id), LeaseLost) else None for message in messages]

    async def close(self) -> None:
        self.closed = True


async def until(holds: Callable[[], object]) -> None:
    """Let the loop run until the condition holds; a minute at most."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0)


class Letters:
    """A dead-letter topic in a list; `failures` are raised first."""

    def __init__(self) -> None:
        self.written: list[OutboundMessage] = []
        self.failures: list[BrokerError] = []
        self.odd_failures: list[Exception] = []
        self.tried = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def publish(self, message: OutboundMessage) -> object:
        self.tried += 1
        await self.gate.wait()
        if self.odd_failures:
            raise self.odd_failures.pop(0)
        if self.failures:
            raise self.failures.pop(0)
        self.written.append(message)
        return None


@asynccontextmanager
async def consuming(
    *sources: ScriptedSource,
    retry: Retry | None = None,
    letters: Letters | None = None,
    drop: bool = False,
    codec: AnyCodec[Any] | None = None,
    native_delay: float = 1000.0,
    lease: LeaseMode = LeaseMode.RENEW,
    lease_seconds: float = 30.0,
    confirmed: ConfirmedAck = ConfirmedAck.ALWAYS,
    delivery_limit: int | None = None,
    events: list[Event] | None = None,
    hooks: Hooks | None = None,
    **options: Any,
) -> AsyncGenerator[MessageConsumer[Any]]:
    """A consumer over the source, or over several; closed at the end."""
    hooks = hooks or Hooks()
    if events is not None:
        hooks.listen(events.append)
    capabilities = MessageCapabilities(
        lease=lease,
        lease_seconds=lease_seconds,
        confirmed_ack=confirmed,
        native_delay=native_delay,
        delivery_attempt=True,
        delivery_limit=delivery_limit,
        release_keeps_attempt=False,
    )
    options.setdefault("close_timeout", 5.0)
    chosen = ConsumerOptions(**options)
    dead_letter: DeadLetterWriter | Drop | None = None
    if letters is not None:
        dead_letter = DeadLetterWriter("orders.dead", letters.publish, Limits(), hooks)
    elif drop:
        dead_letter = DROP

    async def make_engine() -> Engine:
        def opener(source: ScriptedSource) -> OpenSource:
            async def open_source(listener: SourceListener) -> ScriptedSource:
                source.listener = listener
                return source

            return open_source

        engine = Engine(
            [("orders", opener(source)) for source in sources],
            capabilities,
            chosen,
            retry=retry or Retry(initial=0.001, maximum=0.01),
            dead_letter=dead_letter,
            codec=codec,
            subscription="billing",
            group=None,
            hooks=hooks,
        )
        await engine.open()
        return engine

    consumer: MessageConsumer[Any] = MessageConsumer(make_engine, name="orders", max_outstanding=chosen.max_outstanding)
    async with consumer:
        yield consumer


async def received(consumer: MessageConsumer[Any]) -> Message:
    """The next message, which must arrive."""
    message = await consumer.next_message(timeout=60)
    assert message is not None
    return message
