"""Exit codes of the command `broker`, and how an error becomes one of them and one sentence; pure functions.

0    done
1    failed, for a reason that has no code of its own
2    the command line, URL, settings or a name cannot be used, or the backend cannot do what was asked for
3    the topic or subscription does not exist
4    no connection, or no answer in time
5    the server refused the credentials or the operation
6    some of the input was not published: a line that cannot be read, a message that was refused
130  interrupted (Ctrl-C); 143 terminated; 141 the reader of standard output went away
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

from broker.errors import (
    AuthenticationFailed,
    BrokerError,
    ConfigurationError,
    ConnectionFailed,
    InvalidMessage,
    NotAuthorized,
    NotFound,
    OperationTimeout,
    PublishError,
    Unsupported,
)

__all__ = ["Exit", "Failure", "describe", "exit_code", "sentence"]


class Exit(IntEnum):
    """What the command returns to the shell."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NO_CONNECTION = 4
    REFUSED = 5
    NOT_PUBLISHED = 6
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class Failure(Exception):
    """An error of the command line itself: a sentence, what to do, and the exit code."""

    def __init__(self, message: str, *, advice: str = "", code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.code = code


_CODES: tuple[tuple[type[BrokerError], Exit], ...] = (
    (ConfigurationError, Exit.USAGE),
    (Unsupported, Exit.USAGE),
    (NotFound, Exit.NOT_FOUND),
    (ConnectionFailed, Exit.NO_CONNECTION),
    (OperationTimeout, Exit.NO_CONNECTION),
    (AuthenticationFailed, Exit.REFUSED),
    (NotAuthorized, Exit.REFUSED),
    (InvalidMessage, Exit.NOT_PUBLISHED),
    (PublishError, Exit.NOT_PUBLISHED),
)

_COMMANDS = {
    "TopicNotFound": "Create it with `broker topics create NAME`, or see `broker topics list`",
    "SubscriptionNotFound": "Create it with `broker subscriptions create TOPIC NAME`",
}
"""Advice in terms of the command line for what a class of errors says by itself, which speaks of Python."""


def exit_code(error: BaseException) -> Exit:
    """The exit code of an error."""
    if isinstance(error, Failure):
        return error.code
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return Exit.FAILED


def describe(error: BaseException) -> dict[str, Any]:
    """The error as data: type, message, advice and whether a later try may succeed."""
    if isinstance(error, Failure):
        return {"type": type(error).__name__, "message": error.message, "advice": error.advice, "retriable": False}
    if isinstance(error, BrokerError):
        kind = type(error).__name__
        return {
            "type": kind,
            "message": error.message,
            "advice": _COMMANDS.get(kind, error.advice) if error.advice == error.default_advice else error.advice,
            "retriable": error.retriable,
        }
    text = str(error) or "no further detail"
    advice = "Run it again with --debug for the traceback"
    return {"type": type(error).__name__, "message": text, "advice": advice, "retriable": False}


def sentence(error: BaseException, *, as_json: bool = False) -> str:
    """What is written to standard error: one line, `broker: …`, or a JSON object with `error`."""
    parts = describe(error)
    if as_json:
        return json.dumps({"error": parts}, ensure_ascii=False)
    known = isinstance(error, (Failure, BrokerError))
    text = parts["message"] if known else f"{parts['type']}: {parts['message']}"
    if parts["advice"]:
        text = f"{text.rstrip('.')}. {parts['advice']}"
    return f"broker: {' '.join(text.split())}"
