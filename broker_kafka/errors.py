"""What confluent-kafka and the brokers say, as errors of `broker`. Pure functions, safe from any thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from broker import (
    AuthenticationFailed,
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    InvalidMessage,
    InvalidSetting,
    LeaseLost,
    MessageTooLarge,
    NotAuthorized,
    OffsetOutOfRange,
    OperationTimeout,
    SettleError,
    SubscriptionNotFound,
    TopicNotFound,
    TopicPartition,
    TransactionFatal,
    UnknownSetting,
    Unsupported,
)
from broker.driver import is_secret_name
from broker_kafka.config.properties import KNOWN_PROPERTIES, did_you_mean

__all__ = [
    "FENCED",
    "GENERATION_LOST",
    "commit_unanswered",
    "configuration_error",
    "is_partition_error",
    "kafka_error",
    "not_assigned",
    "translate",
]

_UNKNOWN_PROPERTY: Final = re.compile(r'No such configuration property: "([^"]*)"')
_QUOTED: Final = re.compile(r"[\"`]([a-z][a-z._]*)[\"`]")
_UNNAMED: Final = {"Failed to parse pattern": "topic.blacklist", "dlopen()": "plugin.library.paths"}
"""The properties that librdkafka leaves unnamed, by what it says of them."""
_KEYS: Final = frozenset({"ssl.key.location", "ssl.key.pem"})
_DOTTED: Final = re.compile(r"\b[a-z]+(?:\.[a-z]+)+\b")

FENCED: Final = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.TRANSACTION_COORDINATOR_FENCED,
    }
)
"""Another producer of the transactional id took over, or the broker gave this one up."""

GENERATION_LOST: Final = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError._ASSIGNMENT_LOST,
    }
)
"""This member is not, or not in this generation, the owner of what it commits."""

_Make = Callable[..., BrokerError]


def _codes(make: _Make, *codes: int) -> dict[int, _Make]:
    return dict.fromkeys(codes, make)


def _invalid_topic(message: str, **rest: Any) -> BrokerError:
    return ConfigurationError(message, advice="Kafka takes letters, digits, '.', '_' and '-', 249 at most", **rest)


_CLASSES: Final[dict[int, _Make]] = {
    **_codes(
        TopicNotFound,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_ID,
    ),
    **_codes(SubscriptionNotFound, KafkaError.GROUP_ID_NOT_FOUND, KafkaError._UNKNOWN_GROUP),
    **_codes(
        AuthenticationFailed,
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    ),
    **_codes(
        NotAuthorized,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    ),
    **_codes(
        MessageTooLarge,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
    ),
    **_codes(
        InvalidMessage,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError._UNKNOWN_PARTITION,
    ),
    **_codes(
        ConnectionFailed,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._NODE_UPDATE,
        KafkaError._DESTROY_BROKER,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REPLICA_NOT_AVAILABLE,
    ),
    **_codes(
        OperationTimeout,
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError.REQUEST_TIMED_OUT,
    ),
    **_codes(
        OffsetOutOfRange,
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError._NO_OFFSET,
        KafkaError._LOG_TRUNCATION,
    ),
    **_codes(LeaseLost, *GENERATION_LOST),
    **_codes(TransactionFatal, *FENCED),
    **_codes(
        Unsupported,
        KafkaError._UNSUPPORTED_FEATURE,
        KafkaError._NOT_IMPLEMENTED,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError.SECURITY_DISABLED,
        KafkaError.TOPIC_DELETION_DISABLED,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.UNSUPPORTED_ASSIGNOR,
    ),
    **_codes(
        InvalidSetting,
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_REPLICA_ASSIGNMENT,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_REGULAR_EXPRESSION,
        KafkaError._UNKNOWN_PROTOCOL,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    ),
    **_codes(SettleError, KafkaError.OFFSET_METADATA_TOO_LARGE, KafkaError.INVALID_COMMIT_OFFSET_SIZE),
    KafkaError.TOPIC_EXCEPTION: _invalid_topic,
}

_SHARE_GROUP: Final = "a share group has this name, as queue=share makes them, take another"
_TAKEN_AWAY: Final = "Its new owner reads from the last commit on; make the work repeatable"

_MENDS: Final = {
    **dict.fromkeys(GENERATION_LOST, _TAKEN_AWAY),
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Grant this user the operations Read and Describe on the group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Grant this user the operations Write and Describe on the "
    "transactional id",
    KafkaError.UNKNOWN: "The broker failed within; its log says why, a full disk perhaps",
    KafkaError.INVALID_SESSION_TIMEOUT: "Set session_timeout_ms within the brokers' group.min.session.timeout.ms and "
    "group.max.session.timeout.ms",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "Set transaction_timeout_ms to the brokers' "
    "transaction.max.timeout.ms or less",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "Give all members of a group the same partition_assignment_strategy; or if "
    + _SHARE_GROUP,
    KafkaError.UNSUPPORTED_ASSIGNOR: "Set group_remote_assignor to one that the brokers have: uniform or range",
    KafkaError.FENCED_INSTANCE_ID: "Give each member of a group a group_instance_id of its own; of two with one, the "
    "later goes on with group_protocol=classic, and the earlier with consumer",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "Mark with metadata within the brokers' offset.metadata.max.bytes, 4096 by "
    "default; the position is not committed with it",
    KafkaError.INVALID_RECORD: "A compacted topic takes no message without a key, and Kafka refuses all of the batch "
    "that has one; give each a key",
    KafkaError._BAD_MSG: "The answer was not understood: either no Kafka broker answers there, or "
    "receive.message.max.bytes is too small for it",
    KafkaError.UNRELEASED_INSTANCE_ID: "Give each member of a group a group_instance_id of its own; one that ended "
    "without leaving keeps it until its session is over",
}
"""What to do about what no setting can know by itself."""

_ENDED: Final = (KafkaError.UNSUPPORTED_ASSIGNOR, KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID)
"""For these a consumer ends for good; its error says so in words alone."""

_RETRIABLE: Final = frozenset(
    {
        KafkaError._WAIT_COORD,
        KafkaError._QUEUE_FULL,
        KafkaError._RETRY,
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._MAX_POLL_EXCEEDED,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.CONCURRENT_TRANSACTIONS,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.PREFERRED_LEADER_NOT_AVAILABLE,
        KafkaError._NOENT,  # none of the partitions that were asked about has a leader
        # What was known of a leader is older, or newer, than what it knows: after a restart, for a moment.
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.LISTENER_NOT_FOUND,
    }
)


def kafka_error(error: KafkaError | BaseException) -> KafkaError | None:
    """The KafkaError within, if there is one; delivery callbacks wrap it in a SystemError."""
    seen: BaseException | KafkaError | None = error
    while isinstance(seen, BaseException):
        if isinstance(seen, KafkaException) and seen.args and isinstance(seen.args[0], KafkaError):
            return seen.args[0]
        seen = seen.__cause__ or seen.__context__
    return seen


def translate(error: KafkaError | BaseException, what: str = "", *, resources: Iterable[str] = ()) -> BrokerError:
    """The error of `broker` that says the same.

    :param what: what was tried, for the message: "Publishing to 'orders'".
    :param resources: topics or groups that the error may be about, named where `what` does not.
    """
    if isinstance(error, BrokerError):
        return error
    found = kafka_error(error)
    if found is None:
        return BackendError(f"{what or 'The client'} failed: {error}", native=_exception(error))
    code = found.code()
    said = found.str().rstrip(".")  # the advice follows as a sentence of its own
    text = f"{what}: {said}" if what else said
    named = ", ".join(repr(name) for name in resources)
    if named:
        text = f"{text} ({named})"
    native = error if isinstance(error, BaseException) else KafkaException(found)
    if code == KafkaError._INVALID_ARG:
        return configuration_error(found, what)
    make = _CLASSES.get(code)
    if make is not None:
        return make(text, native=native, **({"advice": _MENDS[code]} if code in _MENDS else {}))
    if code == KafkaError._FATAL:
        for ended in _ENDED:
            if KafkaError(ended).str() in said:
                return InvalidSetting(text, native=native, advice=_MENDS[ended])
        if KafkaError(KafkaError.GROUP_ID_NOT_FOUND).str() in said:
            return BackendError(text, native=native, advice=f"The group was deleted meanwhile; or if {_SHARE_GROUP}")
    if found.fatal():
        return BackendError(text, native=native, advice="This client is broken for good; a new one is made")
    advice = _MENDS.get(code, "")
    return BackendError(text, native=native, retriable=code in _RETRIABLE or found.retriable(), advice=advice)


def configuration_error(
    error: KafkaError | BaseException, what: str = "", config: Mapping[str, Any] | None = None
) -> BrokerError:
    """What librdkafka says of a configuration that it does not take, naming the property and the mend.

    :param config: the configuration, for the value; those of secrets are not told.
    """
    found = kafka_error(error)
    text = str(error) if found is None else found.str()
    native = _exception(error)
    unknown = _UNKNOWN_PROPERTY.search(text)
    if unknown:
        name = unknown.group(1)
        return UnknownSetting(f"librdkafka has no property {name!r}", native=native, advice=did_you_mean(name))
    if "GSSAPI" in text:
        return Unsupported(
            "This librdkafka was built without Kerberos (sasl_mechanism GSSAPI)",
            native=native,
            advice="Install confluent-kafka from source against a librdkafka with libsasl2: "
            "pip install --no-binary confluent-kafka confluent-kafka",
        )
    named = [name for name in (*_QUOTED.findall(text), *_DOTTED.findall(text)) if name in KNOWN_PROPERTIES]
    named += [name for said, name in _UNNAMED.items() if said in text]
    if named or any(sign in text for sign in ("ssl.", "sasl.", "SSL routines")):
        values = {name: (config or {}).get(name) for name in named if not is_secret_name(name)}
        given = "".join(f"; {name} is {value!r}" for name, value in values.items() if value is not None)
        locked = any(name in _KEYS for name in named) and not (config or {}).get("ssl.key.password")
        return InvalidSetting(
            f"librdkafka refuses the settings: {text.strip()}{given}",
            native=native,
            advice="Correct the setting of that name; a file must exist, be readable and hold what it should"
            + (", and a key under a password takes ssl_key_password" if locked else ""),
        )
    return BackendError(f"{what or 'The call'} was refused: {text}", native=native)


def _exception(error: KafkaError | BaseException) -> BaseException:
    return error if isinstance(error, BaseException) else KafkaException(error)


def not_assigned(partition: TopicPartition, group: str) -> LeaseLost:
    """The error of whatever is asked of a partition that is somebody else's."""
    topic, number = partition
    text = f"Partition {number} of topic {topic!r} is not assigned to this member of group {group!r}"
    return LeaseLost(text, advice=_TAKEN_AWAY)


def is_partition_error(error: BrokerError | None) -> bool:
    """Whether this may be the error of a single partition, while the others were stored."""
    return error is not None and not error.retriable and not isinstance(error, LeaseLost | Closed)


def commit_unanswered(partition: TopicPartition, group: str) -> BrokerError:
    """Of a commit that the broker answered for others only."""
    return BrokerError(
        f"Committing {partition.topic!r}[{partition.partition}] for group {group!r}: the broker did not answer for it",
        retriable=True,
    )
