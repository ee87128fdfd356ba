"""Why a message was not published, told for that message. Pure functions, safe from any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from broker.errors import (
    BackendError,
    BrokerError,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    TopicNotFound,
)
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker_kafka.errors import translate

__all__ = ["TOO_LARGE", "batch_too_large", "not_sent", "not_taken", "publish_error", "told_why", "unknown_fate"]


_PARTITION: Final = "Give one of the topic's partitions, or None for the key to decide"
_TIMED_OUT: Final = (
    "It may be on the broker all the same: publish it again where twice does no harm, or raise message_timeout_ms"
)
TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
"""The broker refused a batch: one of its messages is too large for the topic, or all together are."""


def publish_error(error: KafkaError, topic: str, message: OutboundMessage, trouble: KafkaError | None) -> BrokerError:
    """What the client said of one message.

    :param trouble: what it said of the connection since it last delivered something.
    """
    what = f"Publishing to {topic!r}"
    code = error.code()
    native = KafkaException(error)
    if code == KafkaError._DESTROY or (code == KafkaError._UNKNOWN_PARTITION and message.partition is None):
        return TopicNotFound(f"{what}: the topic was deleted meanwhile", native=native)
    if code == KafkaError._UNKNOWN_PARTITION:
        return InvalidMessage(
            f"{what}: partition is {message.partition}, and the topic has none of that number",
            native=native,
            advice=_PARTITION,
        )
    if code == KafkaError._MSG_TIMED_OUT:
        detail = "" if trouble is None else f"; {trouble.str()}"
        return OperationTimeout(f"{what}: no answer in time{detail}", native=native, advice=_TIMED_OUT)
    if code == KafkaError._INVALID_DIFFERENT_RECORD:
        return BackendError(
            f"{what}: the broker refused another message of its batch, and all of the batch with it",
            retriable=True,
            native=native,
            advice="Publish it again",
        )
    if code in TOO_LARGE:
        size = len(message.data or b"") + len(message.key or b"")
        return MessageTooLarge(
            f"{what}: {error.str().rstrip('.')}: body and key have {size} bytes",
            native=native,
            advice="Raise max.message.bytes of the topic and message_max_bytes here, or send less in one message",
        )
    if code == KafkaError._QUEUE_FULL:
        # Told of an empty queue only; librdkafka counts bodies, and neither keys nor attributes.
        size = len(message.data or b"")
        return MessageTooLarge(
            f"{what}: its body of {size} bytes is larger than all that a producer may hold",
            native=native,
            advice=f"Raise queue_buffering_max_kbytes to {-(-size // 1024)} or more, or send less in one message",
        )
    if code == KafkaError._PURGE_QUEUE:
        return ConnectionFailed(f"{what}: it was not sent", native=native)
    if code == KafkaError._PURGE_INFLIGHT:
        return unknown_fate(topic)
    return translate(error, what)


def not_taken(error: BaseException, topic: str, message: OutboundMessage) -> BrokerError:
    """The client did not take it, and gave no code."""
    if isinstance(error, OverflowError) and message.partition is not None:
        return InvalidMessage(
            f"Publishing to {topic!r}: partition is {message.partition}, and a topic has at most 2**31 of them",
            native=error,
            advice=_PARTITION,
        )
    return translate(error, f"Publishing to {topic!r}")


def batch_too_large(error: KafkaError, topic: str) -> BrokerError:
    """One of a batch that was refused, and is not sent again; which of them are too large nobody tells."""
    return BackendError(
        f"Publishing to {topic!r}: its batch was too large for the topic, by this message, another or all together",
        native=KafkaException(error),
        advice="Set batch_size to the topic's max.message.bytes or less, and only what is too large by itself fails",
    )


def not_sent(topic: str, seconds: float, trouble: KafkaError | None) -> BrokerError:
    """The client could not be given it in time."""
    detail = "" if trouble is None else f"; {trouble.str()}"
    return ConnectionFailed(f"Publishing to {topic!r}: it could not be sent within {seconds:g} s{detail}")


def told_why(
    outcomes: Sequence[Receipt | BrokerError | None], topic: str, refused: KafkaError | None
) -> Sequence[Receipt | BrokerError | None]:
    """Outcomes in a transaction; the client drops what it holds when brokers refuse one of its topics, without a word.

    :param refused: what they said then.
    """
    why = None if refused is None else translate(refused, f"Publishing to {topic!r}")
    if not isinstance(why, NotAuthorized):
        return outcomes
    return [why if isinstance(outcome, ConnectionFailed) else outcome for outcome in outcomes]


def unknown_fate(topic: str) -> BrokerError:
    """The client ended before it told."""
    return OperationTimeout(f"Publishing to {topic!r}: the producer ended while it was sent; its fate is unknown")
