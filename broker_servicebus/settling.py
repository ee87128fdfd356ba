"""Acks, nacks, rejections and lock renewals of one entity: batched into one request, or one by one by public calls.

A request has one answer for all its messages. If one of them has lost its lock, the server refuses all, and halves are
retried within a bound; the rest is reported lost, because unsettled messages are redelivered. After a break of the
connection a request is retried for at most `settle_timeout` seconds. A message whose lock is lost after a break may
have been settled before it, so its outcome is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Final

from azure.servicebus.aio import ServiceBusReceiver

from broker import BrokerError, LeaseLost, Message, NotFound, Outcome, SettleError, Unsupported
from broker.driver import Backoff, Settlement
from broker_servicebus import private_api
from broker_servicebus.codec import Raw
from broker_servicebus.connection import Connection
from broker_servicebus.errors import is_broken
from broker_servicebus.receiving import ReceiverLink

__all__ = ["FRESH_PART", "SAFE_PART", "Settler", "already_deleted"]

_DISPOSITIONS: Final = {Outcome.ACK: "completed", Outcome.NACK: "abandoned", Outcome.REJECT: "suspended"}
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
_LARGEST: Final = 500
"""Messages of one request."""
SAFE_PART: Final = 0.98
"""The part of a lock's time for which a message is certainly ours."""
FRESH_PART: Final = 0.9
"""A lock with more than this part of its time left is not renewed: the next renewal comes a third of it later."""
_MAX_REASON: Final = 1024
_MAX_DESCRIPTION: Final = 2048

_Call = Callable[[ServiceBusReceiver, Sequence[Raw]], Awaitable[None]]


