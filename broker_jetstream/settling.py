"""Acks, nacks, rejections and lease extensions of one subscription, many in one write.

Calls may run at once and during a fetch. While the connection is down they wait for it, at most `settle_timeout`
seconds. The server answers the ack of a message alike whether it was still ours or not, so the lease is kept by our
own clock: what was held for longer than the server grants is told as LeaseLost, and nothing is sent for it.

To be confirmed, each is answered; of a server that stands alone only the last of those that are sent at once, because
it carries them out in the order in which one connection sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from broker import BrokerError, ConnectionFailed, LeaseLost, Message, Outcome, SettleError
from broker.driver import Settlement
from broker_jetstream.codec import NativeMessage, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.subscriptions import NANOSECONDS
from broker_jetstream.transport import Outgoing, stands_alone

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
        """Carry these out; an error each, or None."""
        if self._confirm:
            if len(settlements) > 1 and not self._connection.settings.domain and stands_alone(self._connection.client):
                return await self._settle_in_order(settlements)
            return await self._settle_confirmed(settlements)
        results: list[BrokerError | None] = [None] * len(settlements)
        deadline = monotonic() + self._connection.settings.settle_timeout
        while True:
            now = monotonic()
            held: list[Settlement] = []
            for index, settlement in enumerate(settlements):
                if settlement.message.raw.held_until < now:
                    results[index] = _lost(settlement.message, "settled")
                else:
                    held.append(settlement)
            try:
                await self._send(held)
            except ConnectionFailed as error:
                # Both at once or neither: what was written twice does no harm.
                if not await self._back(deadline):
                    return [result or error for result in results]
            except BrokerError as error:
                return [result or error for result in results]
            else:
                return results

    async def _send(self, settlements: Sequence[Settlement]) -> None:
        """Write these, with nobody to be answered.

        :raises ConnectionFailed: the connection is down.
        """
        # An empty message is an ack, too, and the shortest.
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
        replies = connection.inbox.expect(len(lines), frozenset(reply for reply, _ in lines))
        deadline = monotonic() + connection.settings.settle_timeout
        failure: BrokerError | None = None
        try:
            while replies.missing and (left := deadline - monotonic()) > 0:
                epoch, now = connection.epoch, monotonic()
                asked: list[Outgoing] = []
                for index, (reply, payload) in enumerate(lines):
                    if replies.answers[index] is None and results[index] is None:
                        if settlements[index].message.raw.held_until < now:
                            results[index] = _lost(settlements[index].message, "settled")
                        else:
                            asked.append(Outgoing(reply, replies.subject(index), b"", payload))
                replies.expect_only(len(asked))
                if not asked:
                    break
                try:
                    await connection.send(asked)
                    failure = None
                    # What a broken connection may have swallowed is asked again, which does no harm.
                    while replies.missing and epoch == connection.epoch and connection.connected and left > 0:
                        await replies.wait(left)
                        left = deadline - monotonic()
                except ConnectionFailed as error:
                    failure = error
                if not await self._back(deadline):
                    break
        except BrokerError as error:
            failure = error
        finally:
            replies.close()
        for index, answer in enumerate(replies.answers):
            if results[index] is not None:
                continue
            results[index] = self._refusal(answer, failure)
        return results

    async def _settle_in_order(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        """One answer for all."""
        connection = self._connection
        results: list[BrokerError | None] = [None] * len(settlements)
        deadline = monotonic() + connection.settings.settle_timeout
        answer: tuple[bytes, bytes] | None = None
        failure: BrokerError | None = None
        while answer is None and (left := deadline - monotonic()) > 0:
            epoch, now = connection.epoch, monotonic()
            for index, settlement in enumerate(settlements):
                if results[index] is None and settlement.message.raw.held_until < now:
                    results[index] = _lost(settlement.message, "settled")
            held = [settlement for settlement, lost in zip(settlements, results, strict=True) if lost is None]
            if not held:
                return results
            last = held.pop()
            reply = last.message.raw.reply
            replies = connection.inbox.expect(1, frozenset((reply,)))
            try:
                await self._send(held)
                await connection.send((Outgoing(reply, replies.subject(0), b"", _payload(last)),))
                failure = None
                while replies.missing and epoch == connection.epoch and connection.connected and left > 0:
                    await replies.wait(left)
                    left = deadline - monotonic()
                # What came over a later connection says nothing of what an earlier one may have swallowed.
                answer = replies.answers[0] if epoch == connection.epoch else None
            except ConnectionFailed as error:
                failure = error
            except BrokerError as error:
                failure = error
                break
            finally:
                replies.close()
            if answer is None and not await self._back(deadline):
                break
        refusal = self._refusal(answer, failure)
        return [lost or refusal for lost in results] if refusal else results

    def _refusal(self, answer: tuple[bytes, bytes] | None, failure: BrokerError | None) -> BrokerError | None:
        """What an answer says that does not confirm; None if it does.

        :param failure: why there is none.
        """
        if answer is None:
            seconds = self._connection.settings.settle_timeout
            return failure or SettleError(f"The server did not confirm within {seconds:g} seconds", retriable=True)
        code, text = status_of(answer[0])
        if code == 503:
            return LeaseLost(f"{self._name} is gone", advice="Its unsettled messages are gone with it")
        if code:
            return SettleError(
                f"{self._name}: the server refused an ack: {code} {text}",
                advice="Allow this user to publish to $JS.ACK.>" if code == 403 else None,
            )
        return None

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Renew these leases now; while the connection is down they are not."""
        now = monotonic()
        results: list[BrokerError | None] = [None] * len(messages)
        renewed: list[NativeMessage] = []
        for index, message in enumerate(messages):
            raw: NativeMessage = message.raw
            if raw.held_until < now:
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
            raw.held_until = now + self._lease
        return results

    async def give_back(self, messages: Sequence[Message[Any]]) -> None:
        """Have these delivered again at once, to whoever asks."""
        now = monotonic()
        lines = [Outgoing(m.raw.reply, b"", b"", _NAK) for m in messages if m.raw.held_until >= now]
        if lines:
            await self._connection.send(lines)

    async def _back(self, deadline: float) -> bool:
        """Wait until the connection is up; whether it is, in time."""
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
        # One line, because the reason shows up in the server's advisories.
        text = " ".join(settlement.reason.split())[:_MAX_REASON]
        return b"+TERM " + text.encode("utf-8", "replace") if text else b"+TERM"
    if delay is not None and delay > 0:
        return b'-NAK {"delay": %d}' % round(delay * NANOSECONDS)
    return _NAK
