"""One real server of each backend, by name; for Service Bus the project's double."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from uuid import uuid4

from tests.servers import kafka, nats, pubsub, pulsar, servicebus

__all__ = ["URLS"]

URLS: Final[Mapping[str, Callable[[], str]]] = {
    "inmem": lambda: f"inmem://swap-{uuid4().hex[:12]}",
    "jetstream": lambda: nats.shared_server().url,
    "kafka": lambda: kafka.shared_server().url,
    "pubsub": lambda: pubsub.shared_server().url,
    "pulsar": lambda: pulsar.shared_server().url,
    "servicebus": lambda: servicebus.shared_double().url,
}
"""Starts the server of this process, if need be, and gives its URL."""
