"""`Hearing`: does what is asked of a member once its client has told the news of the group.

A member may have lost partitions, and joined again, before it polls. Hence a commit, and whatever else speaks for the
member, polls first. That poll may call back to give partitions up, and whoever gives them up waits for just this work:
so it is done at the begin of the callback then, and not after the poll.

*Concurrency.* All of it in the thread that owns the client. *Failure.* An exception of the work is raised by `then`,
and by no callback.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer
from confluent_kafka import Message as NativeRecord

__all__ = ["Hearing"]


class Hearing:
    """:param keep: is given the record that a poll brings: one at most, since callbacks come before records.

    :ivar calling_back: whether the thread is within a callback of the client, where nothing is polled.
    """

    def __init__(self, keep: Callable[[NativeRecord], object]) -> None:
        self._keep = keep
        self._due: Callable[[Consumer], object] | None = None
        self._failure: Exception | None = None
        self.calling_back = False

    def listen(self, client: Consumer) -> None:
        """Have the client tell the news."""
        message: Any = client.poll(0)
        if message is not None:
            self._keep(message)

    def then(self, client: Consumer, work: Callable[[Consumer], object]) -> None:
        """Do this when the client has told the news."""
        if self.calling_back:
            work(client)
            return
        self._due = work
        try:
            self.listen(client)
        finally:
            self._do_what_is_due(client)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def callback(self, client: Consumer) -> Generator[None]:
        """Within the block somebody is asked to give up, or to take over, what the client says."""
        self.calling_back = True
        try:
            self._do_what_is_due(client)
            yield
        finally:
            self.calling_back = False

    def _do_what_is_due(self, client: Consumer) -> None:
        due, self._due = self._due, None
        if due is not None:
            try:
                due(client)
            except Exception as error:
                self._failure = error
