"""The names of OpenTelemetry's conventions for messaging, which are still in development: pinned to one version.

Source: semantic conventions 1.44.0, `docs/messaging`. NATS and memory are not listed there, and have names of ours.
"""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"

SYSTEM: Final = "messaging.system"
OPERATION: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
SUBSCRIPTION: Final = "messaging.destination.subscription.name"
GROUP: Final = "messaging.consumer.group.name"
PARTITION: Final = "messaging.destination.partition.id"
BATCH_COUNT: Final = "messaging.batch.message_count"
MESSAGE_ID: Final = "messaging.message.id"
ERROR_TYPE: Final = "error.type"

KAFKA_KEY: Final = "messaging.kafka.message.key"
KAFKA_OFFSET: Final = "messaging.kafka.offset"
KAFKA_TOMBSTONE: Final = "messaging.kafka.message.tombstone"
PUBSUB_KEY: Final = "messaging.gcp_pubsub.message.ordering_key"
PUBSUB_ATTEMPT: Final = "messaging.gcp_pubsub.message.delivery_attempt"
SERVICEBUS_ATTEMPT: Final = "messaging.servicebus.message.delivery_count"

SYSTEMS: Final = {
    "inmem": "anybroker_inmem",
    "jetstream": "nats",
    "kafka": "kafka",
    "pubsub": "gcp_pubsub",
    "pulsar": "pulsar",
    "servicebus": "servicebus",
}
"""`messaging.system` by backend; the name of any other backend is its own."""

OPERATION_SECONDS: Final = "messaging.client.operation.duration"
SENT: Final = "messaging.client.sent.messages"
CONSUMED: Final = "messaging.client.consumed.messages"
PROCESS_SECONDS: Final = "messaging.process.duration"

SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds of both histograms, as the conventions give them."""
