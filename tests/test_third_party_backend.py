"""A third-party backend: written outside the packages, found by its entry point, opened by URL, held to the kit.

It keeps messages in plain lists, for its own process, and claims no more than that: no leases, no delays, no counts,
no log, no history before a subscription. The core does the rest.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

import broker
from broker import (
    BrokerError,
    Capabilities,
    Closed,
    ConfirmedAck,
    LeaseLost,
    LeaseMode,
    Limits,
    Message,
    MessageCapabilities,
    OutboundMessage,
    Outcome,
    PublishCapabilities,
    Receipt,
    SubscriptionNotFound,
    TopicNotFound,
    Unsupported,
)
from broker.driver import (
    Connected,
    Hooks,
    Lag,
    MessageSubscription,
    Settlement,
    SubscriptionInfo,
    TopicInfo,
    UrlParts,
)
from broker.driver.settings import BackendSettings
from broker.testing import Harness
from broker.testing.conformance import Conformance, check

CAPABILITIES = Capabilities(
    backend="shelf",
    publish=PublishCapabilities(limits=Limits(body=100_000, attributes=50, letter_attributes=8), tombstones=True),
    messages=MessageCapabilities(
        lease=LeaseMode.NONE,
        confirmed_ack=ConfirmedAck.ALWAYS,
        ordered_delivery=True,
        history=False,
        ephemeral=False,
    ),
    shared=False,
)


class Item(msgspec.Struct, gc=False):
    """One message as the shelf keeps it. Messages that wait on a server are not what the kit counts as left."""

    id: str
    given_id: str | None
    key: bytes | None
    data: bytes | None
    attributes: dict[str, str]
    time: datetime

    @classmethod
    def of(cls, message: OutboundMessage) -> Item:
        return cls(
            message.id or uuid.uuid4().hex,
            message.id,
            message.key,
            message.data,
            dict(message.attributes),
            message.publish_time or datetime.now(UTC),
        )


class ItemView:
    """Shows an item as a message."""

    def id(self, raw: Item) -> str:
        return raw.id

    def given_id(self, raw: Item) -> str | None:
        return raw.given_id

    def key(self, raw: Item) -> bytes | None:
        return raw.key

    def attributes(self, raw: Item) -> Mapping[str, str]:
        return raw.attributes

    def publish_time(self, raw: Item) -> datetime | None:
        return raw.time

    def broker_time(self, raw: Item) -> datetime | None:
        return None

    def delivery_attempt(self, raw: Item) -> int | None:
        return None

    def native(self, raw: Item) -> Item:
        return raw


class Shelf:
    """The server: topics, each with the items that every subscription has still to settle."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, deque[Item]]] = {}
        self.held: dict[tuple[str, str], int] = {}
        self.news = asyncio.Event()

    def subscriptions(self, topic: str) -> dict[str, deque[Item]]:
        if topic not in self.topics:
            raise TopicNotFound(f"There is no topic {topic!r}")
        return self.topics[topic]

    def ring(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


SHELVES: dict[str, Shelf] = {}


class ShelfSettings(BackendSettings):
    schemes: ClassVar[tuple[str, ...]] = ("shelf",)
    name: str = "default"

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        return {"name": parts.hosts[0].name} if parts.hosts else {}


class ShelfBackend:
    settings_type = ShelfSettings
    capabilities = CAPABILITIES

    def __init__(self, settings: ShelfSettings, hooks: Hooks) -> None:
        self.shelf = SHELVES.setdefault(settings.name, Shelf())
        self.hooks = hooks
        self.closed = False

    async def open(self) -> None:
        self.closed = False
        self.hooks.emit(Connected(server="shelf"))

    def publish_target(self, topic: str) -> ShelfTarget:
        return ShelfTarget(self.shelf, topic)

    async def subscribe(self, subscription: MessageSubscription, listener: object) -> ShelfSource:
        assert isinstance(subscription.subscription, str)
        items = self.shelf.subscriptions(subscription.topic)
        if subscription.subscription not in items and not subscription.create:
            raise SubscriptionNotFound(f"There is no subscription {subscription.subscription!r}")
        items.setdefault(subscription.subscription, deque())
        return ShelfSource(self.shelf, subscription.topic, subscription.subscription)

    async def join(self, subscription: object, listener: object) -> Any:
        raise Unsupported("A shelf has no records")

    async def transaction(self, transactional_id: str) -> Any:
        raise Unsupported("A shelf has no transactions")

    def log_reader(self) -> Any:
        raise Unsupported("A shelf has no log")

    def admin(self) -> ShelfAdmin:
        if self.closed:
            raise Closed("The connection is closed")
        return ShelfAdmin(self.shelf)

    async def check_health(self) -> float:
        return 0.0

    async def close(self) -> None:
        self.closed = True


class ShelfTarget:
    def __init__(self, shelf: Shelf, topic: str) -> None:
        self.shelf = shelf
        self.topic = topic

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        items = [Item.of(message) for message in messages]
        for waiting in self.shelf.subscriptions(self.topic).values():
            waiting.extend(items)
        self.shelf.ring()
        return [Receipt(item.id) for item in items]

    async def close(self) -> None: ...


class ShelfSource:
    def __init__(self, shelf: Shelf, topic: str, subscription: str) -> None:
        self.shelf = shelf
        self.place = topic, subscription
        self.items = shelf.topics[topic][subscription]
        self.held: dict[int, Message[Any]] = {}
        self.interrupted = False

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self.interrupted = False
        deadline = asyncio.get_running_loop().time() + wait
        while not self.items and not self.interrupted:
            try:
                async with asyncio.timeout_at(deadline):
                    await self.shelf.news.wait()
            except TimeoutError:
                break
        taken: list[Message[Any]] = []
        while self.items and len(taken) < max_messages and max_bytes > 0:
            item = self.items.popleft()
            size = len(item.data or b"")
            taken.append(Message(self.place[0], item.data, item, ItemView(), size=size))
            max_bytes -= size
        self._hold(taken)
        return taken

    def interrupt(self) -> None:
        self.interrupted = True
        self.shelf.ring()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        results: list[BrokerError | None] = []
        again: list[Item] = []
        for settlement in settlements:
            message = self.held.pop(id(settlement.message.raw), None)
            results.append(None if message is not None else LeaseLost("It is held no longer"))
            if message is not None and settlement.outcome in (Outcome.NACK, Outcome.RELEASE):
                again.append(message.raw)
        self._give_back(again)
        self.shelf.held[self.place] -= sum(result is None for result in results)
        return results

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        return [None] * len(messages)

    async def close(self) -> None:
        self._give_back([message.raw for message in self.held.values()])
        if self.place in self.shelf.held:
            self.shelf.held[self.place] -= len(self.held)
        self.held.clear()

    def _hold(self, messages: Sequence[Message[Any]]) -> None:
        self.held.update({id(message.raw): message for message in messages})
        self.shelf.held[self.place] = self.shelf.held.get(self.place, 0) + len(messages)

    def _give_back(self, items: Sequence[Item]) -> None:
        self.items.extendleft(reversed(items))
        if items:
            self.shelf.ring()


class ShelfAdmin:
    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    async def ensure_topic(self, name: str, **options: object) -> TopicInfo:
        self.shelf.topics.setdefault(name, {})
        return TopicInfo(name=name)

    async def delete_topic(self, name: str) -> None:
        self.shelf.topics.pop(name, None)

    async def list_topics(self) -> Sequence[str]:
        return list(self.shelf.topics)

    async def describe_topic(self, name: str) -> TopicInfo:
        self.shelf.subscriptions(name)
        return TopicInfo(name=name)

    async def ensure_subscription(self, topic: str, name: str, **options: object) -> SubscriptionInfo:
        self.shelf.subscriptions(topic).setdefault(name, deque())
        return SubscriptionInfo(topic=topic, name=name)

    async def delete_subscription(self, topic: str, name: str) -> None:
        self.shelf.topics.get(topic, {}).pop(name, None)

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        return list(self.shelf.subscriptions(topic))

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        if name not in self.shelf.subscriptions(topic):
            raise SubscriptionNotFound(f"There is no subscription {name!r}")
        return SubscriptionInfo(topic=topic, name=name)

    async def purge(self, topic: str) -> int | None:
        for items in self.shelf.subscriptions(topic).values():
            items.clear()
        return None

    async def lag(self, topic: str, subscription: str) -> Lag:
        await self.describe_subscription(topic, subscription)
        items = self.shelf.topics[topic][subscription]
        return Lag(waiting=len(items), unsettled=self.shelf.held.get((topic, subscription), 0))


class ShelfHarness(Harness):
    name = "shelf"
    in_matrix = False
    patience = 5.0
    quiet = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.address = f"shelf://{uuid.uuid4().hex}"

    def url(self, *, short_lease: bool = False) -> str:
        return self.address

    async def stop(self) -> None:
        await super().stop()
        SHELVES.clear()


@pytest.fixture(autouse=True, scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the backend the way pip would: metadata with an entry point, on the path."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "shelf_backend-1.0.dist-info"
    metadata.mkdir()
    Path(metadata, "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-backend\nVersion: 1.0\n")
    Path(metadata, "entry_points.txt").write_text(f"[broker.backends]\nshelf = {__name__}:ShelfBackend\n")
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(site))


@pytest.mark.deep
class TestShelf(Conformance):
    """The kit, as a backend author runs it."""

    harness_class = ShelfHarness


@pytest.fixture
async def harness_of_one() -> AsyncIterator[ShelfHarness]:
    harness = ShelfHarness()
    await harness.start()
    yield harness
    await harness.stop()


async def test_opens_by_url(harness_of_one: ShelfHarness) -> None:
    async with broker.connect("shelf://of-its-own") as bus:
        assert bus.capabilities is CAPABILITIES
        assert (await bus.health()).ok


async def test_the_kit_reports_missing_capabilities() -> None:
    outcomes = await check(
        ShelfHarness, ["records.arrive-unchanged", "leases.held-is-renewed", "messages.ack-is-final"]
    )
    assert {name: (outcome.status, outcome.detail) for name, outcome in outcomes.items()} == {
        "records.arrive-unchanged": ("needs", "records"),
        "leases.held-is-renewed": ("needs", "messages.lease"),
        "messages.ack-is-final": ("kept", ""),
    }
