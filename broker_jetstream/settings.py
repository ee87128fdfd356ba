"""Settings of the JetStream backend, from a URL, the environment or keyword arguments.

Immutable and made without I/O, so a missing credentials file is reported by `open`.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import quote, urlsplit

from pydantic import Field, SecretStr, model_validator

from broker import InvalidSetting
from broker.driver import UrlParts, is_loopback, mask_url
from broker.driver.settings import BackendSettings, Form

__all__ = ["JetStreamSettings"]

LONGEST_SECONDS: Final = 1e9
"""About thirty years: the server counts nanoseconds, and multiples of this, in 64 bits."""


_OF_OTHER_SERVERS: Final = (
    "servers",
    "user",
    "password",
    "token",
    "nkey_seed",
    "nkey_seed_file",
    "creds_file",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_key_password",
    "tls_hostname",
    "tls_handshake_first",
)


class JetStreamSettings(BackendSettings):
    """How to reach a NATS server with JetStream, and how to use it."""

    schemes: ClassVar[tuple[str, ...]] = ("nats", "tls", "embedded")

    servers: tuple[str, ...] = Field(
        default=("nats://127.0.0.1:4222",),
        description="Server addresses, nats://host:port or tls://host:port; the hosts of the URL",
    )
    embedded: str | None = Field(
        default=None,
        description="Start a nats-server with its data in this directory (empty: a temporary one); the path of an "
        "embedded: URL",
    )

    user: str | None = Field(default=None, description="User name; the user of the URL")
    password: SecretStr | None = Field(default=None, description="Password; the password of the URL")
    token: SecretStr | None = Field(default=None, description="Authentication token")
    nkey_seed: SecretStr | None = Field(default=None, description="Seed of the user's NKey, 'SU…'")
    nkey_seed_file: Path | None = Field(default=None, description="File that holds the seed of the user's NKey")
    creds_file: Path | None = Field(default=None, description="Credentials file with the user's JWT and seed")
    tls_ca: Path | None = Field(
        default=None, description="PEM file of the CA certificates that verify the server's certificate"
    )
    tls_cert: Path | None = Field(default=None, description="PEM file of the client's certificate, for mutual TLS")
    tls_key: Path | None = Field(default=None, description="PEM file of the client's private key")
    tls_key_password: SecretStr | None = Field(default=None, description="Password of the private key")
    tls_hostname: str | None = Field(
        default=None, description="Host name to expect in the server's certificate, instead of the host's"
    )
    tls_handshake_first: bool = Field(
        default=False, description="Start TLS before the server's greeting, for servers with handshake_first"
    )

    name: str = Field(default="anybroker", description="Name of the connection in the server's monitoring")
    domain: str | None = Field(default=None, description="JetStream domain, for leaf nodes")
    inbox_prefix: Annotated[
        str, Form(r"[^\s.*>]+(\.[^\s.*>]+)*", "words joined by dots, without spaces, * and >, such as _INBOX.orders")
    ] = Field(
        default="_INBOX",
        description="Prefix of the reply subjects, for accounts that restrict them",
    )
    connect_timeout: float = Field(
        default=5.0, gt=0, description="Seconds for the first connection, and for each reconnect attempt"
    )
    request_timeout: float = Field(default=5.0, gt=0, description="Seconds to wait for a response of the JetStream API")
    reconnect_wait: float = Field(
        default=0.2,
        gt=0,
        description="Seconds between reconnect attempts, on average; the waits of a new client grow up to 1 second",
    )
    ping_interval: float = Field(
        default=5.0, gt=0, description="Seconds between the pings that detect a dead connection"
    )
    max_outstanding_pings: int = Field(
        default=2, ge=1, description="Unanswered pings after which the connection is considered dead"
    )
    fast_path: bool = Field(
        default=True, description="Use the guarded fast path through nats-py; false uses only its public calls"
    )

    publish_timeout: float = Field(
        default=30.0, gt=0, description="Seconds without confirmation until a publish raises OperationTimeout"
    )
    publish_resend: float = Field(
        default=5.0,
        gt=0,
        description="Seconds without confirmation after which a message is sent again with the same id",
    )
    publish_window: int = Field(default=4000, ge=1, description="Most unconfirmed messages in flight, per topic")

    lease_seconds: float = Field(
        default=30.0,
        ge=0.1,
        le=LONGEST_SECONDS,
        description="ack_wait of the durables: seconds for which a message is leased without renewal",
    )
    settle_timeout: float = Field(
        default=10.0,
        gt=0,
        description="Seconds to wait for the confirmation of an ack or a commit, or for a broken connection",
    )
    max_ack_pending: int = Field(
        default=65_536, ge=1, description="Most unsettled messages of one subscription, across all its consumers"
    )
    pull_expires: float = Field(
        default=30.0,
        ge=1.0,
        le=LONGEST_SECONDS,
        description="Seconds after which a pull request expires and is sent again",
    )
    pull_heartbeat: float = Field(
        default=5.0,
        ge=0.1,
        le=LONGEST_SECONDS,
        description="Seconds between the server's heartbeats on an idle pull request; after two missed ones it is "
        "sent again",
    )
    owner_timeout: float = Field(
        default=5.0,
        ge=0.5,
        le=LONGEST_SECONDS,
        description="Seconds of silence after which a member's partitions are assigned to another member",
    )

    partitions: int = Field(
        default=1, ge=1, le=1024, description="Partitions of a topic that is created without a number of partitions"
    )
    storage: Literal["file", "memory"] = Field(default="file", description="Storage type of new topics")
    replicas: int = Field(default=1, ge=1, le=5, description="Replicas of a new topic in a cluster")
    deduplication_window: float = Field(
        default=120.0,
        ge=0.1,
        le=LONGEST_SECONDS,
        description="Seconds in which a new topic drops messages with a repeated id",
    )

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        if parts.scheme == "embedded":
            cls.refuse_parts(parts, "user", "password", "hosts")
            return {"embedded": parts.path.rstrip("/")}
        cls.refuse_parts(parts, "path")
        values: dict[str, Any] = {}
        if parts.hosts:
            values["servers"] = tuple(f"{parts.scheme}://{_with_port(str(host), host.port)}" for host in parts.hosts)
        if parts.password is not None:
            values.update(user=parts.user or "", password=parts.password)
        elif parts.user is not None:
            values["token"] = parts.user
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        ways = [
            name
            for name, given in {
                "user and password": self.user is not None or self.password is not None,
                "token": self.token is not None,
                "nkey_seed": self.nkey_seed is not None,
                "nkey_seed_file": self.nkey_seed_file is not None,
                "creds_file": self.creds_file is not None,
            }.items()
            if given
        ]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} are given; give one way to authenticate")
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password belong together")
        if (self.tls_key is not None or self.tls_key_password is not None) and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        if self.pull_heartbeat * 2 > self.pull_expires:
            raise ValueError("pull_heartbeat must be at most half of pull_expires")
        for server in self.servers:
            if not server.startswith(("nats://", "tls://")):
                raise ValueError(f"server {mask_url(server)!r} does not begin with nats:// or tls://")
        return self

    def check_given(self) -> None:
        super().check_given()
        if self.embedded is None:
            return
        for name in _OF_OTHER_SERVERS:
            # Variables serve all schemes, and only an address of another server uses these.
            if self.origin(name).kind not in {"default", "environment"}:
                raise InvalidSetting(
                    f"Setting {name!r} (from {self.origin(name)}) is given with an embedded server (from "
                    f"{self.origin('embedded')}), which has its own address and token",
                    advice=f"Leave {name!r} out, or use nats:// with the address of another server",
                )

    def secret_in_clear(self, server: str) -> str | None:
        """The setting whose secret may be sent to a server without TLS; None for a server on the loopback."""
        if self.uses_tls or self.embedded is not None:
            return None
        try:
            parts = urlsplit(server)
            host = parts.hostname or ""
        except ValueError:  # nats-py reports the address
            return None
        if is_loopback(host):
            return None
        if self.password is not None:
            return "password"
        if self.token is not None:
            return "token"
        return "servers" if parts.username is not None else None

    @property
    def embedded_url(self) -> str:
        """The URL of the embedded server, without parameters; "" for any other server."""
        if self.embedded is None:
            return ""
        return f"embedded://{quote(self.embedded)}" if self.embedded else "embedded:"

    @property
    def uses_tls(self) -> bool:
        """Whether the settings ask for TLS: nothing is sent without it. Else the server decides."""
        return self.embedded is None and (
            self.tls_ca is not None
            or self.tls_cert is not None
            or self.tls_hostname is not None
            or self.tls_handshake_first
            or any(server.startswith("tls://") for server in self.servers)
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context, or None where plain connections are fine.

        :raises InvalidSetting: a file cannot be read or is not what it should be.
        """
        if not self.uses_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=str(self.tls_ca) if self.tls_ca else None)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSetting(
                f"Setting 'tls_ca' {str(self.tls_ca)!r} cannot be used: {error}",
                native=error,
                advice="Name a PEM file of certificates",
            ) from error
        if self.tls_cert is not None:
            password = self.tls_key_password.get_secret_value() if self.tls_key_password else ""
            try:
                # A function, because OpenSSL asks on the terminal when an encrypted key has no password.
                context.load_cert_chain(self.tls_cert, self.tls_key, lambda: password)
            except (OSError, ssl.SSLError) as error:
                raise InvalidSetting(
                    f"Setting 'tls_cert' {str(self.tls_cert)!r} with its key cannot be used: {error}",
                    native=error,
                    advice="Name PEM files of a certificate and of its key, and the key's password if it has one",
                ) from error
        return context


def _with_port(host: str, port: int | None) -> str:
    return host if port is not None else f"{host}:4222"
