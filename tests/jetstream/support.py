"""Helpers of the tests of JetStream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from nats.aio.client import Client

from broker.driver.contract import MessageSource, MessageSubscription, RecordSource, Settlement, TopicPartition
from broker.hooks import Event
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.records import Record
from broker_jetstream.backend import JetStreamBackend


class Listener:
    """Records the calls of a message source."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.gone: list[Message[Any]] = []

    def lost(self, messages: Sequence[Message[Any]]) -> None:
        self.gone.extend(messages)

    def expired(self, messages: Sequence[Message[Any]]) -> None: ...

    def event(self, event: Event) -> None:
        self.events.append(event)


class GroupListener:
    """Records the calls of a record source."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.gone: list[TopicPartition] = []
        self.given: list[TopicPartition] = []
        self.revoked: list[TopicPartition] = []
        self.on_revoke: Callable[[Sequence[TopicPartition]], Any] | None = None

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.gone.extend(partitions)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.given.extend(partitions)

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        self.revoked.extend(partitions)
        if self.on_revoke is not None:
            await self.on_revoke(partitions)


async def make_topic(backend: JetStreamBackend, name: str, partitions: int = 1, **options: Any) -> None:
    retention = options.pop("retention", None)
    await backend.admin().ensure_topic(name, partitions=partitions, retention=retention, options=options)


async def publish(backend: JetStreamBackend, topic: str, *messages: OutboundMessage) -> list[Receipt]:
    outcomes = await backend.publish_target(topic).publish(messages)
    for outcome in outcomes:
        assert isinstance(outcome, Receipt), outcome
    return list(outcomes)  # pyright: ignore[reportReturnType]


async def subscribe(backend: JetStreamBackend, topic: str, name: str = "billing", **options: Any) -> MessageSource:
    listener = options.pop("listener", None) or Listener()
    return await backend.subscribe(MessageSubscription(topic=topic, subscription=name, **options), listener)


async def receive(source: MessageSource, number: int, seconds: float = 30.0) -> list[Message[Any]]:
    """Fetch `number` messages, or those that arrive within `seconds`."""
    found: list[Message[Any]] = []
    deadline = time.monotonic() + seconds
    while len(found) < number and (left := deadline - time.monotonic()) > 0:
        found.extend(await source.fetch(number - len(found), 1 << 24, left))
    return found


async def read(source: RecordSource, number: int, seconds: float = 30.0) -> list[Record[Any]]:
    """Fetch `number` records, or those that arrive within `seconds`."""
    found: list[Record[Any]] = []
    deadline = time.monotonic() + seconds
    while len(found) < number and (left := deadline - time.monotonic()) > 0:
        found.extend(await source.fetch(number - len(found), 1 << 24, left))
    return found


def settle_all(messages: Sequence[Message[Any]], outcome: Outcome, delay: float | None = None) -> list[Settlement]:
    return [Settlement(message, outcome, delay) for message in messages]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a state that no event reports."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def put(client: Client, subject: str, block: bytes, body: bytes) -> None:
    """Publish a header block that no client would write; returns when it is stored."""
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    raw: Any = client
    head = f"HPUB {subject} {inbox} {len(block)} {len(block) + len(body)}\r\n".encode()
    await raw._send_command(head + block + body + b"\r\n")
    await raw._flush_pending()
    assert b'"seq"' in (await answers.next_msg(5)).data
    await answers.unsubscribe()
