"""Settings of the Pub/Sub backend, from a URL, the environment or keyword arguments.

Immutable and created without I/O, so `open` reports a missing key file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from broker import InvalidSetting
from broker.driver import UrlParts
from broker.driver.settings import BackendSettings, Form

__all__ = ["PubSubSettings"]

PROJECT_VARIABLE: Final = "GOOGLE_CLOUD_PROJECT"
EMULATOR_VARIABLE: Final = "PUBSUB_EMULATOR_HOST"
SHORTEST_LEASE: Final = 10.0
"""Seconds; the service's minimum ack deadline. Emulators accept less."""
_DAY: Final = 86_400.0
_MONTH: Final = 31 * 86_400.0


class PubSubSettings(BackendSettings):
    """How to reach Pub/Sub, and how to use it."""

    schemes: ClassVar[tuple[str, ...]] = ("pubsub",)

    project: Annotated[
        str | None,
        Form(
            r"[a-z][a-z0-9.:-]{4,61}[a-z0-9]",
            "6 to 63 lower-case letters, digits and .:-, of which the first is a letter and the last none of .:-",
        ),
    ] = Field(
        default=None,
        description="Id of the Google Cloud project; the host of the URL, or GOOGLE_CLOUD_PROJECT",
    )
    emulator_host: Annotated[str | None, Form(r"[^\s:/]+:\d+", "a host and a port, such as localhost:8085")] = Field(
        default=None,
        description="host:port of an emulator, used without TLS and credentials; or PUBSUB_EMULATOR_HOST",
    )
    endpoint: Annotated[
        str, Form(r"[^\s/]+:\d+", "a host and a port, such as europe-west1-pubsub.googleapis.com:443")
    ] = Field(
        default="pubsub.googleapis.com:443",
        description="host:port of the service; a regional endpoint keeps the order of keys across the publishers "
        "of its region",
    )
    tls_ca: Path | None = Field(
        default=None, description="PEM file of the CA certificates that verify the server's certificate"
    )
    credentials_file: Path | None = Field(
        default=None,
        description="JSON file of a service account or of gcloud's login; if not set, the default credentials",
    )
    impersonate: Annotated[
        str | None, Form(r"[^@\s]+@[^@\s]+", "an e-mail address, such as robot@project.iam.gserviceaccount.com")
    ] = Field(
        default=None,
        description="E-mail address of the service account to impersonate",
    )
    quota_project: str | None = Field(default=None, description="Project that is billed, if not `project`")

    connect_timeout: float = Field(default=10.0, gt=0, le=_DAY, description="Seconds for the first connection")
    request_timeout: float = Field(
        default=10.0, gt=0, le=_DAY, description="Seconds to wait for the response to a request"
    )
    publish_timeout: float = Field(
        default=30.0, gt=0, le=_DAY, description="Seconds until a publish raises OperationTimeout"
    )
    settle_timeout: float = Field(default=10.0, gt=0, le=_DAY, description="Seconds for which failed acks are retried")
    reconnect_wait: float = Field(
        default=0.2,
        ge=0.1,
        le=60,
        description="Seconds before the first reconnect attempt; later waits grow to ten times that",
    )
    max_requests: int = Field(default=16, ge=1, le=1000, description="Most publish requests in flight, per topic")
    ordering: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Publish keys as ordering keys, one request at a time per key, and create ordered "
        "subscriptions; `auto` creates unordered ones on an emulator",
    )

    pull_mode: Literal["unary", "stream"] = Field(
        default="unary",
        description="`unary` pulls as many messages as there is room for; `stream` keeps a stream open and buffers "
        "the surplus",
    )
    pull_timeout: float = Field(
        default=30.0, ge=2.0, le=600.0, description="Seconds after which an unanswered pull is sent again"
    )
    lease_seconds: float = Field(
        default=30.0,
        ge=1.0,
        le=600.0,
        description="Ack deadline: whole seconds for which a message is leased without renewal",
    )
    exactly_once: bool = Field(
        default=False, description="Create subscriptions with exactly-once delivery, whose acks are confirmed"
    )
    topic_retention: float = Field(
        default=86_400.0,
        ge=0,
        le=_MONTH,
        description="Seconds for which new topics retain messages for later subscriptions; 0 for none, else 600 or "
        "more",
    )
    retention: float = Field(
        default=7 * 86_400.0,
        ge=600,
        le=_MONTH,
        description="Seconds for which new subscriptions retain unacked messages",
    )

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        cls.refuse_parts(parts, "user", "password", "path")
        if len(parts.hosts) > 1 or (parts.hosts and parts.hosts[0].port is not None):
            raise InvalidSetting(
                f"A pubsub:// URL names one project, but {','.join(map(str, parts.hosts))!r} is given",
                advice="Write pubsub://my-project, and the address of an emulator as ?emulator_host=host:port",
            )
        return {"project": parts.hosts[0].name} if parts.hosts else {}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.lease_seconds != int(self.lease_seconds):
            raise ValueError(f"lease_seconds is {self.lease_seconds:g}, Pub/Sub needs whole seconds")
        if self.emulator is None and self.lease_seconds < SHORTEST_LEASE:
            raise ValueError(f"lease_seconds is {self.lease_seconds:g}, the service accepts 10 to 600")
        if 0 < self.topic_retention < 600:
            raise ValueError(f"topic_retention is {self.topic_retention:g}, the service accepts 600 or more, or 0")
        if self.emulator_host is not None and (self.credentials_file is not None or self.impersonate is not None):
            raise ValueError("emulator_host and credentials exclude each other")
        for name in ("tls_ca", "quota_project"):
            if self.emulator_host is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"emulator_host and {name} exclude each other: an emulator has neither TLS nor accounts"
                )
        return self

    @property
    def project_id(self) -> str:
        """The project to use.

        :raises InvalidSetting: none is named.
        """
        found = self.project or os.environ.get(PROJECT_VARIABLE)
        if not found:
            raise InvalidSetting(
                "Setting 'project' of PubSubSettings is not given",
                advice=f"Give it in the URL, pubsub://my-project, or as {PROJECT_VARIABLE}",
            )
        return found

    @property
    def emulator(self) -> str | None:
        """host:port of the emulator to use, or None for the service."""
        return self.emulator_host or os.environ.get(EMULATOR_VARIABLE) or None

    @property
    def longest_reconnect_wait(self) -> float:
        """The longest pause, in seconds, before a reconnect or a reopened stream."""
        return 10 * self.reconnect_wait

    @property
    def orders_subscriptions(self) -> bool:
        """Whether new subscriptions are ordered. The emulator cannot seek these, and redelivers their nacks late."""
        return self.ordering == "on" or (self.ordering == "auto" and self.emulator is None)

    @property
    def server(self) -> str:
        """host:port of the server."""
        return self.emulator or self.endpoint
