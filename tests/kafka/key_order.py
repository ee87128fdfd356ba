"""What a consumer of a queue is handed of one key, in the order in which it comes."""

from __future__ import annotations

from collections.abc import Sequence

import broker
from broker.outbound import OutboundMessage
from broker.testing.waiting import take

__all__ = ["handed_over"]

_PATIENCE = 60.0


async def handed_over(
    bus: broker.Bus, topic: str, inbox: broker.MessageIterator, bodies: Sequence[bytes], *, key: str = "k"
) -> list[bytes | None]:
    """Publish these under one key, and take and ack as many, one by one."""
    await bus.topic(topic).publish_batch([OutboundMessage(body, key=key) for body in bodies])
    handled: list[bytes | None] = []
    while len(handled) < len(bodies):
        (message,) = await take(inbox, 1, _PATIENCE)
        handled.append(message.data)
        await message.ack()
    return handled
