"""Settlements and lease renewals, by unary calls of up to a thousand ack ids.

Calls may run at once. An exactly-once subscription answers per id: a permanent failure is a lost lease, a transient one
is retried until `settle_timeout`. An id refused after a lost answer may have been settled by that try, so its outcome
is unknown. Other subscriptions accept every ack, so only our own clock detects a late one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import ceil
from time import monotonic
from typing import Any, Final

import grpc

from broker import BrokerError, ConnectionFailed, LeaseLost, Message, OperationTimeout, Outcome, SettleError
from broker.driver import Backoff, Settlement, TaskSet, logger
from broker_pubsub.connection import Connection
from broker_pubsub.errors import failed_ack_ids, is_status, translate
from broker_pubsub.protocol import AcknowledgeRequest, Methods, ModifyAckDeadlineRequest

__all__ = ["SAFE_PART", "Settler"]

MAX_IDS: Final = 1000
SAFE_PART: Final = 0.9
"""The part of a lease that is certainly ours, however long the message travelled."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
_TRANSIENT: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_UNANSWERED: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Transient codes after which the call may have taken effect."""

Results = list[BrokerError | None]


class Settler:
    """Settles the messages of one subscription."""

    def __init__(self, connection: Connection, path: str, name: str, lease: int) -> None:
        self._connection = connection
        self._path = path
        self._name = name
        self._lease = lease
        self._tasks = TaskSet("broker-pubsub-release", lambda error: logger.debug("%s: releasing: %r", name, error))

    async def settle(self, settlements: Sequence[Settlement]) -> Results:
        """Settle messages; returns an error or None for each, LeaseLost after the end of its lease."""
        results: Results = [None] * len(settlements)
        now = monotonic()
        acks: list[int] = []
        retry: dict[int, list[int]] = {}
        for index, settlement in enumerate(settlements):
            if settlement.message.lease < now:
                results[index] = self._lost(settlement.message)
            elif settlement.outcome is Outcome.ACK or settlement.outcome is Outcome.REJECT:
                acks.append(index)
            else:
                delay = settlement.delay or 0.0
                retry.setdefault(ceil(delay), []).append(index)
                if 0 < delay < 1:
                    self._tasks.spawn(self._release_early(settlement.message.raw.ack_id, delay))
        ack_ids = [settlement.message.raw.ack_id for settlement in settlements]
        work = [self._in_batches(acks, ack_ids, results, self._acknowledge)] if acks else []
        work += [
            self._in_batches(indexes, ack_ids, results, lambda ids, s=seconds: self._modify(ids, s))
            for seconds, indexes in retry.items()
        ]
        if len(work) == 1:
            await work[0]
        else:
            await asyncio.gather(*work)
        return results

    async def extend(self, messages: Sequence[Message[Any]]) -> Results:
        """Renew leases; returns an error or None for each, LeaseLost after the end of its lease."""
        results: Results = [None] * len(messages)
        now = monotonic()
        valid: list[int] = []
        for index, message in enumerate(messages):
            if message.lease < now:
                results[index] = self._lost(message)
            else:
                valid.append(index)
        ack_ids = [message.raw.ack_id for message in messages]
        await self._in_batches(valid, ack_ids, results, lambda ids: self._modify(ids, self._lease))
        until = now + SAFE_PART * self._lease
        for index in valid:
            if results[index] is None:
                messages[index].lease = until
        return results

    async def set_lease(self, ack_ids: Sequence[str]) -> Results:
        """Set the lease of new messages to `lease_seconds`; on failure they keep that of the subscription."""
        results: Results = [None] * len(ack_ids)
        await self._in_batches(range(len(ack_ids)), ack_ids, results, lambda ids: self._modify(ids, self._lease))
        return results

    async def release(self, ack_ids: Sequence[str]) -> None:
        """Return messages to the service for immediate redelivery."""
        results: Results = [None] * len(ack_ids)
        await self._in_batches(range(len(ack_ids)), ack_ids, results, lambda ids: self._modify(ids, 0))

    async def close(self) -> None:
        """Cancel delayed releases: these messages are redelivered after one second."""
        await self._tasks.wait(0)

    async def _release_early(self, ack_id: str, delay: float) -> None:
        """The service counts whole seconds, so a delay below one second is timed here."""
        await asyncio.sleep(delay)
        await self.release([ack_id])

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

    async def _in_batches(
        self, indexes: Sequence[int], ack_ids: Sequence[str], results: Results, start: Callable[[Sequence[str]], Any]
    ) -> None:
        for begin in range(0, len(indexes), MAX_IDS):
            part = indexes[begin : begin + MAX_IDS]
            await self._request(part, ack_ids, results, start, monotonic() + self._connection.settings.settle_timeout)

    async def _request(
        self,
        indexes: Sequence[int],
        ack_ids: Sequence[str],
        results: Results,
        start: Callable[[Sequence[str]], Any],
        until: float,
    ) -> None:
        backoff, unanswered = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), False
        while indexes:
            try:
                await start([ack_ids[index] for index in indexes])
                return
            except grpc.aio.AioRpcError as failure:
                error = translate(failure, self._name, "subscription")
                failed = failed_ack_ids(failure)
                transient = is_status(failure, *_TRANSIENT) and error.retriable
                refused = is_status(failure, grpc.StatusCode.INVALID_ARGUMENT)
                if transient and is_status(failure, *_UNANSWERED) and not isinstance(error, ConnectionFailed):
                    # Only for acks: a nack or renewal that is refused afterwards is a lost lease anyway.
                    unanswered = unanswered or start == self._acknowledge
            except (BrokerError, grpc.aio.UsageError) as failure:
                error, failed, transient, refused = translate(failure, self._name), {}, False, False
            if failed:
                indexes = self._record_failures(indexes, ack_ids, failed, results, error, unanswered=unanswered)
            elif refused and len(indexes) > 1:
                middle = len(indexes) // 2
                await self._request(indexes[:middle], ack_ids, results, start, until)
                indexes = indexes[middle:]
                continue
            elif not transient:
                lost = (
                    LeaseLost(f"{self._name}: the server refused the ack id", native=error.native) if refused else error
                )
                for index in indexes:
                    results[index] = lost
                return
            pause = backoff.next()
            if indexes and monotonic() + pause > until:
                for index in indexes:
                    results[index] = OperationTimeout(
                        f"{self._name}: not confirmed in time",
                        native=error.native,
                        advice="The message may be redelivered",
                    )
                return
            await asyncio.sleep(pause if indexes else 0)

    def _record_failures(
        self,
        indexes: Sequence[int],
        ack_ids: Sequence[str],
        failed: Any,
        results: Results,
        error: BrokerError,
        *,
        unanswered: bool,
    ) -> list[int]:
        """Record permanent failures; returns the indexes to retry. All others succeeded."""
        retry: list[int] = []
        for index in indexes:
            reason = failed.get(ack_ids[index])
            if reason is None:
                continue
            if reason.startswith("TRANSIENT"):
                retry.append(index)
            elif unanswered:
                results[index] = SettleError(
                    f"{self._name}: no answer, and the next try was refused ({reason})",
                    native=error.native,
                    advice="The message was settled, or will be redelivered",
                )
            else:
                results[index] = LeaseLost(
                    f"{self._name}: the server refused the ack id ({reason})", native=error.native
                )
        return retry

    def _lost(self, message: Message[Any]) -> LeaseLost:
        return LeaseLost(f"Message {message.id!r} of {self._name} was held for longer than its lease")
