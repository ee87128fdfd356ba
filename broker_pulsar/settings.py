"""Settings of the Pulsar backend, from a URL, the environment or keyword arguments.

Immutable and made without I/O, so a missing file is reported by `open`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from broker import InvalidSetting
from broker.driver import UrlParts, mask_url
from broker.driver.settings import BackendSettings, Form

__all__ = ["PulsarSettings"]

LONGEST_SECONDS: Final = 2_000_000.0
"""The client counts milliseconds in 31 bits."""

LARGEST_BYTES: Final = 2**31 - 1
"""The client counts the bytes of a message so."""

_LOGINS: Final = ("token", "token_file", "oauth2_issuer")
_NAME: Final = Form(r"[A-Za-z0-9._=:-]+", "letters, digits and any of ._=:-")


class PulsarSettings(BackendSettings):
    """How to reach a Pulsar cluster, and how to publish and consume."""

    schemes: ClassVar[tuple[str, ...]] = ("pulsar", "pulsar+ssl")

    service_url: str = Field(
        default="pulsar://127.0.0.1:6650",
        description="Broker addresses, pulsar://host:port,host:port or pulsar+ssl://…; scheme and hosts of the URL",
    )
    admin_url: str | None = Field(
        default=None,
        description="URL of a broker's HTTP API; if not set, port 8080 (8443 with TLS) of the first host",
    )
    admin_hosts: tuple[str, ...] = Field(
        default=(),
        description="Further host names that may get the token when the HTTP API redirects to them, besides those of "
        "the URL and, for superusers, the brokers of the cluster; .example.com for all of a domain",
    )
    tenant: Annotated[str, _NAME] = Field(default="public", description="Tenant; the first part of the URL's path")
    namespace: Annotated[str, _NAME] = Field(
        default="default", description="Namespace of the topics; the rest of the URL's path"
    )

    token: SecretStr | None = Field(default=None, description="Authentication token")
    token_file: Path | None = Field(
        default=None, description="File that holds the token; read each time the token is needed"
    )
    oauth2_issuer: str | None = Field(default=None, description="Issuer of OAuth 2.0 tokens, or its token endpoint")
    oauth2_client_id: str | None = Field(default=None, description="Client id for OAuth 2.0")
    oauth2_client_secret: SecretStr | None = Field(default=None, description="Client secret for OAuth 2.0")
    oauth2_audience: str | None = Field(default=None, description="Audience of the requested OAuth 2.0 token")
    oauth2_scope: str | None = Field(default=None, description="Scope of the requested OAuth 2.0 token")
    oauth2_allow_http: bool = Field(
        default=False, description="Accept an issuer without TLS, to which the client secret goes in clear"
    )
    tls_ca: Path | None = Field(
        default=None, description="PEM file of the CA certificates that verify the brokers' certificates"
    )
    tls_cert: Path | None = Field(default=None, description="PEM file of the client's certificate, for mutual TLS")
    tls_key: Path | None = Field(default=None, description="PEM file of the client's private key, unencrypted")
    tls_validate_hostname: bool = Field(default=True, description="Check that the broker's certificate names its host")

    connect_timeout: float = Field(
        default=5.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="Seconds for the first connection, and for each later attempt",
    )
    request_timeout: float = Field(
        default=15.0, ge=1, le=LONGEST_SECONDS, description="Seconds to wait for the response to a request"
    )
    io_threads: int = Field(default=1, ge=1, le=64, description="I/O threads of the client")
    listener_name: str | None = Field(default=None, description="Advertised listener of the brokers to connect to")
    client_log: Path | None = Field(default=None, description="File for the log of the client; not in a URL")

    publish_timeout: float = Field(
        default=30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="Seconds without confirmation until a publish raises OperationTimeout",
    )
    publish_window: int = Field(
        default=5000, ge=1, le=100_000, description="Most unconfirmed messages in flight, per topic"
    )
    batching: Literal["key", "default", "off"] = Field(
        default="key",
        description="`key`: each batch holds one key, which ordered consumers need; `default`: fewer and larger "
        "batches; `off`: none",
    )
    batching_max_messages: int = Field(
        default=1000, ge=2, le=4095, description="Most messages in one batch; for single messages, set batching=off"
    )
    batching_max_bytes: int = Field(default=131_072, ge=1024, le=LARGEST_BYTES, description="Most bytes in one batch")
    linger: float = Field(default=0.001, ge=0.001, le=60.0, description="Longest wait for a batch to fill, in seconds")
    compression: Literal["none", "lz4", "zlib", "zstd", "snappy"] = Field(
        default="none", description="Compression codec of batches"
    )
    chunking: bool = Field(
        default=False, description="Publish messages above the broker's size limit in chunks; needs batching=off"
    )
    max_message_bytes: int = Field(
        default=5_242_880,
        ge=16_384,
        le=LARGEST_BYTES,
        description="The brokers' maxMessageSize; with chunking, the size of the largest message",
    )
    producer_name: str | None = Field(
        default=None,
        description="Name of the producers, for deduplication: ids that are whole numbers become sequence numbers",
    )
    access_mode: Literal["shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing"] = Field(
        default="shared",
        description="Whether other producers may publish to the same topics; with wait_for_exclusive, the first "
        "publish waits without a timeout until no other producer is left",
    )

    receiver_queue: int = Field(
        default=1000,
        ge=1,
        le=50_000,
        description="Messages that a consumer prefetches; never more than max_outstanding",
    )
    nack_delay: float = Field(
        default=0.3,
        ge=0.001,
        le=3600.0,
        description="Seconds until a nacked or released message is redelivered, with those of its batch that the "
        "broker does not know as acked yet: the client sends acks within 0.1 s",
    )
    rebalance_interval: float = Field(
        default=0.5,
        ge=0.05,
        le=60.0,
        description="Seconds between checks of which member reads which partition of a group",
    )
    partitions: int = Field(
        default=1, ge=1, le=1024, description="Partitions of a topic that is created without a number of partitions"
    )

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        cls.refuse_parts(parts, "user", "password")
        values: dict[str, Any] = {}
        if parts.hosts:
            port = 6651 if parts.scheme == "pulsar+ssl" else 6650
            hosts = ",".join(str(host) if host.port is not None else f"{host}:{port}" for host in parts.hosts)
            values["service_url"] = f"{parts.scheme}://{hosts}"
        names = parts.path.strip("/").split("/") if parts.path.strip("/") else []
        if names:
            values["tenant"] = names[0]
            values["namespace"] = "/".join(names[1:]) if len(names) > 1 else "default"
        return values

    def check_given(self) -> None:
        super().check_given()
        origin = self.origin("client_log")
        if origin.kind == "url":
            raise InvalidSetting(
                f"Setting 'client_log' (from {origin}) is {str(self.client_log)!r}",
                advice=f"Give it in code, as {self.environment_prefix()}CLIENT_LOG or in a file: a URL names no file "
                "that is written",
            )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.service_url.startswith(("pulsar://", "pulsar+ssl://")):
            raise ValueError(
                f"service_url {mask_url(self.service_url)!r} does not begin with pulsar:// or pulsar+ssl://"
            )
        if "@" in self.service_url:
            raise ValueError(
                f"service_url {mask_url(self.service_url)!r} has a user; give token, token_file or oauth2_issuer"
            )
        if self.admin_url is not None:
            _check_address("admin_url", self.admin_url, has_path=False)
        if self.oauth2_issuer is not None:
            _check_address("oauth2_issuer", self.oauth2_issuer, has_path=True)
            if urlsplit(self.oauth2_issuer).scheme != "https" and not self.oauth2_allow_http:
                raise ValueError(
                    f"oauth2_issuer {self.oauth2_issuer!r} is not https, so the client secret would go there in clear; "
                    "use https://, or set oauth2_allow_http=true"
                )
        ways = [name for name in _LOGINS if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} are given; give one way to authenticate")
        oauth2 = (self.oauth2_issuer, self.oauth2_client_id, self.oauth2_client_secret)
        if any(part is None for part in oauth2) and any(part is not None for part in oauth2):
            raise ValueError("oauth2_issuer, oauth2_client_id and oauth2_client_secret belong together")
        for name in ("oauth2_audience", "oauth2_scope"):
            if getattr(self, name) is not None and self.oauth2_issuer is None:
                raise ValueError(f"{name} needs oauth2_issuer")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        https = [url for url in (self.http_url, self.oauth2_issuer) if url is not None and url.startswith("https://")]
        if not self.uses_tls and not https:
            for name in ("tls_ca", "tls_cert"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs TLS; use pulsar+ssl://")
        if self.chunking and self.batching != "off":
            raise ValueError("chunking needs batching=off: Pulsar does not split batches")
        return self

    @property
    def login(self) -> str | None:
        """The setting that gives the token, if there is one."""
        return next((name for name in _LOGINS if getattr(self, name) is not None), None)

    @property
    def uses_tls(self) -> bool:
        return self.service_url.startswith("pulsar+ssl://")

    @property
    def hosts(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each broker."""
        found: list[tuple[str, int]] = []
        for each in self.service_url.partition("://")[2].partition("/")[0].split(","):
            host, colon, port = each.rpartition(":")
            known = bool(colon) and port.isdecimal()
            found.append(
                ((host if known else each).strip("[]"), int(port) if known else (6651 if self.uses_tls else 6650))
            )
        return tuple(found)

    @property
    def http_url(self) -> str:
        """The HTTP API, with its default."""
        if self.admin_url is not None:
            return self.admin_url.rstrip("/")
        host = self.hosts[0][0]
        host = f"[{host}]" if ":" in host else host
        return f"https://{host}:8443" if self.uses_tls else f"http://{host}:8080"


def _check_address(name: str, address: str, *, has_path: bool) -> None:
    """:raises ValueError: not an HTTP address, or one with a path, query or user."""
    shown = repr(mask_url(address))
    try:
        place = urlsplit(address)
        port = place.port
    except ValueError:
        # Its text may quote the password.
        raise ValueError(f"{name} {shown} is no address; write http:// or https://, a host and a port") from None
    if place.scheme not in {"http", "https"} or not place.hostname or port == 0:
        raise ValueError(f"{name} {shown} does not begin with http:// or https:// and a host")
    # With a '/' in its password, a user is no user of `urlsplit`.
    if "@" in address or place.query or place.fragment or (place.path.strip("/") and not has_path):
        raise ValueError(f"{name} {shown} must have only scheme, host and port")
