"""Carries out settlements and renewals by unary calls of a thousand ack ids, and finds out the fate of each.

Calls may run at once. An exactly-once subscription answers for each id: a lasting failure is a lost lease, a passing
one is tried again until `settle_timeout`, and an id that is refused after an answer was lost may have been settled by
that try, which is told as unknown. Elsewhere the service takes what it is given, so that only our own clock
knows a late ack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import ceil
from time import monotonic
from typing import Any, Final

import grpc

from broker import BrokerError, ConnectionFailed, LeaseLost, Message, OperationTimeout, Outcome, SettleError
from broker.driver import Settlement
from broker_pubsub.connection import Connection
from broker_pubsub.errors import classify, failed_ack_ids, is_status
from broker_pubsub.protocol import AcknowledgeRequest, Methods, ModifyAckDeadlineRequest

__all__ = ["CERTAIN", "Settler"]

MAX_IDS: Final = 1000
CERTAIN: Final = 0.9
"""How much of a lease is surely ours, whatever the message's way here took."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
_PASSING: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_UNANSWERED: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Some of those, after which a call may have been carried out."""

Results = list[BrokerError | None]


class Settler:
    """Of one subscription."""

    def __init__(self, connection: Connection, path: str, name: str, lease: int) -> None:
        self._connection = connection
        self._path = path
        self._name = name
        self._lease = lease
        self._timers: set[asyncio.TimerHandle] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def settle(self, settlements: Sequence[Settlement]) -> Results:
        """One entry each; LeaseLost for what was held for longer than its lease."""
        results: Results = [None] * len(settlements)
        now = monotonic()
        acks: list[int] = []
        again: dict[int, list[int]] = {}
        for index, settlement in enumerate(settlements):
            if settlement.message.lease < now:
                results[index] = self._lost(settlement.message)
            elif settlement.outcome is Outcome.ACK or settlement.outcome is Outcome.REJECT:
                acks.append(index)
            else:
                delay = settlement.delay or 0.0
                again.setdefault(ceil(delay), []).append(index)
                if 0 < delay < 1:
                    self._sooner(settlement.message.raw.ack_id, delay)
        ack_ids = [settlement.message.raw.ack_id for settlement in settlements]
        work = [self._in_parts(acks, ack_ids, results, self._acknowledge)] if acks else []
        work += [
            self._in_parts(indexes, ack_ids, results, lambda ids, s=seconds: self._modify(ids, s))
            for seconds, indexes in again.items()
        ]
        if len(work) == 1:
            await work[0]
        else:
            await asyncio.gather(*work)
        return results

    async def extend(self, messages: Sequence[Message[Any]]) -> Results:
        """Renew these; LeaseLost for what is not ours any more."""
        results: Results = [None] * len(messages)
        now = monotonic()
        kept: list[int] = []
        for index, message in enumerate(messages):
            if message.lease < now:
                results[index] = self._lost(message)
            else:
                kept.append(index)
        ack_ids = [message.raw.ack_id for message in messages]
        await self._in_parts(kept, ack_ids, results, lambda ids: self._modify(ids, self._lease))
        until = now + CERTAIN * self._lease
        for index in kept:
            if results[index] is None:
                messages[index].lease = until
        return results

    async def set_lease(self, ack_ids: Sequence[str]) -> Results:
        """Give what has just come the lease that was asked for; what fails keeps the subscription's."""
        results: Results = [None] * len(ack_ids)
        await self._in_parts(range(len(ack_ids)), ack_ids, results, lambda ids: self._modify(ids, self._lease))
        return results

    async def give_back(self, ack_ids: Sequence[str]) -> None:
        """Have these delivered again at once."""
        results: Results = [None] * len(ack_ids)
        await self._in_parts(range(len(ack_ids)), ack_ids, results, lambda ids: self._modify(ids, 0))

    async def close(self) -> None:
        """End what waits; what was nacked for less than a second comes after one."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _sooner(self, ack_id: str, delay: float) -> None:
        """The service counts whole seconds: what is due before the first of them is released by us."""
        loop = asyncio.get_running_loop()

        def due() -> None:
            self._timers.discard(timer)
            task = loop.create_task(self.give_back([ack_id]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        timer = loop.call_later(delay, due)
        self._timers.add(timer)

    def _acknowledge(self, ids: Sequence[str]) -> Any:
        return self._connection.start(
            Methods.ACKNOWLEDGE,
            AcknowledgeRequest(subscription=self._path, ack_ids=ids),
            self._connection.settings.request_timeout,
        )

    def _modify(self, ids: Sequence[str], seconds: int) -> Any:
        return self._connection.start(
            Methods.MODIFY_ACK_DEADLINE,
            ModifyAckDeadlineRequest(subscription=self._path, ack_ids=ids, ack_deadline_seconds=seconds),
            self._connection.settings.request_timeout,
        )

    async def _in_parts(
        self, indexes: Sequence[int], ack_ids: Sequence[str], results: Results, start: Callable[[Sequence[str]], Any]
    ) -> None:
        for begin in range(0, len(indexes), MAX_IDS):
            part = indexes[begin : begin + MAX_IDS]
            await self._ask(part, ack_ids, results, start, monotonic() + self._connection.settings.settle_timeout)

    async def _ask(
        self,
        indexes: Sequence[int],
        ack_ids: Sequence[str],
        results: Results,
        start: Callable[[Sequence[str]], Any],
        until: float,
    ) -> None:
        pause, unanswered = _FIRST_PAUSE, False
        while indexes:
            try:
                await start([ack_ids[index] for index in indexes])
                return
            except grpc.aio.AioRpcError as failure:
                error = classify(failure, self._name, "subscription")
                failed = failed_ack_ids(failure)
                passing = is_status(failure, *_PASSING) and error.retriable
                refused = is_status(failure, grpc.StatusCode.INVALID_ARGUMENT)
                if passing and is_status(failure, *_UNANSWERED) and not isinstance(error, ConnectionFailed):
                    # A nack or renewal that is refused afterwards was lost either way.
                    unanswered = unanswered or start == self._acknowledge
            except (BrokerError, grpc.aio.UsageError) as failure:
                error, failed, passing, refused = classify(failure, self._name), {}, False, False
            if failed:
                indexes = self._sort_out(indexes, ack_ids, failed, results, error, unanswered=unanswered)
            elif refused and len(indexes) > 1:
                middle = len(indexes) // 2
                await self._ask(indexes[:middle], ack_ids, results, start, until)
                indexes = indexes[middle:]
                continue
            elif not passing:
                lost = LeaseLost(f"{self._name}: the server refused it", native=error.native) if refused else error
                for index in indexes:
                    results[index] = lost
                return
            if indexes and monotonic() + pause > until:
                for index in indexes:
                    results[index] = OperationTimeout(
                        f"{self._name}: not confirmed in time", native=error.native, advice="The message may come again"
                    )
                return
            await asyncio.sleep(pause if indexes else 0)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _sort_out(
        self,
        indexes: Sequence[int],
        ack_ids: Sequence[str],
        failed: Any,
        results: Results,
        error: BrokerError,
        *,
        unanswered: bool,
    ) -> list[int]:
        """Put down what failed for good; return what is to be tried again. The others are done."""
        again: list[int] = []
        for index in indexes:
            reason = failed.get(ack_ids[index])
            if reason is None:
                continue
            if reason.startswith("TRANSIENT"):
                again.append(index)
            elif unanswered:
                results[index] = SettleError(
                    f"{self._name}: no answer came, and the next try was refused ({reason})",
                    native=error.native,
                    advice="It was settled, or comes again",
                )
            else:
                results[index] = LeaseLost(f"{self._name}: the server refused it ({reason})", native=error.native)
        return again

    def _lost(self, message: Message[Any]) -> LeaseLost:
        return LeaseLost(f"Message {message.id!r} of {self._name} was held for longer than its lease")
