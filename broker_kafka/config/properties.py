"""librdkafka's properties: their names, the roles they belong to, and the ones that the SDK sets itself.

The names are those of CONFIGURATION.md of librdkafka 2.16, without callbacks. They decide which client gets a property,
and suggest corrections of misspelled names; librdkafka validates the values. Pure functions, safe from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal

from pydantic import SecretStr

from broker import InvalidSetting
from broker.driver import is_secret_name

__all__ = [
    "ALIASES",
    "CODE_ADVICE",
    "CODE_PROPERTIES",
    "CONSUMER_PROPERTIES",
    "KNOWN_PROPERTIES",
    "LARGEST",
    "OWNED",
    "PRODUCER_PROPERTIES",
    "UNUSED_BY_PROTOCOL",
    "Role",
    "check_property",
    "check_servers",
    "did_you_mean",
    "for_role",
    "in_own_group",
]


PRODUCER_PROPERTIES: Final = frozenset(
    """
    acks batch.num.messages batch.size compression.codec compression.level compression.type
    delivery.report.only.error delivery.timeout.ms enable.gapless.guarantee enable.idempotence linger.ms
    message.send.max.retries message.timeout.ms partitioner produce.offset.report
    queue.buffering.backpressure.threshold queue.buffering.max.kbytes queue.buffering.max.messages
    queue.buffering.max.ms queuing.strategy request.required.acks request.timeout.ms retries
    sticky.partitioning.linger.ms transaction.timeout.ms transactional.id
    """.split()
)
"""Of producers only."""

CONSUMER_PROPERTIES: Final = frozenset(
    """
    auto.commit.enable auto.commit.interval.ms auto.offset.reset check.crcs consume.callback.max.messages
    coordinator.query.interval.ms enable.auto.commit enable.auto.offset.store enable.partition.eof
    fetch.error.backoff.ms fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms
    fetch.wait.max.ms group.id group.instance.id group.protocol group.protocol.type group.remote.assignor
    heartbeat.interval.ms isolation.level max.partition.fetch.bytes max.poll.interval.ms max.poll.records
    offset.store.method offset.store.path offset.store.sync.interval.ms partition.assignment.strategy
    queued.max.messages.kbytes queued.min.messages session.timeout.ms share.acknowledgement.mode
    """.split()
)
"""Of consumers only."""

_SHARED: Final = frozenset(
    """
    allow.auto.create.topics api.version.fallback.ms api.version.request api.version.request.timeout.ms
    bootstrap.servers broker.address.family broker.address.ttl broker.version.fallback client.dns.lookup client.id
    client.rack connections.max.idle.ms debug enable.metrics.push enable.random.seed
    enable.sasl.oauthbearer.unsecure.jwt enable.ssl.certificate.verification https.ca.location https.ca.pem
    log.connection.close log.thread.name max.in.flight max.in.flight.requests.per.connection
    message.copy.max.bytes message.max.bytes metadata.broker.list metadata.max.age.ms
    metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy plugin.library.paths
    receive.message.max.bytes reconnect.backoff.jitter.ms reconnect.backoff.max.ms reconnect.backoff.ms
    retry.backoff.max.ms retry.backoff.ms sasl.kerberos.keytab sasl.kerberos.kinit.cmd
    sasl.kerberos.min.time.before.relogin sasl.kerberos.principal sasl.kerberos.service.name sasl.mechanism
    sasl.mechanisms sasl.oauthbearer.assertion.algorithm sasl.oauthbearer.assertion.claim.aud
    sasl.oauthbearer.assertion.claim.exp.seconds sasl.oauthbearer.assertion.claim.iss
    sasl.oauthbearer.assertion.claim.jti.include sasl.oauthbearer.assertion.claim.nbf.seconds
    sasl.oauthbearer.assertion.claim.sub sasl.oauthbearer.assertion.file
    sasl.oauthbearer.assertion.jwt.template.file sasl.oauthbearer.assertion.private.key.file
    sasl.oauthbearer.assertion.private.key.passphrase sasl.oauthbearer.assertion.private.key.pem
    sasl.oauthbearer.client.credentials.client.id sasl.oauthbearer.client.credentials.client.secret
    sasl.oauthbearer.client.id sasl.oauthbearer.client.secret sasl.oauthbearer.config sasl.oauthbearer.extensions
    sasl.oauthbearer.grant.type sasl.oauthbearer.metadata.authentication.type sasl.oauthbearer.method
    sasl.oauthbearer.scope sasl.oauthbearer.sub.claim.name sasl.oauthbearer.token.endpoint.url sasl.password
    sasl.username security.protocol socket.blocking.max.ms socket.connection.setup.timeout.ms
    socket.keepalive.enable socket.max.fails socket.nagle.disable socket.receive.buffer.bytes
    socket.send.buffer.bytes socket.timeout.ms ssl.ca.certificate.stores ssl.ca.location ssl.ca.pem
    ssl.certificate.location ssl.certificate.pem ssl.cipher.suites ssl.crl.location ssl.curves.list
    ssl.endpoint.identification.algorithm ssl.engine.id ssl.engine.location ssl.key.location ssl.key.password
    ssl.key.pem ssl.keystore.location ssl.keystore.password ssl.providers ssl.sigalgs.list statistics.interval.ms
    topic.blacklist topic.metadata.propagation.max.ms topic.metadata.refresh.fast.cnt
    topic.metadata.refresh.fast.interval.ms topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse
    """.split()
)

KNOWN_PROPERTIES: Final = PRODUCER_PROPERTIES | CONSUMER_PROPERTIES | _SHARED
"""All of them."""

CODE_PROPERTIES: Final = frozenset(
    "plugin.library.paths sasl.kerberos.kinit.cmd ssl.engine.id ssl.engine.location ssl.providers".split()
)
"""With these, librdkafka loads a library or runs a command. They are accepted only from code."""
CODE_ADVICE: Final = "Only code may set it, in a KafkaSettings object: librdkafka loads or runs what it names"

_NAME: Final = re.compile(r"[a-z0-9._]+")
_SERVER: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s\0:/,@?#\[\]]+)(?::([0-9]{1,9}))?")

Role = Literal["producer", "consumer", "admin"]
"""The kind of a client; to librdkafka, an admin client is a producer."""

_SERVERS: Final = "the hosts of the URL are the servers"
_COMMITS: Final = "the consumer commits the offsets of processed records itself"
_START: Final = "use `start=` for a new group, and `offset_reset` for a position that retention has deleted"
_REPORTS: Final = "the SDK reports the outcome of every message"
_CALLBACK: Final = "client callbacks are not supported; use the events of `bus.hooks`"
_LOG: Final = "the clients log to the logger 'broker.kafka'"

OWNED: Final[Mapping[str, str]] = {
    "bootstrap.servers": _SERVERS,
    "metadata.broker.list": _SERVERS,
    "group.id": "use `group=` of bus.records or `subscription=` of bus.messages",
    "transactional.id": "pass it to bus.transactional_publisher",
    "isolation.level": "use `isolation=` of bus.records",
    "enable.auto.commit": _COMMITS,
    "auto.commit.enable": _COMMITS,
    "auto.commit.interval.ms": _COMMITS,
    "enable.auto.offset.store": _COMMITS,
    "offset.store.method": _COMMITS,
    "offset.store.path": _COMMITS,
    "offset.store.sync.interval.ms": _COMMITS,
    "auto.offset.reset": _START,
    "enable.partition.eof": "readers that need the end of a partition set it themselves",
    "delivery.report.only.error": _REPORTS,
    "produce.offset.report": _REPORTS,
    "share.acknowledgement.mode": "the SDK acknowledges each message of a share group itself",
    "max.poll.records": "it applies to share groups only, which the SDK opens itself",
    "log.queue": _LOG,
    "log_level": f"{_LOG}; set the level of that logger",
    "logger": _LOG,
    "on_delivery": _REPORTS,
    "on_commit": _COMMITS,
    "error_cb": _CALLBACK,
    "stats_cb": _CALLBACK,
    "throttle_cb": _CALLBACK,
    "log_cb": _LOG,
    "statistics.interval.ms": "nothing reads the clients' statistics",
    "oauth_cb": "pass it as a field of the settings object",
}
"""Properties that only the SDK sets, each with the reason."""

_ALLOWED_VALUES: Final = {"statistics.interval.ms": "0"}
"""The value that may be given for one of these: librdkafka's default."""

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
"""librdkafka's aliases, and the name that is used here."""

