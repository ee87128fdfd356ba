"""The benchmarks of `python -m benchmarks`, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from benchmarks.facade_cost import measure_facade
from benchmarks.faststream_beside import measure_faststream
from benchmarks.jetstream_speed import measure_jetstream
from benchmarks.kafka_groups import measure_kafka_groups
from benchmarks.kafka_handling import measure_kafka_handling
from benchmarks.kafka_markers import measure_markers
from benchmarks.kafka_queue import measure_queue
from benchmarks.kafka_queue_published import measure_published
from benchmarks.kafka_speed import measure_kafka
from benchmarks.pubsub_speed import measure_pubsub
from benchmarks.pulsar_speed import measure_pulsar
from benchmarks.report import Section
from benchmarks.servicebus_speed import measure_servicebus
from benchmarks.six_backends import measure_six
from benchmarks.state_speed import measure_state
from benchmarks.steadiness import measure_steadiness
from benchmarks.tracing_cost import measure_tracing

__all__ = ["BENCHMARKS", "run_alone"]

BENCHMARKS: dict[str, Callable[[float, int], Awaitable[Section]]] = {
    "facade": measure_facade,
    "tracing": measure_tracing,
    "backends": measure_six,
    "jetstream": measure_jetstream,
    "faststream": measure_faststream,
    "kafka": measure_kafka,
    "kafka-handling": measure_kafka_handling,
    "kafka-groups": measure_kafka_groups,
    "kafka-markers": measure_markers,
    "kafka-queue": measure_queue,
    "kafka-queue-published": measure_published,
    "pubsub": measure_pubsub,
    "pulsar": measure_pulsar,
    "servicebus": measure_servicebus,
    "state": measure_state,
    "steadiness": measure_steadiness,
}


def run_alone(name: str, scale: float, rounds: int) -> Section:
    """Run one benchmark in a subprocess. Its servers end with it."""

    async def measure() -> Section:
        return await BENCHMARKS[name](scale, rounds)

    return asyncio.run(measure())
