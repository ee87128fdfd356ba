"""`Pausing`: which partitions a client fetches nothing of, since somebody asked for that or nobody takes what comes.

The client keeps a pause beyond the assignment: a partition that was given away paused, and is given back, is not read
until it is resumed. So what is given away is resumed first. *Concurrency.* All of it in the thread that owns the
client, also within its callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import Consumer

from broker_kafka.consumer_host import native_partitions

__all__ = ["Pausing"]


class Pausing:
    """:param owned: what is assigned now; looked at with each call.

    :ivar parked: whether everything is paused because nobody takes.
    """

    def __init__(self, owned: set[tuple[str, int]]) -> None:
        self.parked = False
        self._owned = owned
        self._asked: set[tuple[str, int]] = set()
        self._stopped: set[tuple[str, int]] = set()
        """Paused in the client."""

    def pause(self, client: Consumer, partitions: Iterable[tuple[str, int]]) -> None:
        """Fetch nothing of these, also where they are assigned later, until they are resumed."""
        self._asked.update(partitions)
        self.apply(client)

    def resume(self, client: Consumer, partitions: Iterable[tuple[str, int]]) -> None:
        """Undo `pause`."""
        self._asked.difference_update(partitions)
        self.apply(client)

    def park(self, client: Consumer) -> None:
        """Fetch nothing at all, also of what is assigned later."""
        self.parked = True
        self.apply(client)

    def unpark(self, client: Consumer) -> None:
        """Undo `park`; what was paused by itself stays so."""
        self.parked = False
        self.apply(client)

    def apply(self, client: Consumer) -> None:
        """Tell the client; also when something was assigned."""
        wanted = self._owned.copy() if self.parked else self._owned & self._asked
        if more := wanted - self._stopped:
            client.pause(native_partitions(more))
        if over := self._stopped - wanted:
            client.resume(native_partitions(over))
        self._stopped = wanted

    def let_go(self, client: Consumer, partitions: Iterable[tuple[str, int]]) -> None:
        """These are given away; the client has them yet."""
        if stopped := self._stopped.intersection(partitions):
            client.resume(native_partitions(stopped))
            self._stopped -= stopped
