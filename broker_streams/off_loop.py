"""`in_thread`: makes calls of stores that may wait for the disk, while the loop and its partitions go on.

*Cancellation.* A call that has begun is waited for, so that nothing else uses its store meanwhile; its result is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Make this call in a thread, and return or raise what it does."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait((running,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()
        raise cancelled
    return running.result()
