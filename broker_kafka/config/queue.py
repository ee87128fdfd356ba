"""The settings of Kafka's queues: the engine that serves messages, and the options of each."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from broker import InvalidSetting
from broker.driver.settings import BackendSettings, Form

__all__ = ["QueueSettings"]

_ENGINES: Final = {
    **dict.fromkeys(
        (
            "lease_seconds",
            "marker_format",
            "marker_topic",
            "queue_tracker",
            "queue_id",
            "queue_transactions",
            "redelivery_rate",
        ),
        "markers",
    ),
    **dict.fromkeys(("share_lock", "share_members"), "share"),
}
"""Settings that one engine alone uses."""
_WITHOUT: Final = {"queue_id": "would deliver the messages of all queues"}
_RANKS: Final = {"default": 0, "file": 1, "environment": 2, "url": 3, "argument": 3}
"""The precedence of origins."""


class QueueSettings(BackendSettings):
    """The part of `KafkaSettings` that concerns the Message family alone; none is a property of librdkafka."""

    queue: Literal["offsets", "markers", "share"] = Field(
        default="offsets",
        description="How the messages of a subscription are settled: `offsets` commits the offsets of its group; "
        "`markers` writes to a marker topic, with leases and delays that outlive the process; `share` "
        "uses a share group of the broker (KIP-932, Kafka 4.2)",
    )
    lease_seconds: float = Field(
        default=30.0,
        ge=0.5,
        le=43_200,
        description="Queue `markers`: seconds without a renewal of the lease after which a message is redelivered",
    )
    marker_format: Literal["v2", "v2-single", "v1"] = Field(
        default="v2",
        description="Queue `markers`: format of the markers that consumers write. A tracker of kafka-mq-go reads "
        "`v2-single`, which loses nothing, and `v1`, which loses attributes, ids and attempts on "
        "redelivery; but not `v2`",
    )
    marker_topic: Annotated[
        str | None, Form("[A-Za-z0-9._-]{1,240}", "1 to 240 letters of ASCII, digits, dots, underscores and hyphens")
    ] = Field(
        default=None,
        description="Queue `markers`: the marker topic, which several subscriptions and kafka-mq-go can share; if "
        "not set, each subscription has its own, `<subscription>.markers`",
    )
    queue_tracker: bool = Field(
        default=True,
        description="Queue `markers`: track the queue in its consumers; if false, run `broker tracker` or another "
        "tracker",
    )
    queue_id: str | None = Field(
        default=None,
        min_length=1,
        description="Queue `markers`: the queue in topics that several queues share: records with this key are its "
        "messages, and all others are skipped",
    )
    queue_transactions: bool = Field(
        default=False,
        description="Queue `markers`: write the STARTs of a fetch and the group's offsets in one transaction, so "
        "that a process that is suspended in between causes no duplicates",
    )
    redelivery_rate: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Queue `markers`: most messages that one tracker redelivers per second, after a burst of as "
        "many, so that leases that expire together do not delay new messages",
    )
    share_lock: float | None = Field(
        default=None,
        ge=1,
        le=3600,
        description="Queue `share`: seconds for which a message is locked for a consumer, set on the group; if not "
        "set, the group's own value, or the brokers' 30",
    )
    share_members: int = Field(
        default=8,
        ge=1,
        le=100,
        description="Queue `share`: most clients of one consumer; each fetches again after its last message is settled",
    )

    def check_given(self) -> None:
        super().check_given()
        for name, engine in _ENGINES.items():
            # One connection may override a setting of all connections, but never queue_id.
            overridden = name != "queue_id" and self.is_outranked(name, "queue")
            if self.queue != engine and self.is_given(name) and not overridden:
                raise InvalidSetting(
                    f"Setting {name!r} (from {self.origin(name)}) is {getattr(self, name)!r}, and "
                    f"queue={self.queue} (from {self.origin('queue')}) {_WITHOUT.get(name, 'does not use it')}",
                    advice=f"Set queue={engine}, or remove {name}",
                )

    def is_given(self, name: str) -> bool:
        """Whether the setting was given, and is not None."""
        return self.origin(name).kind != "default" and getattr(self, name) is not None

    def is_outranked(self, name: str, by: str) -> bool:
        """Whether setting `by` comes from an origin of higher precedence: the URL over the environment."""
        return _RANKS[self.origin(by).kind] > _RANKS[self.origin(name).kind]
