"""What the server keeps of transactions: what one of them has done so far, and whose turn it is.

Not locked: the server's lock is held around every call, and no call waits. A transaction ends once; ending it
again changes nothing.
"""

from __future__ import annotations

from typing import Final

from broker import TopicPartition
from broker_inmem.entries import TransactionState
from broker_inmem.groups import Claim, Group
from broker_inmem.topic import Topic, TransactionWork

__all__ = ["Producer", "ServerTransaction"]


class ServerTransaction:
    """One transaction as the server sees it. Not locked: the server's lock is held around every call."""

    def __init__(self) -> None:
        self.state: Final = TransactionState()
        self.expired = False
        self.offsets: list[tuple[Group, dict[TopicPartition, Claim]]] = []
        self._work: dict[Topic, TransactionWork] = {}

    def work(self, topic: Topic) -> TransactionWork:
        """Where what is published to a topic is noted."""
        work = self._work.get(topic)
        if work is None:
            work = self._work[topic] = TransactionWork(self.state)
        return work

    def end(self, *, committed: bool, now: float) -> None:
        """Make it count, or undo it."""
        if self.state.open:
            self.state.committed = committed
            self.state.open = False
            for topic, work in self._work.items():
                topic.end(work, now)

    def expire(self, now: float) -> None:
        """Abort it, if it is still open, because its time is over."""
        if self.state.open:
            self.expired = True
            self.end(committed=False, now=now)


class Producer:
    """All producers of one id; the newest is the only one that may act."""

    def __init__(self) -> None:
        self.epoch = 0
        self.current: ServerTransaction | None = None
