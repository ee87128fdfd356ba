"""The topics of the queue and their payloads."""

from __future__ import annotations

from typing import Final

import msgspec

import broker
from broker.codecs import Json

__all__ = ["DEAD", "DONE", "DONE_JSON", "FLIGHTS", "SUBSCRIPTION", "Done", "make_topics"]

FLIGHTS: Final = "demo.queue.flights"
"""The jobs, including republished ones."""
DONE: Final = "demo.queue.done"
"""The results; written before the job is acked."""
DEAD: Final = "demo.queue.dead"
"""The dead letters."""
SUBSCRIPTION: Final = "demo.queue"


class Done(msgspec.Struct, frozen=True, gc=False):
    """A job was done.

    :ivar id: of the message.
    :ivar worker: name of the worker.
    :ivar attempt: delivery attempt of the message.
    """

    id: str
    worker: str
    attempt: int


DONE_JSON: Final = Json(Done)


async def make_topics(bus: broker.Bus, partitions: int) -> None:
    """Recreate the topics. Idempotent.

    :param partitions: of the topic of jobs; one per worker keeps all workers busy.
    """
    # Deleting a subscription needs its topic, and deletes its marker topic too.
    await bus.admin.ensure_topic(FLIGHTS)
    await bus.admin.delete_subscription(FLIGHTS, SUBSCRIPTION)
    for name in (FLIGHTS, DONE, DEAD):
        await bus.admin.delete_topic(name)
    await bus.admin.ensure_topic(FLIGHTS, partitions=partitions)
    for name in (DONE, DEAD):
        # One partition, so that the results of a job are read in order.
        await bus.admin.ensure_topic(name, partitions=1)
