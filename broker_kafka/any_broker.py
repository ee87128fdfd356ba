"""What any broker can tell of the cluster: asked of another one where the first is silent.

librdkafka goes on asking the broker that it asked last for as long as the connection stands, which is that of a frozen
one too; a new client asks only those that have answered it.

*Concurrency.* Stateless; any number at once. *Cancellation.* Leaves nothing behind. *Failure.* A BrokerError if nobody
answers in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from broker.errors import BrokerError, ConnectionFailed, OperationTimeout
from broker_kafka.connection import Connection

__all__ = ["Patience", "find_controller", "is_silence", "leave", "read_metadata"]

_LEAST: Final = 0.01
_PAUSE: Final = 0.05
_LOOKS: Final = 5
_SETTLING: Final = 0.1


class Patience:
    """The time for a request, and how much of it one broker gets: others are left enough of it.

    :param timeout: seconds.
    """

    SHARE: Final = 0.2

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._until = monotonic() + timeout

    @property
    def over(self) -> bool:
        return monotonic() >= self._until

    @property
    def left(self) -> float:
        return max(_LEAST, self._until - monotonic())

    @property
    def of_one(self) -> float:
        # The last one has all there is: it may be the cluster that is slow.
        left = self.left
        return left if left < self._timeout / 2 else self._timeout * self.SHARE


def is_silence(result: object) -> bool:
    """Whether this is the error of a broker that did not answer."""
    return isinstance(result, OperationTimeout | ConnectionFailed)


async def read_metadata(connection: Connection, what: str, timeout: float, topic: str | None = None) -> Any:
    """The library's metadata of the cluster and its topics, or of one topic, which it may make.

    :param what: what it is for, for the error. :param timeout: seconds.
    :raises BrokerError: no broker answered in time.
    """
    only: Sequence[str] = () if topic is None else (topic,)
    patience = Patience(timeout)
    while True:
        client, seconds = connection.client, patience.of_one
        try:
            return await connection.call(lambda admin, seconds=seconds: admin.list_topics(*only, timeout=seconds), what)
        except BrokerError as error:
            if not is_silence(error) or patience.over:
                raise
        await leave(connection, client)


async def leave(connection: Connection, client: object) -> None:
    """Go on with another client than this one, which waits for a broker that is silent."""
    if not connection.down:
        await connection.renew(client)
    await asyncio.sleep(_PAUSE)


async def find_controller(connection: Connection, what: str, timeout: float) -> None:
    """Have the client take a broker for the controller that answers: it asks that one what any of them could answer.

    Without ZooKeeper, a broker that is asked for metadata names any one, a frozen one too while it counts as present.

    :raises BrokerError: no broker answered in time.
    """
    patience = Patience(timeout)
    # A new client looks around by itself, whenever it gets a connection.
    await asyncio.sleep(_SETTLING)
    for _ in range(_LOOKS):
        found = await read_metadata(connection, what, patience.left)
        if found.controller_id == found.orig_broker_id:
            return
