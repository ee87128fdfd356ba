"""Acks, nacks, rejections and lease extensions of one subscription, many in one write.

Calls may run at once and during a fetch. While the connection is down they wait for it, at most `settle_timeout`
seconds. The server answers every ack alike, whether the lease has ended or not, so the lease is measured by our own
clock: a message held for longer is reported as LeaseLost, and nothing is sent for it.

For confirmation each ack is answered. A standalone server executes the acks of one connection in order, so there only
the last ack of a write is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from broker import BrokerError, ConnectionFailed, LeaseLost, Message, Outcome, SettleError
from broker.driver import Settlement
from broker_jetstream.codec import NativeMessage, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.times import NANOSECONDS
from broker_jetstream.transport import Outgoing, is_standalone

__all__ = ["Settler"]

_ACK: Final = b"+ACK"
_NAK: Final = b"-NAK"
_PROGRESS: Final = b"+WPI"
_MAX_REASON: Final = 1024


class Settler:
    """Settles the messages of one subscription."""

    def __init__(self, connection: Connection, name: str, lease_seconds: float, *, confirm: bool) -> None:
        self._connection = connection
        self._name = name
        self._lease = lease_seconds
        self._confirm = confirm

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        """Settle messages; returns an error or None for each."""
        if self._confirm:
            if len(settlements) > 1 and not self._connection.settings.domain and is_standalone(self._connection.client):
                return await self._settle_in_order(settlements)
            return await self._settle_confirmed(settlements)
        results: list[BrokerError | None] = [None] * len(settlements)
        deadline = monotonic() + self._connection.settings.settle_timeout
        while True:
            now = monotonic()
            valid: list[Settlement] = []
            for index, settlement in enumerate(settlements):
                if settlement.message.raw.lease_until < now:
                    results[index] = _lost(settlement.message, "settled")
                else:
                    valid.append(settlement)
            try:
                await self._send(valid)
            except ConnectionFailed as error:
                # A repeated ack does no harm.
                if not await self._wait_reconnected(deadline):
                    return [result or error for result in results]
            except BrokerError as error:
                return [result or error for result in results]
            else:
                return results

    async def _send(self, settlements: Sequence[Settlement]) -> None:
        """Write settlements without requesting answers.

        :raises ConnectionFailed: the connection is down.
        """
        # An empty message is the shortest ack.
        plain = [each.message.raw.reply for each in settlements if each.outcome is Outcome.ACK]
        if plain:
            await self._connection.send_empty(plain)
        if len(plain) < len(settlements):
            others = [each for each in settlements if each.outcome is not Outcome.ACK]
            await self._connection.send([Outgoing(each.message.raw.reply, b"", b"", _payload(each)) for each in others])

    async def _settle_confirmed(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        connection = self._connection
        results: list[BrokerError | None] = [None] * len(settlements)
        lines = [(settlement.message.raw.reply, _payload(settlement)) for settlement in settlements]
        deadline = monotonic() + connection.settings.settle_timeout
        failure: BrokerError | None = None
        with connection.inbox.expect(len(lines), frozenset(reply for reply, _ in lines)) as replies:
            while replies.missing and (left := deadline - monotonic()) > 0:
                epoch, now = connection.epoch, monotonic()
                lines_left: list[Outgoing] = []
                for index, (reply, payload) in enumerate(lines):
                    if replies.answers[index] is None and results[index] is None:
                        if settlements[index].message.raw.lease_until < now:
                            results[index] = _lost(settlements[index].message, "settled")
                        else:
                            lines_left.append(Outgoing(reply, replies.subject(index), b"", payload))
                replies.missing = len(lines_left)
                if not lines_left:
                    break
                try:
                    await connection.send(lines_left)
                    failure = None
                    # A broken connection may have lost acks; they are repeated, which does no harm.
                    while replies.missing and epoch == connection.epoch and connection.connected and left > 0:
                        await replies.wait(left)
                        left = deadline - monotonic()
                except ConnectionFailed as error:
                    failure = error
                except BrokerError as error:
                    failure = error
                    break
                if not await self._wait_reconnected(deadline):
                    break
        return [
            result or self._refusal(answer, failure) for result, answer in zip(results, replies.answers, strict=True)
        ]

    async def _settle_in_order(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        """Settle with one answer, to the last message."""
        connection = self._connection
        results: list[BrokerError | None] = [None] * len(settlements)
        deadline = monotonic() + connection.settings.settle_timeout
        answer: tuple[bytes, bytes] | None = None
        failure: BrokerError | None = None
        while answer is None and (left := deadline - monotonic()) > 0:
            epoch, now = connection.epoch, monotonic()
            for index, settlement in enumerate(settlements):
                if results[index] is None and settlement.message.raw.lease_until < now:
                    results[index] = _lost(settlement.message, "settled")
            valid = [settlement for settlement, lost in zip(settlements, results, strict=True) if lost is None]
            if not valid:
                return results
            last = valid.pop()
            reply = last.message.raw.reply
            try:
                with connection.inbox.expect(1, frozenset((reply,))) as replies:
                    await self._send(valid)
                    await connection.send((Outgoing(reply, replies.subject(0), b"", _payload(last)),))
                    failure = None
                    while replies.missing and epoch == connection.epoch and connection.connected and left > 0:
                        await replies.wait(left)
                        left = deadline - monotonic()
                # An answer on a later connection does not confirm writes of an earlier one.
                answer = replies.answers[0] if epoch == connection.epoch else None
            except ConnectionFailed as error:
                failure = error
            except BrokerError as error:
                failure = error
                break
            if answer is None and not await self._wait_reconnected(deadline):
                break
        refusal = self._refusal(answer, failure)
        return [lost or refusal for lost in results] if refusal else results

    def _refusal(self, answer: tuple[bytes, bytes] | None, failure: BrokerError | None) -> BrokerError | None:
        """The error that an answer carries; None if it confirms.

        :param failure: why there is no answer.
        """
        if answer is None:
            seconds = self._connection.settings.settle_timeout
            return failure or SettleError(f"The server did not confirm within {seconds:g} seconds", retriable=True)
        code, text = status_of(answer[0])
        if code == 503:
            return LeaseLost(f"{self._name} was deleted", advice="Its unsettled messages were deleted with it")
        if code:
            return SettleError(
                f"{self._name}: the server refused an ack: {code} {text}",
                advice="Allow this user to publish to $JS.ACK.>" if code == 403 else None,
            )
        return None

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Renew leases; raises nothing while the connection is down, but returns the error for each."""
        now = monotonic()
        results: list[BrokerError | None] = [None] * len(messages)
        renewed: list[NativeMessage] = []
        for index, message in enumerate(messages):
            raw: NativeMessage = message.raw
            if raw.lease_until < now:
                results[index] = _lost(message, "renewed")
            else:
                renewed.append(raw)
        if not renewed:
            return results
        try:
            await self._connection.send([Outgoing(raw.reply, b"", b"", _PROGRESS) for raw in renewed])
        except BrokerError as error:
            return [result or error for result in results]
        for raw in renewed:
            raw.lease_until = now + self._lease
        return results

    async def release(self, messages: Sequence[Message[Any]]) -> None:
        """Return messages to the server for immediate redelivery."""
        now = monotonic()
        lines = [Outgoing(m.raw.reply, b"", b"", _NAK) for m in messages if m.raw.lease_until >= now]
        if lines:
            await self._connection.send(lines)

    async def _wait_reconnected(self, deadline: float) -> bool:
        """Wait until the connection is up; returns False at the deadline."""
        left = deadline - monotonic()
        if left <= 0:
            return False
        try:
            await self._connection.wait_connected(left)
        except BrokerError:
            return False
        return True


def _lost(message: Message[Any], what: str) -> LeaseLost:
    return LeaseLost(f"The lease of message {message.id!r} ended before it was {what}")


def _payload(settlement: Settlement) -> bytes:
    outcome, delay = settlement.outcome, settlement.delay
    if outcome is Outcome.ACK:
        return _ACK
    if outcome is Outcome.REJECT:
        # One line, because the server publishes the reason in its advisories.
        text = " ".join(settlement.reason.split())[:_MAX_REASON]
        return b"+TERM " + text.encode("utf-8", "replace") if text else b"+TERM"
    if delay is not None and delay > 0:
        return b'-NAK {"delay": %d}' % round(delay * NANOSECONDS)
    return _NAK
