"""A backend that does nothing, so that a run costs what the facade costs.

Every subscription delivers `count` messages and is then idle; every publish succeeds. On one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from broker.capabilities import Capabilities, ConfirmedAck, LeaseMode, MessageCapabilities, PublishCapabilities
from broker.driver.contract import MessageSubscription, RecordListener, RecordSubscription, Settlement, SourceListener
from broker.envelopes import NO_ATTRIBUTES
from broker.errors import BrokerError, Unsupported
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.receipts import Receipt

__all__ = ["BODY", "NullBackend"]

BODY = b"x" * 100
_RECEIPT = Receipt("null")


class NullBackend:
    """Implements `broker.driver.contract.Backend`.

    :param count: number of messages of each subscription.
    """

    capabilities = Capabilities(
        backend="null",
        publish=PublishCapabilities(deduplication=True, reports_duplicates=True),
        messages=MessageCapabilities(
            lease=LeaseMode.RENEW,
            lease_seconds=30.0,
            confirmed_ack=ConfirmedAck.ALWAYS,
            native_delay=1000.0,
            delivery_attempt=True,
        ),
    )

    def __init__(self, count: int) -> None:
        self._count = count

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def check_health(self) -> float:
        return 0.0

    def publish_target(self, topic: str) -> _Target:
        return _Target()

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> _Source:
        return _Source(subscription.topic, self._count)

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> NoReturn:
        raise _unsupported()

    async def transaction(self, transactional_id: str) -> NoReturn:
        raise _unsupported()

    def log_reader(self) -> NoReturn:
        raise _unsupported()

    def admin(self) -> NoReturn:
        raise _unsupported()


class _Target:
    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        return [_RECEIPT] * len(messages)

    async def close(self) -> None: ...


class _Source:
    def __init__(self, topic: str, count: int) -> None:
        self._topic = topic
        self._left = count
        self._idle: asyncio.Future[None] | None = None

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        if not self._left:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._idle,), timeout=wait)
            return ()
        count = min(max_messages, self._left)
        self._left -= count
        topic = self._topic
        return [Message(topic, BODY, None, _VIEW, None, 100) for _ in range(count)]

    def interrupt(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        return [None] * len(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        return [None] * len(messages)

    async def close(self) -> None: ...


class _View:
    def id(self, raw: Any, /) -> str:
        return "null"

    def key(self, raw: Any, /) -> bytes | None:
        return None

    def attributes(self, raw: Any, /) -> Mapping[str, str]:
        return NO_ATTRIBUTES

    def publish_time(self, raw: Any, /) -> datetime | None:
        return None

    def broker_time(self, raw: Any, /) -> datetime | None:
        return None

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return 1

    def native(self, raw: Any, /) -> Any:
        return None


_VIEW = _View()


def _unsupported() -> Unsupported:
    return Unsupported("The null backend has only messages")
