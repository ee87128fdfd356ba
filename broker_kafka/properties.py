"""Which librdkafka properties are the user's and which the SDK's own. Pure functions, safe from any thread."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal

from pydantic import SecretStr

from broker.errors import InvalidSetting
from broker.urls import is_secret_name
from broker_kafka.property_names import CONSUMER_PROPERTIES, KNOWN_PROPERTIES, PRODUCER_PROPERTIES

__all__ = [
    "ALIASES",
    "OF_THE_OTHER_PROTOCOL",
    "OWNED",
    "Role",
    "check_property",
    "check_servers",
    "did_you_mean",
    "for_role",
]

_SERVER: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s\0:/,@?#\[\]]+)(?::([0-9]{1,9}))?")

Role = Literal["producer", "consumer", "admin"]
"""What a client is for; an admin client is a producer to librdkafka."""

_SERVERS: Final = "the hosts of the URL are the servers"
_COMMITS: Final = "only what was finished is committed, and the consumer does it"
_START: Final = "a group's start is `start=`, and `offset_reset` says what happens when its position is gone"
_REPORTS: Final = "a message's fate is always told"
_CALLBACK: Final = "no callbacks of the clients are taken; the events of `bus.hooks` tell what happens"
_LOG: Final = "the clients' log goes to the logger 'broker.kafka'"

OWNED: Final[Mapping[str, str]] = {
    "bootstrap.servers": _SERVERS,
    "metadata.broker.list": _SERVERS,
    "group.id": "it is the `group=` of bus.records and the `subscription=` of bus.messages",
    "transactional.id": "it is given to bus.transactional_publisher",
    "isolation.level": "it is the `isolation=` of bus.records",
    "enable.auto.commit": _COMMITS,
    "auto.commit.enable": _COMMITS,
    "auto.commit.interval.ms": _COMMITS,
    "enable.auto.offset.store": _COMMITS,
    "offset.store.method": _COMMITS,
    "offset.store.path": _COMMITS,
    "offset.store.sync.interval.ms": _COMMITS,
    "auto.offset.reset": _START,
    "enable.partition.eof": "readers that need the end of a partition ask for it themselves",
    "delivery.report.only.error": _REPORTS,
    "produce.offset.report": _REPORTS,
    "share.acknowledgement.mode": "share groups are opened by the SDK, which acknowledges each message itself",
    "max.poll.records": "it belongs to share groups, which are opened by the SDK",
    "log.queue": _LOG,
    "log_level": f"{_LOG}, whose level decides",
    "logger": _LOG,
    "on_delivery": _REPORTS,
    "on_commit": _COMMITS,
    "error_cb": _CALLBACK,
    "stats_cb": _CALLBACK,
    "throttle_cb": _CALLBACK,
    "log_cb": _LOG,
    "statistics.interval.ms": "the clients' statistics would reach nobody, and cost time",
    "oauth_cb": "it is a field of the settings object",
}
"""Properties that nobody else may set, each with the reason."""

_OFF: Final = {"statistics.interval.ms": "0"}
"""The value that one of these may have all the same: it changes nothing."""

ALIASES: Final[Mapping[str, str]] = {
    "sasl.mechanisms": "sasl.mechanism",
    "request.required.acks": "acks",
    "queue.buffering.max.ms": "linger.ms",
    "compression.codec": "compression.type",
    "delivery.timeout.ms": "message.timeout.ms",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.send.max.retries": "retries",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
}
"""librdkafka's second names, with the one that is used here."""

OF_THE_OTHER_PROTOCOL: Final[Mapping[str, tuple[str, ...]]] = {
    "classic": ("group_remote_assignor",),
    "consumer": ("partition_assignment_strategy", "session_timeout_ms", "heartbeat_interval_ms"),
}
"""By `group_protocol`, settings that librdkafka refuses with it."""


def check_servers(servers: tuple[str, ...]) -> tuple[str, ...]:
    """:raises ValueError: librdkafka would not take one for a broker to ask, or for another than it says."""
    for server in servers:
        found = _SERVER.fullmatch(server)
        if found is None or not 0 < int(found.group(1) or 1) < 65536:
            raise ValueError(f"{server!r} is no host, host:port or [IPv6]:port")
    return servers


def check_property(name: str, value: object) -> str | SecretStr:
    """The value of a property that has no setting of its own, as librdkafka takes it.

    :raises InvalidSetting: the property is the SDK's own, or its value is no text, number or truth value.
    """
    reason = OWNED.get(name)
    if reason is not None and (name not in _OFF or str(value) != _OFF[name]):
        raise InvalidSetting(f"Property {name!r} is set by the SDK", advice=f"Leave it out: {reason}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, (str, int, float)):
        raise InvalidSetting(
            f"Property {name!r} is {value!r} of type {type(value).__name__}",
            advice="It takes text, a number, true or false",
        )
    if "\0" in str(value):
        raise InvalidSetting(f"Property {name!r} has a NUL", advice="Leave it out: clients in C end a text there")
    return SecretStr(str(value)) if is_secret_name(name) else str(value)


def for_role(properties: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """Those that concern a client of this role."""
    foreign = PRODUCER_PROPERTIES if role == "consumer" else CONSUMER_PROPERTIES
    return {name: value for name, value in properties.items() if name not in foreign}


def did_you_mean(name: str) -> str:
    """What to say of a property that librdkafka does not know."""
    near = get_close_matches(name, KNOWN_PROPERTIES, 1, 0.6)
    return f"Did you mean {near[0]!r}?" if near else "Its configuration page lists the properties there are"
