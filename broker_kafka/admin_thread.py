"""`AdminThread`: an admin client of the library in a thread of its own, and the answers to what it was asked.

*Concurrency, cancellation, failure.* As `OwnerThread`; a cancelled request goes on at the brokers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from typing_extensions import TypeVar

from broker.errors import BrokerError
from broker_kafka.errors import configuration_error, translate
from broker_kafka.lifeline import Lifeline
from broker_kafka.owner import OwnerThread
from broker_kafka.tokens import with_token

__all__ = ["AdminThread"]

R = TypeVar("R")
K = TypeVar("K")

_IDLE: Final = 1.0


class AdminThread(OwnerThread[AdminClient]):
    """Owns the admin client, and polls it now and then for its callbacks.

    :ivar asking: how many requests wait for an answer by this client.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__("broker-kafka-admin", Lifeline(config))
        self._config = config
        self.asking = 0

    async def outcomes(
        self, start: Callable[[AdminClient], Mapping[K, Future[R]]], what: str
    ) -> dict[K, R | BrokerError]:
        """Start a request and wait for the answer of each item; an error is in its place.

        :raises BrokerError: it could not be started.
        """
        try:
            futures = await self.call(start)
        except (KafkaException, ValueError, TypeError) as error:
            raise translate(error, what) from error
        waiting = {key: asyncio.wrap_future(future) for key, future in futures.items()}
        results = await asyncio.gather(*waiting.values(), return_exceptions=True)
        return {
            key: translate(result, what) if isinstance(result, BaseException) else result
            for key, result in zip(waiting, results, strict=True)
        }

    def _open(self) -> AdminClient:
        try:
            client = AdminClient(with_token(self._config))
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error, "Making a client", self._config) from error
        self._lifeline.hold(client)
        return client

    def _turn(self, client: AdminClient) -> None:
        client.poll(0)
        self._serve(client, _IDLE)

    def _shut(self, client: AdminClient) -> None:
        client.poll(0)
