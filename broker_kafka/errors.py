"""Errors of confluent-kafka and the brokers as errors of `broker`. Pure functions, safe from any thread."""

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
    StorageFailed,
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
_PROPERTY_OF_TEXT: Final = {"Failed to parse pattern": "topic.blacklist", "dlopen()": "plugin.library.paths"}
"""Properties that librdkafka does not name in its error, by a part of the error."""
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
"""Another producer of the transactional id took over, or the broker aborted the transaction of this one."""

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
"""This member does not own the partition, or not in this generation."""

_ErrorType = Callable[..., BrokerError]


def _codes(make: _ErrorType, *codes: int) -> dict[int, _ErrorType]:
    return dict.fromkeys(codes, make)


def _invalid_topic(message: str, **rest: Any) -> BrokerError:
    return ConfigurationError(message, advice="Use at most 249 letters, digits, '.', '_' and '-'", **rest)


_CLASSES: Final[dict[int, _ErrorType]] = {
    **_codes(
        TopicNotFound,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_ID,
    ),
    **_codes(SubscriptionNotFound, KafkaError.GROUP_ID_NOT_FOUND, KafkaError._UNKNOWN_GROUP),
    **_codes(StorageFailed, KafkaError.KAFKA_STORAGE_ERROR),
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

_SHARE_GROUP: Final = "a share group (queue=share) has this name, choose another"
_LOST_ADVICE: Final = "Its new owner reads from the last commit on; make the work repeatable"

_ADVICE: Final = {
    **dict.fromkeys(GENERATION_LOST, _LOST_ADVICE),
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Grant this user the operations Read and Describe on the group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Grant this user the operations Write and Describe on the "
    "transactional id",
    KafkaError._BAD_COMPRESSION: "The batch is damaged, or expands beyond receive.message.max.bytes: raise that, or "
    "move the group behind the batch",
    KafkaError.UNKNOWN: "The broker had an internal error, such as a full disk; see its log",
    KafkaError.INVALID_SESSION_TIMEOUT: "Set session_timeout_ms within the brokers' group.min.session.timeout.ms and "
    "group.max.session.timeout.ms",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "Set transaction_timeout_ms to the brokers' "
    "transaction.max.timeout.ms or less",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "Give all members of a group the same partition_assignment_strategy; or if "
    + _SHARE_GROUP,
    KafkaError.UNSUPPORTED_ASSIGNOR: "Set group_remote_assignor to an assignor of the brokers: uniform or range",
    KafkaError.FENCED_INSTANCE_ID: "Give each member of a group its own group_instance_id; of two members with the "
    "same one, group_protocol=classic keeps the later, and consumer the earlier",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "Shorten the metadata to the brokers' offset.metadata.max.bytes, 4096 by "
    "default; the position was not committed",
    KafkaError.INVALID_RECORD: "Give each message of a compacted topic a key; for one without, Kafka rejects the "
    "whole batch",
    KafkaError._BAD_MSG: "The answer could not be parsed: either the server is no Kafka broker, or "
    "receive.message.max.bytes is too small",
    KafkaError.UNRELEASED_INSTANCE_ID: "Give each member of a group its own group_instance_id; a member that ended "
    "without leaving keeps it until its session ends",
}
"""What to do, by error code."""

_FATAL_IN_TEXT: Final = (
    KafkaError.UNSUPPORTED_ASSIGNOR,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.UNRELEASED_INSTANCE_ID,
)
"""A consumer with one of these errors reports _FATAL, and the code only in the text."""

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
        KafkaError._NOENT,  # no requested partition has a leader
        # For a moment after a restart, the client's metadata of a leader is older or newer than the leader's own.
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.LISTENER_NOT_FOUND,
    }
)


def kafka_error(error: KafkaError | BaseException) -> KafkaError | None:
    """The KafkaError of an exception or its causes, if there is one; delivery callbacks wrap it in a SystemError."""
    seen: BaseException | KafkaError | None = error
    while isinstance(seen, BaseException):
        if isinstance(seen, KafkaException) and seen.args and isinstance(seen.args[0], KafkaError):
            return seen.args[0]
        seen = seen.__cause__ or seen.__context__
    return seen


