"""Opens the transactional publisher of a bus, and closes it when the block ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from broker.capabilities import Capabilities
from broker.errors import Unsupported
from broker.hooks import Hooks
from broker.names import check_name
from broker.publishing.transactions import TransactionalPublisherFacade
from broker.spi import Backend

__all__ = ["open_transactional_publisher"]


@asynccontextmanager
async def open_transactional_publisher(
    transactional_id: str,
    backend: Backend,
    capabilities: Capabilities,
    hooks: Hooks,
    check_open: Callable[[], None],
) -> AsyncGenerator[TransactionalPublisherFacade]:
    """Open the publisher of this id, which fences an older one; close it when the block ends.

    :param check_open: raises Closed if the bus is not open.
    :raises Unsupported: the backend has no transactions.
    """
    if not capabilities.publish.transactions:
        raise Unsupported(f"Backend {capabilities.backend!r} has no transactions")
    check_name(transactional_id, "transactional id")
    check_open()
    publisher = TransactionalPublisherFacade(
        transactional_id, await backend.transaction(transactional_id), capabilities, hooks
    )
    try:
        yield publisher
    finally:
        await publisher.close()
