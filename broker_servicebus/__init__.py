"""Azure Service Bus as a backend of `broker`: queues, topics and subscriptions, by the scheme `servicebus://`."""

from __future__ import annotations

from broker_servicebus.settings import ServiceBusSettings

__all__ = ["ServiceBusSettings"]
