"""Logs as JSON, one object per line, with the identity of the message that is being handled and never its body.

handler = logging.StreamHandler()
handler.setFormatter(JsonFormatter())
logging.basicConfig(level=logging.INFO, handlers=[handler])
name_messages(bus)
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from broker.hooks import Hooks
from broker.messages import Message

__all__ = ["JsonFormatter", "name_messages"]

_handled: Final[ContextVar[Message[Any] | None]] = ContextVar("handled", default=None)


class HasHooks(Protocol):
    """A `broker.Bus` or `broker.blocking.Bus`."""

    @property
    def hooks(self) -> Hooks: ...


def name_messages(bus: HasHooks) -> Callable[[], None]:
    """Have `JsonFormatter` name the message in whose handler, or `async with message` block, a record is logged.

    Returns the function that ends this.
    """
    return bus.hooks.around_handling(_as_handled)


@contextmanager
def _as_handled(message: Message[Any]) -> Generator[None]:
    token = _handled.set(message)
    try:
        yield
    finally:
        _handled.reset(token)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    | field | |
    |---|---|
    | `time`, `level`, `logger`, `text` | of the record; the time by RFC 3339 in UTC |
    | `error` | the traceback of the exception, if any |
    | `message` | `topic`, `subscription` or `group`, `id`, `attempt` of the message that is being handled |
    | `trace`, `span` | ids of OpenTelemetry's current span, if there is one |
    | others | what `extra=` of the call has |
    """

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "text": record.getMessage(),
        }
        if (message := _handled.get()) is not None:
            found["message"] = _identity(message)
        found |= _current_span()
        if record.exc_info and record.exc_info[0] is not None:
            found["error"] = self.formatException(record.exc_info)
        found |= {name: value for name, value in vars(record).items() if name not in _OWN and name not in found}
        return json.dumps(found, ensure_ascii=False, default=str)


_OWN: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""What every record has."""


def _identity(message: Message[Any]) -> Mapping[str, Any]:
    fields = {
        "topic": message.topic,
        "subscription": message.subscription,
        "group": message.group,
        "id": message.id,
        "attempt": message.delivery_attempt,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _current_span() -> Mapping[str, str]:
    # Without an import of the API there is no span.
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or not (context := api.get_current_span().get_span_context()).is_valid:
        return {}
    return {"trace": f"{context.trace_id:032x}", "span": f"{context.span_id:016x}"}
