"""Acks, nacks, rejections and lock renewals of one entity: many by one request, or one by one by public calls.

A request is answered for all of its messages together. Where one of them has lost its lock all are refused, and
halves of them are tried, within a bound: what is left then is told as lost, for whatever is not settled comes again. A
break of the connection is waited out, at most `settle_timeout` seconds; a lock that is gone after a break may have been
settled before it, and that is told as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Final

from azure.servicebus.aio import ServiceBusReceiver

from broker import BrokerError, LeaseLost, Message, NotFound, Outcome, SettleError, Unsupported
from broker.driver import Settlement
from broker_servicebus import private_api
from broker_servicebus.codec import Raw
from broker_servicebus.connection import Connection
from broker_servicebus.errors import is_broken
from broker_servicebus.receiving import Wire

__all__ = ["FRESH", "Settler"]

_HOW: Final = {Outcome.ACK: "completed", Outcome.NACK: "abandoned", Outcome.RELEASE: "abandoned"}
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
_LARGEST: Final = 500
"""Messages of one request."""
_CERTAIN: Final = 0.98
FRESH: Final = 0.9
"""A lock of which more is left is not renewed: by the next turn, a third of it later, it still has most of itself."""
_MAX_REASON: Final = 1024
_MAX_DESCRIPTION: Final = 2048

_Ask = Callable[[ServiceBusReceiver, Sequence[Raw]], Awaitable[None]]


class Settler:
    """Settles what came by one wire."""

    def __init__(self, connection: Connection, wire: Wire, name: str, lock_seconds: float) -> None:
        self._connection = connection
        self._wire = wire
        self._name = name
        self.lock_seconds = lock_seconds

    async def settle(self, settlements: Sequence[Settlement]) -> list[BrokerError | None]:
        """Carry these out; an error each, or None."""
        results: list[BrokerError | None] = [None] * len(settlements)
        groups: dict[tuple[Outcome, str, str], list[int]] = {}
        now = monotonic()
        for index, settlement in enumerate(settlements):
            if settlement.message.raw.until < now:
                results[index] = _lost(settlement.message, "settled")
            else:
                # Nobody is told why a message is given back: those go together.
                reason, told = (
                    (settlement.reason, settlement.error) if settlement.outcome is Outcome.REJECT else ("", "")
                )
                groups.setdefault((settlement.outcome, reason, told), []).append(index)
        for (outcome, reason, told), indexes in groups.items():
            raws: list[Raw] = [settlements[index].message.raw for index in indexes]
            for index, error in zip(indexes, await self._carry_out(outcome, raws, reason, told), strict=True):
                results[index] = error
        return results

    async def _carry_out(
        self, outcome: Outcome, raws: list[Raw], reason: str = "", description: str = ""
    ) -> list[BrokerError | None]:
        if not self._connection.fast:
            with self._wire.busy():
                return [await self._one_by_one(outcome, raw, reason, description) for raw in raws]
        if outcome is Outcome.RELEASE:
            return await self._release(raws)
        if outcome is Outcome.REJECT:
            why = reason[:_MAX_REASON], description[:_MAX_DESCRIPTION]
            return await self._settle_in_parts(raws, "suspended", *why)
        return await self._settle_in_parts(raws, _HOW[outcome])

    async def _settle_in_parts(self, raws: list[Raw], how: str, *why: str) -> list[BrokerError | None]:
        async def ask(receiver: ServiceBusReceiver, part: Sequence[Raw]) -> None:
            await private_api.settle(receiver, how, [raw.native.lock_token for raw in part], *why)
            for raw in part:
                raw.settled = True

        return await self._in_parts(raws, ask)

    async def extend(self, messages: Sequence[Message[Any]]) -> list[BrokerError | None]:
        """Renew the locks of these that are not fresh."""
        results: list[BrokerError | None] = [None] * len(messages)
        now = monotonic()
        due: list[int] = []
        for index, message in enumerate(messages):
            if message.raw.until < now:
                results[index] = _lost(message, "renewed")
            elif message.raw.until - now < FRESH * self.lock_seconds:
                due.append(index)
        if due:
            errors = await self._renew([messages[index].raw for index in due])
            for index, error in zip(due, errors, strict=True):
                results[index] = error
        return results

    async def _renew(self, raws: list[Raw]) -> list[BrokerError | None]:
        seconds = self._connection.settings.request_timeout

        async def ask(receiver: ServiceBusReceiver, part: Sequence[Raw]) -> None:
            begin = monotonic()
            # Acks that were carried out while this waited for the wire would have all of them refused.
            part = [raw for raw in part if not raw.settled]
            if self._connection.fast and part:
                await private_api.renew(receiver, [raw.native.lock_token for raw in part], seconds)
            elif not self._connection.fast:
                for raw in part:
                    await receiver.renew_message_lock(raw.native, timeout=seconds)
            for raw in part:
                raw.until = begin + _CERTAIN * self.lock_seconds

        return await self._in_parts(raws, ask, whole=self._connection.fast)

    async def _release(self, raws: list[Raw]) -> list[BrokerError | None]:
        """Give back without counting what came by the present link; of the others the delivery counts."""

        async def ask(receiver: ServiceBusReceiver) -> list[Raw]:
            left: list[Raw] = []
            for raw in raws:
                if raw.link is receiver:
                    await private_api.release(receiver, raw.native)
                    raw.settled = True
                else:
                    left.append(raw)
            return left

        try:
            others = await self._wire.run(ask)
        except BrokerError as error:
            return [error] * len(raws)
        if not others:
            return [None] * len(raws)
        errors = await self._carry_out(Outcome.NACK, others)
        told = {id(raw): error for raw, error in zip(others, errors, strict=True)}
        return [told.get(id(raw)) for raw in raws]

    async def _one_by_one(self, outcome: Outcome, raw: Raw, reason: str, description: str) -> BrokerError | None:
        native = raw.native

        async def ask(receiver: ServiceBusReceiver, _: Sequence[Raw]) -> None:
            if outcome is Outcome.ACK:
                await receiver.complete_message(native)
            elif outcome is Outcome.REJECT:
                await receiver.dead_letter_message(
                    native,
                    reason=reason[:_MAX_REASON] or None,
                    error_description=description[:_MAX_DESCRIPTION] or None,
                )
            else:
                await receiver.abandon_message(native)
            raw.settled = True

        return (await self._in_parts([raw], ask))[0]

    async def _in_parts(self, raws: list[Raw], ask: _Ask, *, whole: bool = True) -> list[BrokerError | None]:
        """Ask for all at once, and for halves of what was refused."""
        results: dict[int, BrokerError | None] = {}
        step = _LARGEST if whole else 1
        parts = [raws[start : start + step] for start in range(0, len(raws), step)]
        left = len(parts) + 2 * len(raws).bit_length() + 8
        while parts:
            part = parts.pop()
            error: BrokerError | None
            if left <= 0:
                error = LeaseLost(f"{self._name}: too many locks were lost at once")
            else:
                left -= 1
                error = await self._persist(part, ask)
            if isinstance(error, LeaseLost) and left > 0 and len(part) > 1:
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                continue
            results |= {id(raw): error for raw in part}
        return [results[id(raw)] for raw in raws]

    async def _persist(self, part: Sequence[Raw], ask: _Ask) -> BrokerError | None:
        deadline = monotonic() + self._connection.settings.settle_timeout
        pause, broken = _FIRST_PAUSE, False
        while True:
            try:
                await self._wire.run(lambda receiver: ask(receiver, part))
            except LeaseLost as error:
                if not broken:
                    return error
                return SettleError(
                    f"{self._name}: the connection broke before the answer, and the lock is gone",
                    native=error.native,
                    advice="It was settled, or comes again",
                )
            except NotFound as error:
                return LeaseLost(
                    f"{self._name} is gone", native=error, advice="Its unsettled messages are gone with it"
                )
            except BrokerError as error:
                if not error.retriable or monotonic() + pause > deadline:
                    return error
                broken = broken or is_broken(error)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
            else:
                return None


def deleted_already(name: str) -> BrokerError:
    """What a nack is where messages are deleted as they are delivered."""
    return Unsupported(f"{name}: the message was deleted when it was received", advice="Leave receive_and_delete out")


def _lost(message: Message[Any], what: str) -> LeaseLost:
    return LeaseLost(f"The lock of message {message.id!r} ended before it was {what}")
