"""The benchmarks of `python -m benchmarks.streams`, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from benchmarks.report import Section
from benchmarks.streams.beside import measure_beside
from benchmarks.streams.engine import measure_engine
from benchmarks.streams.latency import measure_latency
from benchmarks.streams.memory import measure_memory, measure_memory_in_full
from benchmarks.streams.processing import measure_processing
from benchmarks.streams.rebalance import measure_rebalance
from benchmarks.streams.recovery import measure_recovery
from benchmarks.streams.stores import measure_stores

__all__ = ["BENCHMARKS", "BY_NAME_ONLY", "run_alone"]

BENCHMARKS: dict[str, Callable[[float, int], Awaitable[list[Section]]]] = {
    "engine": measure_engine,
    "processing": measure_processing,
    "recovery": measure_recovery,
    "latency": measure_latency,
    "rebalance": measure_rebalance,
    "memory": measure_memory,
    "stores": measure_stores,
    "beside": measure_beside,
}
BY_NAME_ONLY: dict[str, Callable[[float, int], Awaitable[list[Section]]]] = {"memory-full": measure_memory_in_full}


def run_alone(name: str, scale: float, rounds: int) -> list[Section]:
    """Run one benchmark in a subprocess. Its servers end with it."""

    async def measure() -> list[Section]:
        return await (BENCHMARKS | BY_NAME_ONLY)[name](scale, rounds)

    return asyncio.run(measure())
