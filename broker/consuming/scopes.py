"""Enters what observers put around the handling of a message. An observer that raises is logged and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from broker.messages import Message

__all__ = ["enter", "leave"]

logger = logging.getLogger("broker")


def enter(
    message: Message[Any], interceptors: Sequence[Callable[[Message[Any]], AbstractContextManager[object]]]
) -> None:
    """Enter each interceptor's context for the message, to be left by `leave`."""
    message.scope = scope = ExitStack()
    for interceptor in interceptors:
        try:
            scope.enter_context(interceptor(message))
        except Exception:
            logger.exception("An interceptor failed before message %r was handled", message.id)


def leave(message: Message[Any], error: BaseException | None) -> None:
    """Leave the contexts that were entered, telling them how the handling ended."""
    scope: ExitStack | None = message.scope
    if scope is None:
        return
    message.scope = None
    try:
        scope.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)
    except Exception as raised:
        if raised is not error:
            logger.exception("An interceptor failed after message %r was handled", message.id)
