"""Settings of the Kafka backend, from a URL, the environment or keyword arguments. Immutable; no I/O.

A setting for a librdkafka property has the property's name with `_` for `.`. All other properties are given by their
dotted names, as URL parameters or in `properties`. In a URL, a setting can have its dotted name, too. A property that
the SDK sets itself raises `InvalidSetting` with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, cast

from pydantic import Field, SecretStr, field_validator, model_validator

from broker import InvalidSetting, UnknownSetting
from broker.driver import UrlParts, is_secret_name, logger
from broker_kafka.config.properties import (
    ALIASES,
    CODE_ADVICE,
    CODE_PROPERTIES,
    KNOWN_PROPERTIES,
    OWNED,
    UNUSED_BY_PROTOCOL,
    Role,
    check_property,
    check_servers,
    did_you_mean,
    for_role,
)
from broker_kafka.config.queue import QueueSettings
from broker_kafka.config.security import SecuritySettings, check_security, protocol_of

__all__ = ["KafkaSettings"]


_NOT_PROPERTIES: Final = frozenset(QueueSettings.model_fields) | frozenset(
    {
        "servers",
        "oauth_cb",
        "sasl_oauthbearer_allow_http",
        "partition_function",
        "properties",
        "connect_timeout",
        "request_timeout",
        "offset_reset",
        "partitions",
        "replication_factor",
        "publish_window",
    }
)
"""Settings that are not properties of librdkafka."""
_SOCKET_MS: Final = 60_000
"""librdkafka's default."""
_NETWORK_MS: Final = 2_000


