"""Settings of the in-memory backend: the server in this process, and the options of a new one.

`inmem:` is the server named "default"; `inmem://name` or `inmem:name` is the one of that name. A server is created on
first use and lives as long as the process. Immutable, safe from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pydantic import Field, field_validator

from broker.driver import UrlParts
from broker.driver.settings import BackendSettings
from broker_inmem.options import BrokerOptions
from broker_inmem.server import Broker

__all__ = ["InmemSettings"]


_SERVER_SETTINGS: Final = (
    "seed",
    "shuffle",
    "partitions",
    "native_delay",
    "dedup_seconds",
    "session_seconds",
    "rebalance_seconds",
    "transaction_seconds",
    "retention_seconds",
    "retention_messages",
    "max_body",
)


class InmemSettings(BackendSettings):
    """An in-memory server. All settings except `name`, `broker` and `lease_seconds` apply to a new server; other values
    than those of an existing server are an error."""

    schemes: ClassVar[tuple[str, ...]] = ("inmem", "memory")

    name: str = Field(default="default", description="Name of the server within this process", min_length=1)
    broker: Broker | None = Field(default=None, description="The server object, for tests that create their own")
    lease_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Seconds for which a message is leased without renewal; if not set, the server's value, 30",
    )
    seed: int | None = Field(default=None, description="Seed of the random order between keys; random if not set")
    shuffle: int | None = Field(
        default=None,
        ge=0,
        description="Window within which messages of different keys are shuffled; 0 keeps the order; 8 if not set",
    )
    partitions: int | None = Field(
        default=None,
        ge=1,
        description="Partitions of a topic that is created without a number of partitions; 4 if not set",
    )
    native_delay: float | None = Field(
        default=None, ge=0, description="Longest nack delay that the server supports, in seconds; 30 days if not set"
    )
    dedup_seconds: float | None = Field(
        default=None, ge=0, description="Seconds in which the server drops messages with a repeated id; 120 if not set"
    )
    session_seconds: float | None = Field(
        default=None, gt=0, description="Seconds of silence after which a group removes a member; 10 if not set"
    )
    rebalance_seconds: float | None = Field(
        default=None, gt=0, description="Seconds that a member has to release revoked partitions; 30 if not set"
    )
    transaction_seconds: float | None = Field(
        default=None, gt=0, description="Seconds after which the server aborts an open transaction; 60 if not set"
    )
    retention_seconds: float | None = Field(
        default=None, gt=0, description="Age in seconds at which records are deleted from the log; never if not set"
    )
    retention_messages: int | None = Field(
        default=None, ge=1, description="Most records in the log of a partition; unlimited if not set"
    )
    max_body: int | None = Field(default=None, ge=1, description="Largest message body in bytes; 1 MiB if not set")

    @field_validator("broker", mode="before")
    @classmethod
    def _is_broker(cls, value: object) -> object:
        if value is not None and not isinstance(value, Broker):
            raise ValueError("a Broker object can only be given as an argument")
        return value

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        cls.refuse_parts(parts, "user", "password")
        if not parts.hosts:
            if parts.path.startswith("/"):
                cls.refuse_parts(parts, "path")
            return {"name": parts.path} if parts.path.strip("/") else {}
        cls.refuse_parts(parts, "path")
        return {"name": ",".join(map(str, parts.hosts))}

    def options(self) -> BrokerOptions | None:
        """The options of a new server; None if no setting is given."""
        given = {name: value for name in _SERVER_SETTINGS if (value := getattr(self, name)) is not None}
        return BrokerOptions(**given) if given else None

    def server(self) -> Broker:
        """The server that these settings name, created if missing.

        :raises ConfigurationError: it exists with other options.
        """
        return self.broker if self.broker is not None else Broker.named(self.name, self.options())
