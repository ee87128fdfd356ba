"""Has a source write down what waits in the consumer's memory for its next delivery, where it can (`KeepsTries`)."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from broker.consuming.intake import Intake
from broker.consuming.leases import tell_not_renewed
from broker.errors import BackendError, BrokerError, LeaseLost, SettleError
from broker.messages import Message
from broker.spi import KeepsTries

__all__ = ["keep"]


def keep(intake: Intake, message: Message[Any], delay: float) -> Coroutine[Any, Any, None] | None:
    """As `KeepsTries.keep`; None if the source writes nothing down.

    What could not be written is told to the hooks, and waits all the same.

    :raises LeaseLost: by what is returned: the message comes again to somebody, and is taken out of the intake.
    :raises SettleError: likewise: it may not be written down.
    """
    source = intake.source
    return _kept(intake, source, message, delay) if isinstance(source, KeepsTries) else None


async def _kept(intake: Intake, source: KeepsTries, message: Message[Any], delay: float) -> None:
    try:
        error = await source.keep(message, delay)
    except BrokerError as raised:
        error = raised
    except Exception as failure:
        error = BackendError(f"The backend failed to write tries down: {failure}", native=failure)
    if error is None:
        return
    if isinstance(error, LeaseLost):
        intake.lost([message])
        raise error
    tell_not_renewed(intake.engine.hooks.emit, [message], [error])
    raise SettleError(
        f"The tries and the delay of message {message.id!r} of {message.topic!r} may not be written: {error.message}",
        native=error.native,
        advice="It waits in this process and comes again; should that die, too early maybe, and with a lower count",
    ) from error