class Settler:
    """Settles the messages of one link."""

    def __init__(self, connection: Connection, link: ReceiverLink, name: str, lock_seconds: float) -> None:
        self._connection = connection
        self._link = link
        self._name = name
        self.lock_seconds = lock_seconds

    async def settle(self, settlements: Sequence[Settlement]) -> list[BrokerError | None]:
        """Settle messages; returns an error or None for each."""
        results: list[BrokerError | None] = [None] * len(settlements)
        groups: dict[tuple[Outcome, str, str], list[int]] = {}
        now = monotonic()
        for index, settlement in enumerate(settlements):
            if settlement.message.raw.until < now:
                results[index] = _lost(settlement.message, "settled")
            else:
                # Only a rejection carries its reason; all others can share a request.
                rejected = settlement.outcome is Outcome.REJECT
                reason = settlement.reason[:_MAX_REASON] if rejected else ""
                description = settlement.error[:_MAX_DESCRIPTION] if rejected else ""
                groups.setdefault((settlement.outcome, reason, description), []).append(index)
        for (outcome, reason, description), indexes in groups.items():
            raws: list[Raw] = [settlements[index].message.raw for index in indexes]
            for index, error in zip(indexes, await self._settle_group(outcome, raws, reason, description), strict=True):
                results[index] = error
        return results

    async def _settle_group(
        self, outcome: Outcome, raws: list[Raw], reason: str = "", description: str = ""
    ) -> list[BrokerError | None]:
        if not self._connection.fast:
            with self._link.busy():
                return [await self._one_by_one(outcome, raw, reason, description) for raw in raws]
        if outcome is Outcome.RELEASE:
            return await self._release(raws)
        why = (reason, description) if outcome is Outcome.REJECT else ()

        async def call(receiver: ServiceBusReceiver, part: Sequence[Raw]) -> None:
            await private_api.settle(receiver, _DISPOSITIONS[outcome], [raw.native.lock_token for raw in part], *why)
            for raw in part:
                raw.settled = True

        return await self._in_batches(raws, call)

    async def extend(self, messages: Sequence[Message[Any]]) -> list[BrokerError | None]:
        """Renew the locks that are not fresh; returns an error or None for each."""
        results: list[BrokerError | None] = [None] * len(messages)
        now = monotonic()
        due: list[int] = []
        for index, message in enumerate(messages):
            if message.raw.until < now:
                results[index] = _lost(message, "renewed")
            elif message.raw.until - now < FRESH_PART * self.lock_seconds:
                due.append(index)
        if due:
            errors = await self._renew([messages[index].raw for index in due])
            for index, error in zip(due, errors, strict=True):
                results[index] = error
        return results

    async def _renew(self, raws: list[Raw]) -> list[BrokerError | None]:
        seconds = self._connection.settings.request_timeout

        async def call(receiver: ServiceBusReceiver, part: Sequence[Raw]) -> None:
            begin = monotonic()
            # A message that was settled meanwhile would make the server refuse the whole request.
            part = [raw for raw in part if not raw.settled]
            if self._connection.fast and part:
                await private_api.renew(receiver, [raw.native.lock_token for raw in part], seconds)
            elif not self._connection.fast:
                for raw in part:
                    await receiver.renew_message_lock(raw.native, timeout=seconds)
            for raw in part:
                raw.until = begin + SAFE_PART * self.lock_seconds

        return await self._in_batches(raws, call, batched=self._connection.fast)

    async def _release(self, raws: list[Raw]) -> list[BrokerError | None]:
        """Release messages: without counting a delivery if they came over the current link, else by abandoning them."""

        async def call(receiver: ServiceBusReceiver) -> list[Raw]:
            left: list[Raw] = []
            for raw in raws:
                if raw.link is receiver:
                    await private_api.release(receiver, raw.native)
                    raw.settled = True
                else:
                    left.append(raw)
            return left

        try:
            others = await self._link.run(call)
        except BrokerError as error:
            return [error] * len(raws)
        if not others:
            return [None] * len(raws)
        errors = await self._settle_group(Outcome.NACK, others)
        failures = {id(raw): error for raw, error in zip(others, errors, strict=True)}
        return [failures.get(id(raw)) for raw in raws]

    async def _one_by_one(self, outcome: Outcome, raw: Raw, reason: str, description: str) -> BrokerError | None:
        native = raw.native

        async def call(receiver: ServiceBusReceiver, _: Sequence[Raw]) -> None:
            if outcome is Outcome.ACK:
                await receiver.complete_message(native)
            elif outcome is Outcome.REJECT:
                await receiver.dead_letter_message(native, reason=reason or None, error_description=description or None)
            else:
                await receiver.abandon_message(native)
            raw.settled = True

        return (await self._in_batches([raw], call))[0]

    async def _in_batches(self, raws: list[Raw], call: _Call, *, batched: bool = True) -> list[BrokerError | None]:
        """Process batches, and halves of refused batches."""
        results: dict[int, BrokerError | None] = {}
        step = _LARGEST if batched else 1
        parts = [raws[start : start + step] for start in range(0, len(raws), step)]
        left = len(parts) + 2 * len(raws).bit_length() + 8
        while parts:
            part = parts.pop()
            error: BrokerError | None
            if left <= 0:
                error = LeaseLost(f"{self._name}: too many locks were lost at once")
            else:
                left -= 1
                error = await self._retry(part, call)
            if isinstance(error, LeaseLost) and left > 0 and len(part) > 1:
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                continue
            results |= {id(raw): error for raw in part}
        return [results[id(raw)] for raw in raws]

    async def _retry(self, part: Sequence[Raw], call: _Call) -> BrokerError | None:
        deadline = monotonic() + self._connection.settings.settle_timeout
        backoff, broken = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), False
        while True:
            try:
                await self._link.run(lambda receiver: call(receiver, part))
            except LeaseLost as error:
                if not broken:
                    return error
                return SettleError(
                    f"{self._name}: the connection broke before the answer, and the lock is lost",
                    native=error.native,
                    advice="The message was settled, or will be redelivered",
                )
            except NotFound as error:
                return LeaseLost(
                    f"{self._name} was deleted", native=error, advice="Its unsettled messages were deleted with it"
                )
            except BrokerError as error:
                pause = backoff.next()
                if not error.retriable or monotonic() + pause > deadline:
                    return error
                broken = broken or is_broken(error)
                await asyncio.sleep(pause)
            else:
                return None


def already_deleted(name: str) -> BrokerError:
    """The error of a nack or rejection with receive_and_delete."""
    return Unsupported(f"{name}: the message was deleted when it was received", advice="Omit receive_and_delete")


def _lost(message: Message[Any], what: str) -> LeaseLost:
    return LeaseLost(f"The lock of message {message.id!r} ended before it was {what}")
