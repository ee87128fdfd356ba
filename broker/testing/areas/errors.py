"""Conformance tests of errors: the right class, with advice and without secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import pytest

import broker
from broker.consuming.retry.policy import Retry
from broker.errors import (
    AuthenticationFailed,
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    InvalidSetting,
    LeaseLost,
    SubscriptionNotFound,
    TopicNotFound,
    UnknownScheme,
    UnknownSetting,
    Unsupported,
    WrongEventLoop,
)
from broker.messages import Message
from broker.names import ephemeral
from broker.testing.areas.admin import listed
from broker.testing.areas.retry import QUICK
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import numbered, take, until_seen
from broker.topic_patterns import TopicPattern

__all__ = ["Errors"]


class Errors(ConformanceCase):
    """Invalid input, and missing topics, subscriptions and servers."""

    @promise(
        "errors.unknown-scheme",
        "A URL with an unknown scheme raises UnknownScheme before any I/O, and names the known schemes.",
    )
    async def test_unknown_scheme(self, harness: Harness) -> None:
        with pytest.raises(UnknownScheme) as raised:
            broker.connect("nonesuch://localhost")
        assert raised.value.advice
        for malformed in ("", "localhost:4222/x y", "://nothing"):
            with pytest.raises(ConfigurationError):
                broker.connect(malformed)

    @promise(
        "errors.other-event-loop",
        "A call from another event loop raises WrongEventLoop at once and does nothing; the bus works on.",
        seconds=60,
    )
    async def test_other_event_loop(self, harness: Harness) -> None:
        bus, topic = await harness.connect(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            calls: list[Callable[[], Awaitable[object]]] = [
                bus.open,
                bus.close,
                partial(bus.admin.describe_topic, topic),
                partial(bus.topic(topic).publish, b"y"),
                partial(bus.topic(topic).publish_batch, [b"y"]),
                partial(bus.topic(topic).enqueue, b"y"),
                bus.messages(topic, subscription="others").open,
                inbox.next_message,
                partial(inbox.next_batch, 10),
                message.ack,
                message.nack,
                inbox.close,
            ]
            if bus.capabilities.records is not None:
                calls.append(bus.records(topic, group="others").__aenter__)
                if bus.capabilities.records.log_reader:
                    calls.append(partial(bus.log.bounds, topic))
            for call in calls:
                error = await asyncio.to_thread(_on_another_loop, call)
                assert isinstance(error, WrongEventLoop), call
                assert "event loop" in error.message
                assert error.advice
            await message.ack()
            await bus.topic(topic).publish(b"z")
            (last,) = await take(inbox, 1, harness.patience)
            assert last.data == b"z"
            await last.ack()

    @promise(
        "errors.unknown-parameter",
        "An unknown URL parameter raises UnknownSetting before any I/O, and suggests a valid one.",
    )
    async def test_unknown_parameter(self, harness: Harness) -> None:
        url = _as_url(harness)
        with pytest.raises(UnknownSetting) as raised:
            broker.connect(f"{url}{'&' if '?' in url else '?'}nonesuch_parameter=1")
        assert "nonesuch_parameter" in str(raised.value)
        assert raised.value.advice

    @promise(
        "errors.malformed-value",
        "A malformed value in a URL raises InvalidSetting before any I/O, and shows no secrets.",
    )
    async def test_malformed_value(self, harness: Harness) -> None:
        scheme = _as_url(harness).partition(":")[0]
        with pytest.raises(InvalidSetting) as raised:
            broker.connect(f"{scheme}://user:s3cr3t@host:port-is-no-number")
        assert "s3cr3t" not in str(raised.value)

    @requires("harness.unreachable_url")
    @promise(
        "errors.no-server",
        "Without a server, opening raises ConnectionFailed, which is retriable, after a real attempt.",
    )
    async def test_no_server(self, harness: Harness) -> None:
        async with asyncio.timeout(harness.patience):
            with pytest.raises(ConnectionFailed) as raised:
                async with broker.connect(harness.unreachable_url()):
                    pass
        assert raised.value.retriable
        assert raised.value.advice

    @requires("harness.forbidden_url")
    @promise(
        "errors.wrong-credentials",
        "Wrong credentials raise AuthenticationFailed at open, which is not retriable and shows no secret.",
    )
    async def test_wrong_credentials(self, harness: Harness) -> None:
        async with asyncio.timeout(harness.patience):
            with pytest.raises(AuthenticationFailed) as raised:
                async with broker.connect(harness.forbidden_url()):
                    pass
        assert not raised.value.retriable
        assert raised.value.advice

    @promise(
        "errors.missing-topic",
        "Publishing to or consuming from a missing topic raises TopicNotFound, which says how to create it.",
    )
    async def test_missing_topic(self, harness: Harness) -> None:
        bus, missing = await harness.bus(), unique("missing")
        with pytest.raises(TopicNotFound, match="ensure_topic"):
            await bus.topic(missing).publish(b"x")
        with pytest.raises(TopicNotFound, match="ensure_topic"):
            async with bus.messages(missing, subscription="readers"):
                pass
        with pytest.raises(TopicNotFound):
            async with bus.messages(await harness.topic(), subscription="readers", dead_letter=missing):
                pass
        assert missing not in await bus.admin.topics()

    @promise(
        "errors.missing-subscription",
        "With `create=False`, a missing subscription raises SubscriptionNotFound and is not created.",
    )
    async def test_missing_subscription(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        # A unique name: on some brokers subscriptions with the same name are one over all topics.
        with pytest.raises(SubscriptionNotFound, match="ensure_subscription"):
            async with bus.messages(topic, subscription=unique("readers"), create=False):
                pass
        assert not await listed(bus, topic)

    @promise(
        "errors.failed-open-holds-nothing",
        "A consumer that cannot open one of its topics holds no messages of the others.",
    )
    async def test_failed_open_holds_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(numbered(5))
        with pytest.raises(TopicNotFound):
            async with bus.messages([topic, unique("missing")], subscription="readers"):
                pass
        async with bus.messages(topic, subscription="readers") as inbox:
            await until_seen(inbox, numbered(5), harness.patience)

    @promise(
        "errors.bad-options",
        "Invalid options raise when the consumer is created or opened, before anything is fetched.",
    )
    async def test_bad_options(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        for option, value in [*_BAD, *_BAD_FOR_MESSAGES, ("dead_letter", topic)]:
            options: dict[str, Any] = {"subscription": "readers", option: value}
            _refuses(partial(bus.messages, topic, **options), option)
        if bus.capabilities.records is not None:
            for option, value in [*_BAD, *_BAD_FOR_RECORDS, ("on_decode_error", topic)]:
                options = {"group": "readers", option: value}
                _refuses(partial(bus.records, topic, **options), option)
        assert not await listed(bus, topic)
        with pytest.raises(ConfigurationError):
            bus.messages([], subscription="readers")
        with pytest.raises(ConfigurationError):
            bus.messages([topic, topic], subscription="readers")
        with pytest.raises(ConfigurationError):
            Retry(max_attempts=0)

    @promise(
        "errors.unsupported-is-refused-at-open",
        "An option that the backend lacks raises Unsupported; it is never ignored.",
    )
    async def test_unsupported_is_refused_at_open(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        messages = bus.capabilities.messages
        assert messages is not None
        if not messages.ephemeral:
            with pytest.raises(Unsupported):
                bus.messages(topic, subscription=ephemeral())
        if not messages.start_latest:
            with pytest.raises(Unsupported):
                bus.messages(topic, subscription="readers", start="latest")
        if messages.confirmed_ack == "never":
            with pytest.raises(Unsupported):
                bus.messages(topic, subscription="readers", confirm_acks=True)
        else:
            async with bus.messages(topic, subscription="readers", confirm_acks=True) as inbox:
                await bus.topic(topic).publish(b"x")
                await (await take(inbox, 1, harness.patience))[0].ack()
        if not messages.topic_patterns:
            with pytest.raises(Unsupported):
                bus.messages(TopicPattern(), subscription="readers")
        records = bus.capabilities.records
        if records is None:
            with pytest.raises(Unsupported):
                bus.records(topic, group="readers")
        elif not records.topic_patterns:
            with pytest.raises(Unsupported):
                bus.records(TopicPattern(), group="readers")

    @requires("messages.confirmed_ack", "messages.lease")
    @promise(
        "errors.ack-after-lease-end",
        "A confirmed ack after the end of the lease raises LeaseLost, and the message is redelivered.",
    )
    async def test_ack_after_lease_end(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers", confirm_acks=True, max_lease=0.3, retry=QUICK) as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            (again,) = await take(inbox, 1, harness.patience)
            with pytest.raises(LeaseLost) as raised:
                await message.ack()
            assert raised.value.advice
            await again.ack()

    @promise("errors.not-open", "Using a bus or consumer outside its block raises Closed, which says how to use it.")
    async def test_not_open(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        with pytest.raises(Closed, match="async with"):
            await bus.messages(topic, subscription="readers").next_message(timeout=0)
        unopened = harness.open_bus(harness.url(), None)
        calls: list[Callable[[], Awaitable[object]]] = [
            partial(unopened.topic(topic).publish, b"x"),
            unopened.admin.topics,
            partial(unopened.admin.list_dead, topic),
        ]
        if unopened.capabilities.records is not None:
            calls.append(unopened.records(topic, group="readers").__aenter__)
            if unopened.capabilities.records.log_reader:
                calls.append(lambda: unopened.log.bounds(topic))
        for call in calls:
            with pytest.raises(Closed, match="async with"):
                await call()

    @promise(
        "errors.endless-handler-loses-nothing",
        "After the close, another consumer receives the message of a handler that never returns.",
    )
    async def test_endless_handler_loses_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        started = asyncio.Event()

        async def stubborn(_: Message[bytes]) -> None:
            started.set()
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        release = asyncio.Event()
        async with bus.messages(topic, subscription="readers", close_timeout=0.2) as inbox:
            receiving = asyncio.ensure_future(inbox.receive(stubborn))
            await bus.topic(topic).publish_batch(numbered(5))
            await started.wait()
            async with asyncio.timeout(5):
                await inbox.close()
        async with bus.messages(topic, subscription="readers") as again:
            await until_seen(again, numbered(5), harness.patience)
        release.set()
        await asyncio.wait({receiving}, timeout=harness.patience)

    @promise(
        "errors.all-have-advice",
        "Every error is a BrokerError with `retriable`, `native` and `advice`.",
    )
    async def test_all_have_advice(self, harness: Harness) -> None:
        bus, missing = await harness.bus(), unique("missing")
        with pytest.raises(BrokerError) as raised:
            await bus.topic(missing).publish(b"x")
        error = raised.value
        assert not error.retriable
        assert error.advice
        assert error.advice in str(error)
        assert missing in str(error)


_BAD: Final[tuple[tuple[str, Any], ...]] = (
    ("codec", 5),
    ("codec", broker.Text),
    ("start", "sometime"),
    ("stop_when_idle", -1),
    ("close_timeout", "5"),
)
_BAD_FOR_MESSAGES: Final[tuple[tuple[str, Any], ...]] = (
    ("max_outstanding", 0),
    ("max_outstanding", "5"),
    ("prefetch", 0),
    ("max_lease", 0),
    ("ordered_by_key", "yes"),
    ("confirm_acks", "no"),
    ("create", None),
    ("retry", 5),
)
_BAD_FOR_RECORDS: Final[tuple[tuple[str, Any], ...]] = (
    ("isolation", "x"),
    ("on_decode_error", None),
    ("on_assigned", 5),
    ("on_revoking", 5),
    ("on_lost", 5),
    ("assign_timeout", 0),
    ("copartitioned", "yes"),
    ("max_buffered", "5"),
)


def _refuses(make: Callable[[], object], option: str) -> None:
    with pytest.raises(ConfigurationError, match=option) as raised:
        make()
    assert raised.value.advice


def _as_url(harness: Harness) -> str:
    url = harness.url()
    return url if isinstance(url, str) else url.url


def _on_another_loop(call: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Run the call on a new event loop of this thread; return its error."""

    async def run() -> None:
        async with asyncio.timeout(10):
            await call()

    try:
        asyncio.run(run())
    except Exception as error:
        return error
    return None