class KafkaSettings(SecuritySettings, QueueSettings):
    """Settings of `kafka://` URLs."""

    schemes: ClassVar[tuple[str, ...]] = ("kafka",)

    servers: tuple[str, ...] = Field(
        default=("127.0.0.1:9092",),
        min_length=1,
        description="Bootstrap servers, host:port; the hosts of the URL",
    )
    client_id: str = Field(default="anybroker", description="Name of the clients in the brokers' logs and quotas")

    socket_timeout_ms: int | None = Field(
        default=None,
        ge=10,
        le=300_000,
        description="Timeout of one request; if not set, 60 s, and for producers no more than request_timeout_ms + 2 s",
    )
    socket_connection_setup_timeout_ms: int = Field(
        default=5_000, ge=1_000, description="Time to connect to one broker, including TLS and SASL"
    )
    reconnect_backoff_ms: int = Field(
        default=50, ge=0, le=3_600_000, description="Wait before the first reconnect attempt"
    )
    reconnect_backoff_max_ms: int = Field(
        default=1_000, ge=0, le=3_600_000, description="Longest wait between reconnect attempts"
    )
    retry_backoff_ms: int = Field(
        default=10,
        ge=1,
        le=300_000,
        description="Wait before a request is retried; librdkafka's default of 100 makes small transactions ten "
        "times slower",
    )
    retry_backoff_max_ms: int = Field(
        default=1_000, ge=1, le=300_000, description="Longest wait between retries of a request"
    )
    topic_metadata_refresh_interval_ms: int = Field(
        default=30_000,
        ge=-1,
        le=3_600_000,
        description="Interval between refreshes of the metadata of topics and partitions; -1: never",
    )
    metadata_max_age_ms: int | None = Field(
        default=None, ge=1, le=86_400_000, description="Age at which cached metadata expires"
    )

    acks: Literal["all", "-1", "0", "1"] = Field(
        default="all", description="Replicas that must store a message before the broker acknowledges it"
    )
    enable_idempotence: bool = Field(
        default=True, description="Have the broker drop duplicates of retried requests, which keeps the order"
    )
    linger_ms: float = Field(
        default=5,
        ge=0,
        le=900_000,
        description="Longest wait for a batch to fill; if not set, the producer waits only while more messages follow",
    )
    batch_num_messages: int = Field(
        default=10_000, ge=1, le=1_000_000, description="Most messages in a batch for one partition"
    )
    batch_size: int = Field(
        default=1_000_000, ge=1, le=2_147_483_647, description="Most bytes in a batch for one partition"
    )
    compression_type: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        default="none", description="Compression codec of batches"
    )
    compression_level: int | None = Field(
        default=None, ge=-1, le=12, description="Compression level; -1: the codec's default"
    )
    message_max_bytes: int = Field(
        default=1_000_000,
        ge=8_192,
        le=1_000_000_000,
        description="Largest record that a producer sends, of which 4096 bytes are reserved for overhead",
    )
    message_timeout_ms: int = Field(
        default=30_000,
        ge=1,
        le=2_147_483_647,
        description="Time within which a message is delivered, or its publish fails",
    )
    request_timeout_ms: int = Field(
        default=10_000, ge=1, le=900_000, description="Time for the broker to acknowledge a batch"
    )
    queue_buffering_max_messages: int = Field(
        default=100_000, ge=1, le=2_147_483_647, description="Most messages in the queue of one producer"
    )
    queue_buffering_max_kbytes: int = Field(
        default=131_072, ge=1, le=2_147_483_647, description="Most kilobytes in the queue of one producer"
    )
    partitioner: Literal[
        "murmur2_random", "murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a", "random"
    ] = Field(default="murmur2_random", description="How a key selects the partition; murmur2 as the Java client does")
    partition_function: Callable[[str, bytes | None, int], int] | None = Field(
        default=None,
        description="Selects the partition instead: called with topic, key and number of partitions for each "
        "message without a partition, in the producer's thread; only in a settings object",
    )
    transaction_timeout_ms: int = Field(
        default=60_000, ge=1_000, le=2_147_483_647, description="Time after which the broker aborts an open transaction"
    )

    group_protocol: Literal["classic", "consumer"] = Field(
        default="classic",
        description="Rebalance protocol of groups; `consumer` is KIP-848 and needs Kafka 4.0 or newer",
    )
    group_remote_assignor: str | None = Field(
        default=None, description="Group protocol `consumer`: the broker's assignor, `uniform` or `range`"
    )
    partition_assignment_strategy: tuple[Literal["range", "roundrobin", "cooperative-sticky"], ...] = Field(
        default=("cooperative-sticky",),
        min_length=1,
        description="Group protocol `classic`: how partitions are assigned; all but cooperative-sticky stop every "
        "member at each rebalance",
    )
    group_instance_id: str | None = Field(
        default=None,
        min_length=1,
        description="Static membership: an id that is unique in the group and stays the same across restarts",
    )
    session_timeout_ms: int = Field(
        default=10_000,
        ge=1,
        le=3_600_000,
        description="Group protocol `classic`: time without a heartbeat after which a member's partitions are "
        "reassigned",
    )
    heartbeat_interval_ms: int = Field(
        default=1_000, ge=1, le=3_600_000, description="Group protocol `classic`: time between heartbeats"
    )
    max_poll_interval_ms: int = Field(
        default=300_000,
        ge=1,
        le=86_400_000,
        description="Longest time between polls of the consumer's thread; the time of handlers does not count",
    )
    offset_reset: Literal["error", "earliest", "latest"] = Field(
        default="error",
        description="When retention has deleted the records at a group's position: raise an error, or continue at "
        "the earliest or latest record and report that",
    )
    fetch_min_bytes: int = Field(
        default=1, ge=1, le=100_000_000, description="Bytes for which a broker waits before it answers a fetch"
    )
    fetch_wait_max_ms: int = Field(
        default=500, ge=0, le=300_000, description="Longest time that a broker waits for fetch_min_bytes"
    )
    fetch_max_bytes: int = Field(
        default=52_428_800, ge=0, le=2_147_483_135, description="Most bytes of one fetch response"
    )
    max_partition_fetch_bytes: int = Field(
        default=1_048_576, ge=1, le=1_000_000_000, description="Most bytes of one partition in a fetch response"
    )
    fetch_queue_backoff_ms: int = Field(
        default=10,
        ge=0,
        le=300_000,
        description="Pause of fetching while the prefetch queue is full; librdkafka's default of 1000 stalls fast "
        "consumers",
    )
    queued_min_messages: int = Field(
        default=100_000, ge=1, le=10_000_000, description="Messages that librdkafka prefetches per partition"
    )
    queued_max_messages_kbytes: int = Field(
        default=16_384, ge=1, le=2_097_151, description="Most kilobytes that librdkafka prefetches per consumer"
    )

    properties: Mapping[str, str | SecretStr] = Field(
        default={}, description="Any other librdkafka property by its own name; in a URL, name=value"
    )

    connect_timeout: float = Field(default=5.0, gt=0, le=3_600, description="Seconds for the first connection")
    request_timeout: float = Field(
        default=10.0,
        gt=0,
        le=3_600,
        description="Seconds to wait for a response about topics, commits and positions",
    )
    publish_window: int = Field(
        default=50_000, ge=1, description="Most unacknowledged messages in flight, per producer"
    )
    partitions: int = Field(
        default=1, ge=1, le=100_000, description="Partitions of a topic that is created without a number of partitions"
    )
    replication_factor: int = Field(
        default=-1, ge=-1, le=32_767, description="Replicas of a new topic's partitions; -1: the cluster's default"
    )

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        cls.refuse_parts(parts, "path")
        values: dict[str, Any] = {}
        if parts.hosts:
            values["servers"] = tuple(str(host if host.port else host._replace(port=9092)) for host in parts.hosts)
        if parts.user is not None:
            values["sasl_username"] = parts.user
        if parts.password is not None:
            values["sasl_password"] = parts.password
        return values

    @classmethod
    def query_values(cls, query: Mapping[str, str]) -> Mapping[str, Any]:
        values: dict[str, Any] = {}
        properties: dict[str, str] = {}
        for name, value in query.items():
            setting = _setting_of(name)
            if setting is None:
                properties[name] = value
            elif setting in values:
                raise InvalidSetting(
                    f"Setting {setting!r} is given twice, once as {name!r}", advice="Give it once, by either name"
                )
            else:
                values[setting] = value
        if properties:
            values["properties"] = properties
        return values

    _check_servers = field_validator("servers")(check_servers)

    @field_validator("replication_factor")
    @classmethod
    def _check_replicas(cls, value: int) -> int:
        if value == 0:
            raise ValueError("a partition has at least one replica")
        return value

    @classmethod
    def advice_on_unknown(cls, name: str) -> str:
        dotted = name.replace("_", ".")
        if dotted in OWNED:
            return f"Leave it out: {OWNED[dotted]}"
        if dotted in CODE_PROPERTIES:
            return CODE_ADVICE
        return f"Give it as {dotted!r}" if dotted in KNOWN_PROPERTIES else super().advice_on_unknown(name)

    @field_validator("properties", mode="before")
    @classmethod
    def _read_properties(cls, value: object) -> object:
        if isinstance(value, str):
            pairs = [item.partition("=") for item in value.split(",") if item.strip()]
            if not all(equals for _, equals, _ in pairs):
                raise ValueError("each part between commas is name=value")
            value = {name.strip(): text.strip() for name, _, text in pairs}
        if not isinstance(value, Mapping):
            raise ValueError("it takes a mapping of property names to values")  # noqa: TRY004 - pydantic's way
        checked: dict[str, str | SecretStr] = {}
        for name, text in cast("Mapping[object, object]", value).items():
            if not isinstance(name, str):
                raise ValueError(f"{name!r} is no name of a property")  # noqa: TRY004 - pydantic's way
            setting = _setting_of(name)
            if setting in cls.model_fields:
                raise InvalidSetting(f"Property {name!r} has a setting of its own", advice=f"Give it as {setting}")
            checked[name] = check_property(name, text)
        return checked

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.enable_idempotence and self.acks not in {"all", "-1"}:
            raise ValueError(f"acks is {self.acks}, and enable_idempotence needs acks=all")
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise ValueError(
                f"heartbeat_interval_ms {self.heartbeat_interval_ms} is not below "
                f"session_timeout_ms {self.session_timeout_ms}"
            )
        # With KIP-848 the broker decides the session timeout.
        if self.group_protocol == "classic" and self.max_poll_interval_ms < self.session_timeout_ms:
            raise ValueError(
                f"max_poll_interval_ms {self.max_poll_interval_ms} is below session_timeout_ms "
                f"{self.session_timeout_ms}; set it to that or more"
            )
        return self

    @property
    def protocol(self) -> str:
        """`security_protocol`, or the protocol that the other settings imply."""
        return protocol_of(self)

    def check_given(self) -> None:
        super().check_given()
        self._check_properties()
        self._check_code()
        check_security(self)
        idle = self.compression_type == "none" and self.is_given("compression_level")
        if idle and not self.is_outranked("compression_level", "compression_type"):
            raise InvalidSetting(
                f"Setting 'compression_level' (from {self.origin('compression_level')}) is {self.compression_level}, "
                f"and compression_type (from {self.origin('compression_type')}) is none",
                advice="Set compression_type, for instance to zstd, or remove compression_level",
            )
        for name in filter(self.is_given, UNUSED_BY_PROTOCOL[self.group_protocol]):
            logger.warning(
                "Setting %r (%s) has no effect with group_protocol=%s", name, self.origin(name), self.group_protocol
            )

    def _check_properties(self) -> None:
        """:raises UnknownSetting: a URL, a variable or a file gives a property that may do anything."""
        origin = self.origin("properties")
        if origin.kind == "argument":
            return
        secret = False
        for name in self.properties:
            if name not in KNOWN_PROPERTIES:
                # After a secret, the name may be what follows a comma in it.
                shown = "A name after a secret" if secret else f"Property {name!r}"
                raise UnknownSetting(
                    f"{shown} (from {origin}) is no property of librdkafka that this library knows; only code may set "
                    "others",
                    advice=did_you_mean(name),
                )
            secret = secret or is_secret_name(name)

    def _check_code(self) -> None:
        """:raises InvalidSetting: a URL, a variable or a file gives a property that loads or runs code."""
        given = {name: "properties" for name in self.properties if name in CODE_PROPERTIES}
        given |= {
            name: name
            for name in (each.replace(".", "_") for each in CODE_PROPERTIES)
            if name in type(self).model_fields and getattr(self, name) is not None
        }
        for name, setting in given.items():
            origin = self.origin(setting)
            if origin.kind != "argument":
                raise InvalidSetting(f"Setting {name!r} (from {origin}) is refused", advice=CODE_ADVICE)

    def client_config(self, role: Role) -> dict[str, Any]:
        """The configuration of a confluent-kafka client, by librdkafka's names.

        The owner of the client adds `group.id`, `transactional.id` and `isolation.level`.
        """
        config: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name not in _NOT_PROPERTIES and value is not None:
                config[name.replace("_", ".")] = _as_librdkafka(value)
        for name in UNUSED_BY_PROTOCOL[self.group_protocol]:
            config.pop(name.replace("_", "."), None)
        config["security.protocol"] = self.protocol
        if not self.protocol.startswith("SASL"):
            config = {name: value for name, value in config.items() if not name.startswith(("sasl.", "enable.sasl."))}
        elif self.sasl_mechanism is None:
            config["sasl.mechanism"] = "PLAIN"
        if self.sasl_mechanism != "OAUTHBEARER":
            config = {n: v for n, v in config.items() if not n.startswith(("sasl.oauthbearer.", "enable.sasl."))}
        elif self.oauth_cb is not None:
            config["oauth_cb"] = self.oauth_cb
        config |= {name: _as_librdkafka(value) for name, value in self.properties.items()}
        config = for_role(config, role)
        if role == "producer":
            # A broker answers a batch within `request_timeout_ms`. A frozen one must not use up the time of a message,
            # so that the next leader can get it.
            config.setdefault("socket.timeout.ms", min(_SOCKET_MS, self.request_timeout_ms + _NETWORK_MS))
        config["bootstrap.servers"] = ",".join(self.servers)
        config["logger"] = _CLIENT_LOG
        return config


