"""Rules of subscriptions: their compilation and their input."""

from __future__ import annotations

from typing import Any

from proton import Message

from tests.servers.servicebus.entities import Refused
from tests.servers.servicebus.filters import Correlation, FilterRefused, Matches, Subject, parse_sql

__all__ = ["always", "compile_rule", "subject_of"]


def always(_: Subject) -> bool:
    return True


def compile_rule(filter_: dict[str, Any]) -> Matches:
    """:raises Refused: the double does not know the filter."""
    kind = filter_["kind"]
    if kind == "true":
        return always
    if kind == "false":
        return lambda _: False
    if kind == "correlation":
        return Correlation(filter_["system"], filter_["user"])
    try:
        return parse_sql(filter_["expression"])
    except FilterRefused as error:
        raise Refused("amqp:not-implemented", str(error)) from None


def subject_of(message: Message) -> Subject:
    """The properties of a message for rules."""
    system = {
        "label": message.subject,
        "subject": message.subject,
        "correlationid": None if message.correlation_id is None else str(message.correlation_id),
        "messageid": None if message.id is None else str(message.id),
        "to": message.address,
        "replyto": message.reply_to,
        "sessionid": message.group_id,
        "replytosessionid": message.reply_to_group_id,
        "contenttype": str(message.content_type) if message.content_type else None,
    }
    user = {
        str(name if isinstance(name, str) else bytes(name).decode()): _plain(value)
        for name, value in (message.properties or {}).items()
    }
    return Subject(system, user)


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, bytes | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else str(value)
