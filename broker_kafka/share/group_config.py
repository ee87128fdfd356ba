"""The configuration of a share group, and the capabilities of queue=share.

The client neither lists nor describes share groups: a group counts as existing if it has configuration of its own,
which this SDK sets when it creates one. *Concurrency.* Stateless; the last change wins. *Cancellation.* A cancelled
change may have been made. *Failure.* Errors name the group and the configuration, with what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError
from confluent_kafka.admin import (
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ConfigSource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from broker import (
    BrokerError,
    ConfirmedAck,
    InvalidName,
    InvalidSetting,
    LeaseMode,
    MessageCapabilities,
    NotAuthorized,
    SubscriptionNotFound,
    Unsupported,
)
from broker.driver import Start
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.cluster.connection import LONGEST_TIMEOUT, Connection
from broker_kafka.cluster.group_requests import ensure_coordinator, request_group
from broker_kafka.cluster.requests import plain_str, request, request_any_broker, retry_while
from broker_kafka.errors import kafka_error
from broker_kafka.settings import KafkaSettings

__all__ = [
    "DELIVERIES",
    "LOCK_SECONDS",
    "ShareGroupConfig",
    "configure_group",
    "configured_lock",
    "delete_group",
    "no_share_groups",
    "read_config",
    "require_group",
    "share_capabilities",
]


LOCK_SECONDS: Final = 30.0
"""The brokers' default lock."""
DELIVERIES: Final = 10
"""The delivery limit of groups that this creates: the most that brokers take by default."""


def configured_lock(settings: KafkaSettings) -> float:
    """The lock in seconds that delays and retries count on, before any group is known."""
    return settings.share_lock or LOCK_SECONDS


def share_capabilities(settings: KafkaSettings) -> MessageCapabilities:
    """The capabilities of a connection with queue=share. Pure."""
    return MessageCapabilities(
        lease=LeaseMode.FIXED,
        lease_seconds=configured_lock(settings),
        confirmed_ack=ConfirmedAck.OPTIONAL,
        delivery_attempt=True,
        delivery_limit=DELIVERIES,
        shared_by_message=False,
        start_latest=False,
        subscription_admin=False,
    )


_START: Final = "share.auto.offset.reset"
_LOCK: Final = "share.record.lock.duration.ms"
_ISOLATION: Final = "share.isolation.level"
_DELIVERIES: Final = "share.delivery.count.limit"
_GROUP_SOURCE: Final = 8
"""The config source of a group; confluent-kafka has no name for it."""
_NO_GROUP_CONFIG: Final = frozenset({KafkaError.INVALID_REQUEST, KafkaError.UNSUPPORTED_VERSION})


@dataclass(frozen=True, slots=True)
class ShareGroupConfig:
    """The configuration of a group.

    :ivar values: all that is in effect, by Kafka's names.
    :ivar own: the names of those that were set on the group itself.
    """

    values: Mapping[str, str]
    own: frozenset[str]

    @property
    def exists(self) -> bool:
        """Whether this SDK created the group, or someone configured it."""
        return bool(self.own)

    @property
    def lock_seconds(self) -> float:
        """The lock of a message."""
        return int(self.values[_LOCK]) / 1000

    @property
    def delivery_limit(self) -> int | None:
        """After how many deliveries the brokers drop a message; None if they have no such limit per group."""
        return int(self.values[_DELIVERIES]) if _DELIVERIES in self.values else None


async def read_config(connection: Connection, group: str) -> ShareGroupConfig:
    """:raises Unsupported: the brokers have no share groups."""
    resource = ConfigResource(ResourceType.GROUP, plain_str(group))
    try:
        found = await request_any_broker(
            connection,
            lambda client, patience: client.describe_configs([resource], request_timeout=patience),
            f"Describing share group {group!r}",
        )
    except BrokerError as error:
        native = kafka_error(error.native) if error.native is not None else None
        if native is not None and native.code() in _NO_GROUP_CONFIG:
            raise no_share_groups(connection, error.native) from error
        raise
    values = {name: str(entry.value) for name, entry in found.items() if name.startswith("share.")}
    if _LOCK not in values:
        raise no_share_groups(connection, None)
    own = frozenset(name for name in values if _source(found[name]) == _GROUP_SOURCE)
    return ShareGroupConfig(values, own)


async def require_group(connection: Connection, topic: str, group: str) -> ShareGroupConfig:
    """:raises SubscriptionNotFound: the group does not exist.
    :raises InvalidName: a consumer group has its name.
    """
    await _refuse_consumer_group(connection, group)
    config = await read_config(connection, group)
    if not config.exists:
        raise SubscriptionNotFound(f"There is no share group {group!r} for topic {topic!r}")
    return config


