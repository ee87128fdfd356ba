"""Errors of the command line: exit codes, and how to print an error. Pure functions.

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed for any other reason |
| 2 | the command line, URL, settings or a name is invalid, or the backend lacks the feature |
| 3 | the topic or subscription does not exist |
| 4 | no connection, or no answer in time |
| 5 | the server refused the credentials or the operation |
| 6 | some of the input was not published |
| 130, 143 | interrupted by Ctrl-C; terminated by SIGTERM |
| 141 | the reader of standard output went away |
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from broker.cli.output import json_text
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

__all__ = ["Exit", "Failure", "error_json", "error_line", "exit_code"]


class Exit(IntEnum):
    """The exit codes."""

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
    """An error of the command line itself: message, advice and exit code."""

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
"""Advice for the command line, instead of the default advice of a class, which names Python calls."""


def exit_code(error: BaseException) -> Exit:
    """The exit code of an error."""
    if isinstance(error, Failure):
        return error.code
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return Exit.FAILED


def error_json(error: BaseException) -> dict[str, Any]:
    """The error for programs: type, message, advice, and whether a retry may succeed."""
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
    text = str(error) or "no details"
    advice = "Run the command with --debug for the traceback"
    return {"type": type(error).__name__, "message": text, "advice": advice, "retriable": False}


def error_line(error: BaseException, *, as_json: bool = False) -> str:
    """The line for standard error: `broker: MESSAGE. ADVICE`, or a JSON object with `error`."""
    parts = error_json(error)
    if as_json:
        return json_text({"error": parts})
    known = isinstance(error, (Failure, BrokerError))
    text = parts["message"] if known else f"{parts['type']}: {parts['message']}"
    if parts["advice"]:
        text = f"{text.rstrip('.')}. {parts['advice']}"
    return f"broker: {' '.join(text.split())}"