UNUSED_BY_PROTOCOL: Final[Mapping[str, tuple[str, ...]]] = {
    "classic": ("group_remote_assignor",),
    "consumer": ("partition_assignment_strategy", "session_timeout_ms", "heartbeat_interval_ms"),
}
"""By `group_protocol`, settings that librdkafka rejects with it."""

LARGEST: Final = 1_000_000_000
"""Bytes; the most that librdkafka takes. Markers and redeliveries carry messages of any publisher, so the topics limit
their size, not `message_max_bytes`."""

_OWN_ASSIGNOR: Final = "cooperative-sticky"


def check_servers(servers: tuple[str, ...]) -> tuple[str, ...]:
    """:raises ValueError: librdkafka would ignore a server, or connect to another one."""
    for server in servers:
        found = _SERVER.fullmatch(server)
        if found is None or not 0 < int(found.group(1) or 1) < 65536:
            shown = "a server with a login" if "@" in server else repr(server)
            raise ValueError(f"{shown} is not a host, host:port or [IPv6]:port")
    return servers


def check_property(name: str, value: object) -> str | SecretStr:
    """The value of a property that has no setting of its own, as librdkafka takes it.

    :raises InvalidSetting: the name is malformed, the SDK sets the property, or its value is not a str, number or bool.
    """
    if _NAME.fullmatch(name) is None:
        # librdkafka would compare the name up to a NUL only. It is not quoted: it may be a part of a secret.
        raise InvalidSetting(
            "The name of a property is malformed", advice="It has lower-case letters, digits, dots and underscores only"
        )
    reason = OWNED.get(name)
    if reason is not None and (name not in _ALLOWED_VALUES or str(value) != _ALLOWED_VALUES[name]):
        raise InvalidSetting(f"Property {name!r} is set by the SDK", advice=f"Leave it out: {reason}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, (str, int, float)):
        raise InvalidSetting(
            f"Property {name!r} is of type {type(value).__name__}",
            advice="It takes text, a number, true or false; TOML needs quotes around a name with dots",
        )
    return SecretStr(str(value)) if is_secret_name(name) else str(value)


def for_role(properties: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """The properties of a client of this role."""
    foreign = PRODUCER_PROPERTIES if role == "consumer" else CONSUMER_PROPERTIES
    return {name: value for name, value in properties.items() if name not in foreign}


def in_own_group(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a consumer in a group that only this library joins.

    All members of a classic group need a common assignor, so that of the application's groups does not count.
    """
    if config.get("group.protocol") == "consumer":
        return {**config}
    return {**config, "partition.assignment.strategy": _OWN_ASSIGNOR}


def did_you_mean(name: str) -> str:
    """The advice for a property that librdkafka does not know."""
    near = get_close_matches(name, KNOWN_PROPERTIES, 1, 0.6)
    return f"Did you mean {near[0]!r}?" if near else "CONFIGURATION.md of librdkafka lists all properties"