async def configure_group(
    connection: Connection, group: str, start: Start
) -> tuple[ShareGroupConfig, ShareGroupConfig]:
    """Configure the group so that new partitions begin at `start`; returns its configuration before and after.

    Existing configuration stays, except for the start, and for the lock if `share_lock` is set.

    :raises Unsupported: the brokers have no share groups, or the start is another than the earliest.
    :raises NotAuthorized: the group may not be configured from here.
    :raises InvalidName: a consumer group has its name.
    """
    if start != "earliest":
        raise Unsupported(
            f"A share group cannot start at {start!r}: the brokers keep no position before the first ack",
            advice="Start at the earliest, or set the group's position with Kafka's own tool: kafka-share-groups "
            "--reset-offsets",
        )
    await _refuse_consumer_group(connection, group)
    before = await read_config(connection, group)
    # Brokers 4.2 have no delivery limit per group; their own applies.
    ours = {_ISOLATION: "read_committed", _DELIVERIES: str(DELIVERIES)}
    wanted: dict[str, str] = {_START: "earliest"}
    wanted |= {n: v for n, v in ours.items() if n in before.values and n not in before.own}
    lock = connection.settings.share_lock
    if lock is not None:
        wanted[_LOCK] = str(round(lock * 1000))
    changes = {name: value for name, value in wanted.items() if name not in before.own or before.values[name] != value}
    return before, await _alter(connection, group, changes) if changes else before


async def delete_group(connection: Connection, group: str) -> None:
    """Delete the group with its configuration; does nothing if it does not exist.

    :raises BrokerError: the group has members.
    """
    await ensure_coordinator(connection, group)
    # A group without members so far is configuration only.
    with suppress(SubscriptionNotFound):
        await request_group(
            connection,
            lambda client: client.delete_consumer_groups([plain_str(group)], request_timeout=LONGEST_TIMEOUT),
            f"Deleting share group {group!r}",
            group,
        )
    config = await read_config(connection, group)
    if config.own:
        await _alter(connection, group, dict.fromkeys(config.own))


def no_share_groups(connection: Connection, native: BaseException | None) -> Unsupported:
    """The error for brokers that are too old, or whose share groups are switched off."""
    return Unsupported(
        f"The brokers at {connection.servers} have no share groups, which queue=share needs",
        native=native,
        advice="Use Kafka 4.2 or newer, and switch them on with `kafka-features upgrade --feature share.version=1`; "
        "or leave out queue=share",
    )


async def _refuse_consumer_group(connection: Connection, group: str) -> None:
    """Refuse the name of a consumer group: brokers would take the configuration, and find no share group later.

    :raises InvalidName: a consumer group has this name.
    """
    try:
        info = await KafkaGroups(connection).state(group)
    except NotAuthorized:
        return  # joining the group raises it
    if info is None:
        return
    members = f"{len(info.members)} members" if info.members else "no members"
    raise InvalidName(
        f"Share group {group!r} has the name of a consumer group with {members}, as queue=offsets, queue=markers and "
        "bus.records create them",
        advice="Use another subscription; or stop its consumers and delete it with its positions: "
        f"bus.admin.delete_group({group!r})",
    )


async def _alter(connection: Connection, group: str, changes: Mapping[str, str | None]) -> ShareGroupConfig:
    """Set these, or unset those that are None; returns the configuration afterwards."""
    entries = [
        ConfigEntry(
            name,
            value or "",
            incremental_operation=AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET,
        )
        for name, value in changes.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, plain_str(group), incremental_configs=entries)
    result = await request(
        connection,
        lambda client: client.incremental_alter_configs(
            [resource], request_timeout=connection.settings.request_timeout
        ),
        f"Configuring share group {group!r}",
    )
    if isinstance(result, NotAuthorized):
        wanted = ", ".join(f"{name}={value}" for name, value in changes.items())
        raise NotAuthorized(
            f"This user may not configure share group {group!r}",
            native=result.native,
            advice=f"Allow ALTER_CONFIGS on the group, or have an administrator set {wanted}, and open it with "
            "create=False",
        )
    if isinstance(result, InvalidSetting) and _LOCK in changes and "lock.duration" in str(result):
        raise InvalidSetting(
            f"share_lock is {connection.settings.share_lock:g}, which the brokers refuse",
            native=result.native,
            advice="Stay between their group.share.min. and group.share.max.record.lock.duration.ms, 15 to 60 s "
            "unless they are configured",
        )
    if isinstance(result, BrokerError):
        raise result

    async def attempt() -> ShareGroupConfig:
        return await read_config(connection, group)

    def is_old(found: ShareGroupConfig) -> bool:
        return any(
            name in found.own if value is None else found.values.get(name) != value for name, value in changes.items()
        )

    # Brokers learn the change from their controller a moment later.
    return await retry_while(connection.settings.request_timeout, attempt, is_old)


def _source(entry: Any) -> int:
    source = entry.source
    return source.value if isinstance(source, ConfigSource) else int(source)
