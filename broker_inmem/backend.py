"""One connection to an in-memory server.

Used from the event loop that opened it; connections of several loops and threads may share a server. Opening and
closing do not wait. Closing releases everything that the connection's consumers hold.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from broker import BrokerError, Capabilities, Closed
from broker.driver import (
    AdminSpi,
    Connected,
    Hooks,
    LogReaderSpi,
    MessageSource,
    MessageSubscription,
    PublishTarget,
    RecordListener,
    RecordSource,
    RecordSubscription,
    SourceListener,
    TransactionSpi,
)
from broker_inmem.admin import InmemAdmin
from broker_inmem.connection import Connection, ConnectionState
from broker_inmem.log_follower import FollowingLogReader, InmemLogFollower
from broker_inmem.messages import InmemMessageSource
from broker_inmem.publishing import InmemPublishTarget
from broker_inmem.records import InmemRecordSource
from broker_inmem.server import Broker
from broker_inmem.settings import InmemSettings
from broker_inmem.topic import partition_of
from broker_inmem.transactions import InmemTransaction

__all__ = ["InmemBackend"]


class InmemBackend:
    """Implements `Backend` and `PartitionsKeys`."""

    settings_type = InmemSettings

    def __init__(self, settings: InmemSettings, hooks: Hooks) -> None:
        self.broker: Broker = settings.server()
        """The server, with its clock and faults."""
        self.connection: Connection | None = None
        """None before `open` and after `close`."""
        self._hooks = hooks
        hooks.raises = self.broker.raises_from_handlers
        self._lease_seconds = settings.lease_seconds or self.broker.options.lease_seconds
        self._open: set[InmemMessageSource | InmemRecordSource | InmemLogFollower | InmemTransaction] = set()
        capabilities = self.broker.capabilities
        if capabilities.messages is not None and self._lease_seconds != capabilities.messages.lease_seconds:
            messages = replace(capabilities.messages, lease_seconds=self._lease_seconds)
            capabilities = replace(capabilities, messages=messages)
        self._capabilities = capabilities

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def open(self) -> None:
        broker = self.broker
        with broker.lock:
            if broker.faults.armed:
                broker.faults.check("open")
            self.connection = broker.connect()
            self.connection.owner = self
        if self._hooks.listening:
            self._hooks.emit(Connected(server=broker.url))

    def publish_target(self, topic: str) -> PublishTarget:
        return InmemPublishTarget(self.broker, self._connection(), topic)

    def partition_of(self, topic: str, key: bytes, partitions: int) -> int:
        return partition_of(key, partitions)

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource:
        source = InmemMessageSource(
            self.broker,
            self._connection(),
            subscription,
            listener,
            lease_seconds=self._lease_seconds,
            on_close=self._open.discard,
        )
        self._open.add(source)
        return source

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource:
        source = InmemRecordSource(self.broker, self._connection(), subscription, listener, on_close=self._open.discard)
        self._open.add(source)
        return source

    async def transaction(self, transactional_id: str) -> TransactionSpi:
        transaction = InmemTransaction(self.broker, self._connection(), transactional_id, on_close=self._open.discard)
        self._open.add(transaction)
        return transaction

    def log_reader(self) -> LogReaderSpi:
        return FollowingLogReader(self.broker, self._connection(), self._hooks.emit, self._open)

    def admin(self) -> AdminSpi:
        return InmemAdmin(self.broker, self._connection())

    async def check_health(self) -> float:
        started = time.perf_counter()
        connection = self._connection()
        # One turn of the loop stands for the round trip.
        await asyncio.sleep(0)
        with self.broker.lock:
            connection.check()
        return time.perf_counter() - started

    async def close(self) -> None:
        for opened in tuple(self._open):
            with suppress(BrokerError):
                await opened.close()
        self._open.clear()
        connection, self.connection = self.connection, None
        if connection is not None:
            with self.broker.lock:
                self.broker.disconnect(connection)

    def _connection(self) -> Connection:
        connection = self.connection
        if connection is None or connection.state is ConnectionState.CLOSED:
            raise Closed("The connection to the in-memory broker is not open", advice="Use it within `async with`")
        return connection
