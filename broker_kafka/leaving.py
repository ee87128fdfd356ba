"""What the client omits when a member of a group closes, so that the group would miss it until its session ends.

Called in the thread that owns the client, right before `Consumer.close`; it never raises. It takes a second at most, or
a few where the group rebalances just then and waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic, sleep
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException

from broker.errors import BrokerError
from broker.hooks import logger
from broker_kafka.group_metadata import parse_group_metadata

__all__ = ["prepare_to_leave"]

_JOIN_SECONDS: Final = 1.0
_REBALANCE_SECONDS: Final = 4.0
"""The others hear of a rebalance by their heartbeats, three seconds apart by default."""
_LOOK_AGAIN: Final = 0.01


def prepare_to_leave(client: Consumer, config: Mapping[str, Any], was_assigned: Callable[[], bool]) -> None:
    """Have the close that follows tell the group. The client has subscribed.

    :param config: of the client.
    :param was_assigned: whether its callback was ever told of partitions, perhaps of none.
    """
    try:
        # One that closes before the answer to its joining does not leave.
        until = monotonic() + _JOIN_SECONDS
        if config.get("group.protocol") == "consumer":
            while not _has_joined(client) and monotonic() < until:
                sleep(_LOOK_AGAIN)
        elif "group.instance.id" not in config:
            while not was_assigned() and monotonic() < until:
                client.poll(_LOOK_AGAIN)
            # A cooperative member joins once more while it closes; a static one is meant to stay.
            client.unsubscribe()
            # Who waits to join again unsubscribes after that, and a close that comes before does not leave.
            until = monotonic() + _REBALANCE_SECONDS
            while client.memberid() and monotonic() < until:
                client.poll(_LOOK_AGAIN)
    except (KafkaException, RuntimeError, BrokerError) as error:
        logger.debug("The group may miss a member until its session ends: %s", error)


def _has_joined(client: Consumer) -> bool:
    metadata: Any = client.consumer_group_metadata()
    return metadata is not None and parse_group_metadata(metadata).generation > 0
