"""`open_consumer`: a consumer of the library for the thread that owns it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaException

from broker_kafka.errors import configuration_error
from broker_kafka.lifeline import Lifeline
from broker_kafka.tokens import with_token

__all__ = ["open_consumer"]


def open_consumer(config: Mapping[str, Any], lifeline: Lifeline) -> Consumer:
    """A consumer that the lifeline holds.

    :raises ConfigurationError: librdkafka does not take the settings.
    """
    try:
        consumer = Consumer(with_token(config))
    except (KafkaException, ValueError, TypeError) as error:
        raise configuration_error(error, "Making a consumer", config) from error
    lifeline.hold(consumer)
    return consumer
