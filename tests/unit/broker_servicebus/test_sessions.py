"""Sessions: what happens to a slot that is cancelled while it waits for one."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from broker.errors import OperationTimeout
from broker_servicebus.sessions import ServiceBusSessionSource


class Refused:
    """A link that is told that no session is free."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def open(self) -> None:
        await self.answer.wait()
        raise OperationTimeout("no session is free")


async def test_a_refusal_that_meets_a_cancellation_is_no_error_of_the_loop() -> None:
    source: Any = object.__new__(ServiceBusSessionSource)
    link, reported = Refused(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    slot = asyncio.create_task(source._try_open(link))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    link.answer.set()
    slot.cancel()
    await asyncio.gather(slot, return_exceptions=True)
    assert slot.cancelled()
    del slot
    await asyncio.sleep(0)
    gc.collect()
    assert reported == []
