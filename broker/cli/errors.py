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
| 130, 143 | interrupted by Ctrl-C; terminated by SIGTERM, unless the command is a service (`Session.serves`) |
| 141 | the reader of standard output went away |
"""

from __future__ import annotations

import re
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

__all__ = ["Exit", "Failure", "advice_of", "error_json", "error_line", "error_text", "exit_code"]


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

_COMMANDS: tuple[tuple[str, str], ...] = (
    (r"`await bus\.admin\.ensure_topic\(name\)`", "`broker topics create NAME`, or see `broker topics list`"),
    (r"`await bus\.admin\.ensure_subscription\(topic, name\)`", "`broker subscriptions create TOPIC NAME`"),
    (r"`bus\.admin\.delete_subscription\(topic, name\)`", "`broker subscriptions delete TOPIC NAME`"),
    (r"admin\.subscriptions\(topic\) and admin\.lag\(topic, name\)", "`broker subscriptions list TOPIC`"),
    (r"`await bus\.admin\.groups\(\)`, or ", ""),
    (r"`describe_group\(name\)`", "`broker groups describe GROUP`"),
    (r"`bus\.admin\.reset_group`", "`broker groups reset GROUP`"),
    (r"`?(?:await )?bus\.admin\.delete_group\((.+)\)`?", r"`broker groups delete \1`"),
    (r"Call `bounds\(topic\)` .*", "Choose where to continue with `broker groups reset GROUP`"),
    (r"Call bus\.admin\.ensure_topic\(.+, \*\*({.*})\), or set these options with", r"Set \1 with"),
    (r"Call bus\.admin\.ensure_topic\(.+, max_message_bytes=(\d+)\)", r"Set max.message.bytes of the topic to \1"),
    (r"Set a retention, raise its limits with .*", "Set a retention with `broker topics create NAME --retention TIME`"),
    (r"made by ensure_topic", "made by `broker topics create`"),
    (r"Use bus\.messages\(\.\.\.\)", "Use --subscription NAME"),
    (r"Check bus\.capabilities\.\S+ first", "See `broker doctor`"),
    (r'start="earliest" or start="latest"', "--start earliest or --start latest"),
    (r"`start=`", "--start"),
    (r"create=False", "--no-create"),
    (r"; or pass native_name\(.*|; raise max_lease or call .*|`outcomes` has .*", ""),
)
"""What stands in an advice for a Python call, and what the command line says instead."""

_PYTHON = re.compile(r"\b(?:bus|admin|capabilities)\.\w|\b(?:await|async) |\w\((?:\.\.\.|…|\))|\bensure_\w")
"""Finds Python that has no counterpart on the command line."""


def exit_code(error: BaseException) -> Exit:
    """The exit code of an error."""
    if isinstance(error, Failure):
        return error.code
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return Exit.FAILED


def advice_of(error: BrokerError) -> str:
    """The error's advice with commands and options for Python calls; empty if it needs Python."""
    advice = error.advice
    for call, instead in _COMMANDS:
        advice = re.sub(call, instead, advice)
    return "" if _PYTHON.search(advice) else advice


def error_json(error: BaseException) -> dict[str, Any]:
    """The error for programs: type, message, advice, and whether a retry may succeed."""
    if isinstance(error, Failure):
        return {"type": type(error).__name__, "message": error.message, "advice": error.advice, "retriable": False}
    if isinstance(error, BrokerError):
        return {
            "type": type(error).__name__,
            "message": error.message,
            "advice": advice_of(error),
            "retriable": error.retriable,
        }
    text = str(error) or "no details"
    advice = "Run the command with --debug for the traceback"
    return {"type": type(error).__name__, "message": text, "advice": advice, "retriable": False}


def error_text(error: BaseException) -> str:
    """`MESSAGE. ADVICE` on one line."""
    parts = error_json(error)
    known = isinstance(error, (Failure, BrokerError))
    text = parts["message"] if known else f"{parts['type']}: {parts['message']}"
    if parts["advice"]:
        text = f"{text.rstrip('.')}. {parts['advice']}"
    return " ".join(text.split())


def error_line(error: BaseException, *, as_json: bool = False) -> str:
    """The line for standard error: `broker: MESSAGE. ADVICE`, or a JSON object with `error`."""
    if as_json:
        return json_text({"error": error_json(error)})
    return f"broker: {error_text(error)}"
