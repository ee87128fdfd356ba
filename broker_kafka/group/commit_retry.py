"""Commits of one member of a group: only for partitions that are its own, and each carried out once it was begun.

*Concurrency.* One event loop. Each commit is a task of its own, so that a release can wait for those that were begun.
*Cancellation.* Whoever is cancelled while waiting leaves the commit behind, which goes on. *Failure.* What the store
does not take is told for each partition. In the middle of a rebalance, and while a coordinator moves, a commit is tried
again for a few seconds, as long as its partition has stayed in the assignment it was asked for, and none that is newer
was asked for. A process that was stopped meanwhile waits for its answer anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from broker import BrokerError, LeaseLost, OperationTimeout, TopicPartition
from broker_kafka.client.consumer import ConsumerThread
from broker_kafka.cluster.requests import is_retriable
from broker_kafka.errors import not_assigned
from broker_kafka.offsets.protocol import GroupMember, OffsetStore, StoredOffset

__all__ = ["MemberCommits"]

_PAUSE: Final = 0.1
_PASSING_SECONDS: Final = 5.0
_STOOD_STILL: Final = 0.5
"""A timer that is so late says that this process did not run."""


class MemberCommits:
    """:param owned: what is assigned, with the number of the assignment; looked at, never changed.
    :param owner: as whom the store is told to commit.
    :param timeout: seconds for the answer of the store.

    :ivar any: whether anything was committed, or tried.
    """

    def __init__(
        self,
        store: OffsetStore,
        thread: ConsumerThread,
        owned: Mapping[TopicPartition, int],
        owner: GroupMember,
        *,
        group: str,
        timeout: float,
    ) -> None:
        self._store = store
        self._thread = thread
        self._owned = owned
        self._owner = owner
        self._group = group
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._newest: dict[TopicPartition, asyncio.Task[Mapping[TopicPartition, BrokerError | None]]] = {}
        self._closed = False
        self.any = False

    async def commit(
        self, positions: Mapping[TopicPartition, tuple[int, str]]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        """Store positions, and a text with each; the error, or None, for each."""
        results: dict[TopicPartition, BrokerError | None] = {
            partition: not_assigned(partition, self._group) for partition in positions if partition not in self._owned
        }
        ours = {each: StoredOffset(*position) for each, position in positions.items() if each in self._owned}
        if ours:
            # Before the task begins a partition may be taken away.
            mine = {partition: self._owned[partition] for partition in ours}
            task = self._loop.create_task(self._carry_out(ours, mine), name="broker-kafka-commit")
            self._under_way.add(task)
            self._newest.update(dict.fromkeys(ours, task))
            task.add_done_callback(self._under_way.discard)
            results |= await asyncio.shield(task)
        return results

    async def settled(self, deadline: float) -> None:
        """Wait for what was begun, at most until this loop time."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=max(0.0, deadline - self._loop.time()))

    def close(self) -> None:
        """Try nothing again."""
        self._closed = True

    async def _carry_out(
        self, positions: Mapping[TopicPartition, StoredOffset], mine: dict[TopicPartition, int]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        self.any = True
        within = self._thread.calling_back
        results = dict(await self._once(positions))
        # The answer may have waited for a rebalance, however long that took, and a refusal tells of its end.
        until = self._loop.time() + _PASSING_SECONDS
        # In the middle of a rebalance a member is of no generation, and may keep its partitions in the next. A new
        # coordinator loads what the former one stored, and the client does not wait for all of that.
        while again := {
            partition: positions[partition]
            for partition, error in results.items()
            if (isinstance(error, LeaseLost) or (is_retriable(error) and not isinstance(error, OperationTimeout)))
            and partition in mine
            and self._owned.get(partition) == mine[partition]
        }:
            # Within a callback the generation stays; what was sent before it was of an earlier one.
            if (within and self._thread.calling_back) or self._closed or self._loop.time() > until:
                break
            await asyncio.sleep(_PAUSE)
            for partition in again:
                newest = self._newest[partition]
                if newest is not asyncio.current_task():
                    # To try again would undo a newer position: what became of that one is the answer.
                    del mine[partition]
                    results[partition] = (await asyncio.shield(newest))[partition]
            if still := {partition: positions[partition] for partition in again if partition in mine}:
                within = self._thread.calling_back
                results |= await self._once(still)
        return results

    async def _once(
        self, positions: Mapping[TopicPartition, StoredOffset]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        answer = asyncio.ensure_future(self._store.commit(self._owner, positions))
        try:
            for _ in range(2):
                until = self._loop.time() + self._timeout
                await asyncio.wait((answer,), timeout=self._timeout)
                if answer.done():
                    return answer.result()
                # What was stopped or suspended has not waited: the answer may be here, and nobody has looked.
                if self._loop.time() < until + _STOOD_STILL:
                    break
        except BrokerError as error:
            return dict.fromkeys(positions, error)
        finally:
            answer.cancel()
        late = OperationTimeout(f"The commit of group {self._group!r} got no answer in time")
        return dict.fromkeys(positions, late)
