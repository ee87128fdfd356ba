"""The topics of the queue, what is written there, and making them anew. Making them waits for the broker."""

from __future__ import annotations

from typing import Final

import msgspec

import broker
from broker.codecs import Json

__all__ = ["DEAD", "DONE", "DONE_JSON", "FLIGHTS", "SUBSCRIPTION", "Done", "make_topics"]

FLIGHTS: Final = "demo.queue.flights"
"""The jobs, and those that are sent again."""
DONE: Final = "demo.queue.done"
"""What the workers have done; written before the job is acked."""
DEAD: Final = "demo.queue.dead"
"""The dead letters."""
SUBSCRIPTION: Final = "demo.queue"


class Done(msgspec.Struct, frozen=True, gc=False):
    """A job was done.

    :ivar id: of the message.
    :ivar worker: the name of who did it.
    :ivar attempt: which delivery it was.
    """

    id: str
    worker: str
    attempt: int


DONE_JSON: Final = Json(Done)


async def make_topics(bus: broker.Bus, partitions: int) -> None:
    """Delete what an earlier demo left, and make the topics.

    :param partitions: of the jobs; each worker has one at least, if there are as many.
    """
    # A subscription is deleted by way of its topic, and takes the topic of its markers along.
    await bus.admin.ensure_topic(FLIGHTS)
    await bus.admin.delete_subscription(FLIGHTS, SUBSCRIPTION)
    for name in (FLIGHTS, DONE, DEAD):
        await bus.admin.delete_topic(name)
    await bus.admin.ensure_topic(FLIGHTS, partitions=partitions)
    for name in (DONE, DEAD):
        # So that what comes of a job is read in the order in which it was written.
        await bus.admin.ensure_topic(name, partitions=1)
