"""Apache Pulsar for `broker`: `pulsar://host:6650/tenant/namespace` and `pulsar+ssl://host:6651`."""

from __future__ import annotations

from broker_pulsar.settings import PulsarSettings

__all__ = ["PulsarSettings"]