def translate(error: KafkaError | BaseException, what: str = "", *, resources: Iterable[str] = ()) -> BrokerError:
    """Translate an error into one of `broker`.

    :param what: the operation: "Publishing to 'orders'".
    :param resources: topics or groups that the error may be about, if `what` does not name them.
    """
    if isinstance(error, BrokerError):
        return error
    found = kafka_error(error)
    if found is None:
        return BackendError(f"{what or 'The client'} failed: {error}", native=_exception(error))
    code = found.code()
    reason = found.str().rstrip(".")  # the advice follows as the next sentence
    text = f"{what}: {reason}" if what else reason
    named = ", ".join(repr(name) for name in resources)
    if named:
        text = f"{text} ({named})"
    native = error if isinstance(error, BaseException) else KafkaException(found)
    if code == KafkaError._INVALID_ARG:
        return configuration_error(found, what)
    make = _CLASSES.get(code)
    if make is not None:
        return make(text, native=native, **({"advice": _ADVICE[code]} if code in _ADVICE else {}))
    if code == KafkaError._FATAL:
        for cause in _FATAL_IN_TEXT:
            if KafkaError(cause).str() in reason:
                return InvalidSetting(text, native=native, advice=_ADVICE[cause])
        if KafkaError(KafkaError.GROUP_ID_NOT_FOUND).str() in reason:
            return BackendError(text, native=native, advice=f"The group was deleted; or if {_SHARE_GROUP}")
    if found.fatal():
        return BackendError(text, native=native, advice="This client cannot be used any longer; a new one is opened")
    advice = _ADVICE.get(code, "")
    return BackendError(text, native=native, retriable=code in _RETRIABLE or found.retriable(), advice=advice)


def configuration_error(
    error: KafkaError | BaseException, what: str = "", config: Mapping[str, Any] | None = None
) -> BrokerError:
    """The error of a configuration that librdkafka rejects, with the property, its value and what to do.

    :param config: the configuration, for the value; secrets are not shown.
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
    named += [name for part, name in _PROPERTY_OF_TEXT.items() if part in text]
    if named or any(sign in text for sign in ("ssl.", "sasl.", "SSL routines")):
        values = {name: (config or {}).get(name) for name in named if not is_secret_name(name)}
        given = "".join(f"; {name} is {value!r}" for name, value in values.items() if value is not None)
        locked = any(name in _KEYS for name in named) and not (config or {}).get("ssl.key.password")
        return InvalidSetting(
            f"librdkafka rejects the settings: {text.strip()}{given}",
            native=native,
            advice="Correct that setting; a file must exist, be readable and have the right content"
            + (", and an encrypted key needs ssl_key_password" if locked else ""),
        )
    return BackendError(f"{what or 'The call'} was rejected: {text}", native=native)


def _exception(error: KafkaError | BaseException) -> BaseException:
    return error if isinstance(error, BaseException) else KafkaException(error)


def not_assigned(partition: TopicPartition, group: str) -> LeaseLost:
    """The error of an operation on a partition that is not assigned to this member."""
    topic, number = partition
    text = f"Partition {number} of topic {topic!r} is not assigned to this member of group {group!r}"
    return LeaseLost(text, advice=_LOST_ADVICE)


def is_partition_error(error: BrokerError | None) -> bool:
    """Whether this may be the error of one partition of a commit, while the others were committed."""
    return error is not None and not error.retriable and not isinstance(error, LeaseLost | Closed)


def commit_unanswered(partition: TopicPartition, group: str) -> BrokerError:
    """The error of a partition that is missing in the broker's answer to a commit."""
    return BrokerError(
        f"Committing {partition.topic!r}[{partition.partition}] for group {group!r}: the answer of the broker lacks it",
        retriable=True,
    )
