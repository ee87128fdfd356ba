"""NATS JetStream for `broker`: `nats://host:4222`, `tls://host:4222`, and `embedded:`, which starts a server itself."""

from __future__ import annotations

from broker_jetstream.settings import JetStreamSettings

__all__ = ["JetStreamSettings"]
