"""Google Cloud Pub/Sub for `broker`: `pubsub://project`, and `pubsub://project?emulator_host=localhost:8085`."""

from __future__ import annotations

from broker_pubsub.settings import PubSubSettings

__all__ = ["PubSubSettings"]