def _setting_of(name: str) -> str | None:
    """The setting that a parameter names, by its own or the property's name; None for other properties."""
    plain = ALIASES.get(name, name).replace(".", "_")
    if plain in KafkaSettings.model_fields and (plain not in _NOT_PROPERTIES or "." not in name):
        return plain
    return None if "." in name or name in KNOWN_PROPERTIES or name in OWNED else name


def _as_librdkafka(value: object) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple):
        return ",".join(cast("tuple[str, ...]", value))
    return str(value) if isinstance(value, Path) else value


class _ClientLog:
    """Sends librdkafka's log lines to the logger `broker.kafka`; the part of a logger that confluent-kafka uses."""

    _DEBUG_ONLY: Final = frozenset({"CLOSE", "COORD", "ERROR", "FAIL", "GETPID", "MAXPOLL", "REQTMOUT", "TERMINATE"})
    """One line for each attempt to reconnect; `bus.hooks` reports the connection."""

    _ONCE: Final = frozenset({"SHARECONSUMER"})
    """A line of each share consumer, of which a consumer has several: share groups are a preview."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("broker.kafka")
        self._logged: set[object] = set()

    def log(self, level: int, message: str, *values: object) -> None:
        facility = values[0] if values else ""
        self._logger.log(logging.DEBUG if facility in self._DEBUG_ONLY | self._logged else level, message, *values)
        if facility in self._ONCE:
            self._logged.add(facility)


_CLIENT_LOG: Final = _ClientLog()
