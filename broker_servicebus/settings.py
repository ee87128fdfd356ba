"""Settings of the Service Bus backend, from a URL, the environment or keyword arguments.

Immutable, and created without I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from broker import InvalidSetting
from broker.driver import UrlParts
from broker.driver.settings import BackendSettings, Form

__all__ = ["SHORTEST_LOCK", "ServiceBusSettings"]

_EMULATOR: Final = "usedevelopmentemulator"
"""In a connection string."""
_SHORTEST_WINDOW: Final = 20.0
SHORTEST_LOCK: Final = 5.0
"""Seconds; the service's shortest lock. An emulator accepts less, for tests."""
_LONGEST_LOCK: Final = 300.0
"""Seconds; the service's longest lock."""


class ServiceBusSettings(BackendSettings):
    """How to reach a Service Bus namespace, and how to use it."""

    schemes: ClassVar[tuple[str, ...]] = ("servicebus",)

    namespace: str = Field(
        default="",
        description="Host of the namespace, such as mine.servicebus.windows.net, with a port for an emulator; "
        "the host of the URL",
    )
    connection_string: SecretStr | None = Field(
        default=None, description="Connection string of the namespace, instead of host and credentials"
    )
    key_name: str | None = Field(default=None, description="Name of a shared access policy; the user of the URL")
    key: SecretStr | None = Field(default=None, description="Key of the shared access policy; the password of the URL")
    sas_token: SecretStr | None = Field(default=None, description="Shared access signature that was created elsewhere")
    emulator: bool = Field(
        default=False, description="Use AMQP without TLS, as emulators do; never for a namespace of Azure"
    )
    transport: Literal["amqp", "websocket"] = Field(
        default="amqp", description="AMQP over TLS on port 5671, or over a WebSocket on port 443"
    )
    proxy: str | None = Field(default=None, description="HTTP proxy as host:port; implies transport=websocket")
    custom_endpoint: str | None = Field(
        default=None, description="Other address to connect to, such as a gateway, as host or host:port"
    )
    tls_ca: Path | None = Field(
        default=None, description="PEM file of the CA certificates that verify the server's certificate"
    )
    admin_endpoint: Annotated[
        str | None, Form(r"https?://[^/]+", "http:// or https://, a host and a port, such as http://localhost:5300")
    ] = Field(
        default=None,
        description="Address of the management API, http://host:port or https://host:port; if not set, the "
        "namespace's own",
    )
    connect_timeout: float = Field(default=10.0, gt=0, description="Seconds to open a connection and its link")
    request_timeout: float = Field(default=10.0, gt=0, description="Seconds to wait for the response to a request")
    socket_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that one read or write of a socket may take; if not set, the client's default",
    )
    private_calls: bool = Field(
        default=True,
        description="Settle, renew and release in batches through guarded private calls of azure-servicebus; "
        "false uses only its public calls, one message each",
    )

    publish_timeout: float = Field(
        default=30.0, gt=0, description="Seconds for which a publish is retried over a broken connection"
    )
    max_message_bytes: int = Field(
        default=262_144,
        ge=65_536,
        le=104_857_600,
        description="Largest message of the namespace's tier: 262144 in Standard, up to 104857600 in Premium",
    )
    settle_timeout: float = Field(
        default=10.0, gt=0, description="Seconds for which a settlement is retried over a broken connection"
    )
    receive_and_delete: bool = Field(
        default=False, description="Delete messages on delivery: nothing can be settled, and a crash loses them"
    )
    lease_seconds: float | None = Field(
        default=None,
        ge=0.2,
        le=_LONGEST_LOCK,
        description="Lock duration of consumed subscriptions, 5 seconds or more (less on some emulators); if not "
        "set, existing subscriptions keep theirs and new ones get 60",
    )
    max_sessions: int = Field(
        default=8, ge=1, le=1000, description="Most sessions that one consumer holds at once, each with a connection"
    )
    session_idle: float = Field(
        default=0.3, gt=0, description="Seconds without a message after which a consumer releases a session"
    )

    deduplication_window: float = Field(
        default=120.0,
        ge=0,
        le=604_800,
        description="Seconds in which a new topic drops messages with a repeated id, 20 or more; 0 creates topics "
        "without deduplication",
    )
    max_delivery_count: int = Field(
        default=2000,
        ge=1,
        le=2000,
        description="Deliveries after which a new subscription dead-letters a message by itself",
    )

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        cls.refuse_parts(parts, "path")
        values: dict[str, Any] = {}
        if len(parts.hosts) > 1:
            raise InvalidSetting(
                f"A servicebus:// URL names one namespace, but {','.join(map(str, parts.hosts))!r} is given",
                advice="Give the host of one; each further namespace is a bus of its own",
            )
        if parts.hosts:
            values["namespace"] = str(parts.hosts[0])
        if parts.user is not None:
            values["key_name"] = parts.user
        if parts.password is not None:
            values["key"] = parts.password
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.key_name is None) != (self.key is None):
            raise ValueError("key_name and key belong together: servicebus://name:key@host")
        ways = [
            name
            for name, given in {
                "connection_string": self.connection_string is not None,
                "key": self.key is not None,
                "sas_token": self.sas_token is not None,
            }.items()
            if given
        ]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} are given; give one way to authenticate")
        if self.namespace and self.connection_string is not None:
            raise ValueError("namespace and connection_string are given; the string names the namespace itself")
        if self.emulator and self.key is None:
            raise ValueError("an emulator needs a key: servicebus://name:key@host:port?emulator=true")
        if self.emulator and (self.transport == "websocket" or self.proxy or self.tls_ca or self.custom_endpoint):
            raise ValueError("emulator=true is plain AMQP; omit transport, proxy, custom_endpoint and tls_ca")
        if not self.is_emulator and self.lease_seconds is not None and self.lease_seconds < SHORTEST_LOCK:
            raise ValueError(
                f"lease_seconds is {self.lease_seconds:g}; Service Bus locks a message for {SHORTEST_LOCK:g} to "
                f"{_LONGEST_LOCK:g} seconds, so give {SHORTEST_LOCK:g} or more, or omit it"
            )
        if 0 < self.deduplication_window < _SHORTEST_WINDOW:
            raise ValueError(
                f"deduplication_window is {self.deduplication_window:g}; Service Bus accepts {_SHORTEST_WINDOW:g} "
                "seconds or more; 0 turns deduplication off"
            )
        return self

    @model_validator(mode="after")
    def _is_well_formed(self) -> Self:
        for name, secret in (
            ("key_name", self.key_name or ""),
            ("key", self.key.get_secret_value() if self.key else ""),
        ):
            if ";" in secret:
                raise ValueError(f"{name} contains ';', which no shared access policy does; check its quoting")
        for name, value in (("proxy", self.proxy), ("custom_endpoint", self.custom_endpoint)):
            if value is None:
                continue
            if "@" in value:
                raise ValueError(f"{name} names a user or a password, which is not supported; write host:port")
            if name == "proxy" and ":" not in value:
                raise ValueError(f"{name} {value!r} has no port; write host:port")
            if not _is_address(f"//{value}"):
                raise ValueError(f"{name} {value!r} is not an address; write host:port, with a port of 1 to 65535")
        if self.sas_token is not None and not self.sas_token.get_secret_value():
            raise ValueError("sas_token is empty; give a shared access signature, or omit it")
        if self.admin_endpoint is not None and not _is_address(self.admin_endpoint):
            raise ValueError(
                f"admin_endpoint {self.admin_endpoint!r} has no port of 1 to 65535; write http://host:port"
            )
        if not self.is_emulator and (self.admin_endpoint or "").startswith("http:"):
            raise ValueError(
                f"admin_endpoint is {self.admin_endpoint!r}, where the credentials would go in clear; use https://, or "
                "emulator=true for an emulator"
            )
        return self

    @property
    def is_emulator(self) -> bool:
        """Whether `emulator` or the connection string names an emulator, which the client then uses without TLS."""
        given = self.connection_string.get_secret_value() if self.connection_string is not None else ""
        pairs = [part.partition("=") for part in given.strip().rstrip(";").split(";")]
        return self.emulator or any(name.lower() == _EMULATOR and value == "true" for name, _, value in pairs)

    @property
    def lock_seconds(self) -> float:
        """Lock duration of new subscriptions."""
        return self.lease_seconds or 60.0


def _is_address(url: str) -> bool:
    """Whether a URL has a host and, if it has a port, a valid one."""
    try:
        split = urlsplit(url)
        return bool(split.hostname) and " " not in url and split.port != 0
    except ValueError:
        return False
