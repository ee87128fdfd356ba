"""Steadiness: CPU of an idle consumer, growth of memory, and the duration of a close."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import broker
from benchmarks.measure import Spread
from benchmarks.report import Finding, Section
from benchmarks.stages import FILLED, TARGET, Stage, open_stage

__all__ = ["idle_shares", "measure_steadiness"]

_CLOSE_TIMEOUT = 1.0
_CLOSE_MARGIN = 0.25
_STEPS = 10


async def measure_steadiness(scale: float, rounds: int) -> Section:
    """Measure idle CPU, memory and close, on JetStream and in memory."""
    section = Section(
        "Steadiness",
        "CPU of an idle consumer in percent of a core; resident memory after a million messages that were published, "
        "consumed and acked, against what it was after the first two hundred thousand; seconds that a close with a "
        f"deadline of {_CLOSE_TIMEOUT:g} s takes, whatever the handler does.",
    )
    for name in ("memory", "jetstream"):
        async with open_stage(name, 200) as stage:
            await _idle(section, stage, seconds=max(0.5, 6 * scale), rounds=min(rounds, 3))
            await _closing(section, stage, rounds=min(rounds, 3) if scale >= 1 else 1)
            if name == "jetstream":
                await _memory(section, stage, max(2000, int(1_000_000 * scale)))
    return section


async def _idle(section: Section, stage: Stage, seconds: float, rounds: int) -> None:
    async with stage.subscription() as subscription, stage.bus.messages(FILLED, subscription=subscription) as inbox:
        # Drain first, so that the consumer only waits.
        async for batch in inbox.batches(100):
            await batch.ack()
            stage.count -= len(batch)
            if not stage.count:
                break
        shares = await idle_shares(inbox.next_message(), seconds, rounds)
    section.findings.append(Finding(f"an idle consumer, {stage.name}", Spread.of(shares), "%", at_most=1.0))


async def idle_shares(call: Awaitable[object], seconds: float, rounds: int) -> list[float]:
    """Percent of a core that this process uses while a call waits for a message or a record that does not come."""
    shares: list[float] = []
    waiting = asyncio.ensure_future(call)
    await asyncio.sleep(0.5)
    for _ in range(rounds):
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        shares.append(100 * (time.process_time() - cpu) / seconds)
    waiting.cancel()
    await asyncio.wait({waiting})
    return shares


async def _memory(section: Section, stage: Stage, count: int) -> None:
    """Publish, consume and ack a million messages in steps, half of each by batches and half by a handler."""
    step = count // _STEPS
    grown: list[float] = []
    base = 0
    topic = stage.bus.topic(TARGET)
    await stage.empty()
    async with stage.bus.messages(TARGET, subscription="memory") as inbox:
        for number in range(_STEPS):
            for start in range(0, step, 2000):
                await topic.publish_batch(stage.messages(min(2000, step - start)))
            left = step
            async for message in inbox:
                async with message:
                    left -= 1
                if left <= step // 2:
                    break
            async for batch in inbox.batches(500):
                left -= len(batch)
                await batch.ack()
                if not left:
                    break
            await stage.bus.admin.purge(TARGET)
            if number == 1:
                base = _resident()
            elif number > 1:
                grown.append((_resident() - base) / 1024**2)
    section.findings.append(
        Finding(f"memory grown over {count - 2 * step:,} messages, {stage.name}", Spread.of(grown), "MiB", at_most=8.0)
    )


async def _closing(section: Section, stage: Stage, rounds: int) -> None:
    with _quiet():
        await _close_times(section, stage, rounds)


@contextmanager
def _quiet() -> Generator[None]:
    """Silence the log: the handlers fail on purpose."""
    logger = logging.getLogger("broker")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _close_times(section: Section, stage: Stage, rounds: int) -> None:
    for name, handler in _HANDLERS.items():
        took: list[float] = []
        for _ in range(rounds):
            async with stage.subscription() as subscription:
                await stage.bus.topic(FILLED).publish(b"for the handler")
                took.append(await _time_close(stage, subscription, handler))
        section.findings.append(
            Finding(
                f"close while a handler {name}, {stage.name}",
                Spread.of(took),
                "s",
                at_most=_CLOSE_TIMEOUT + _CLOSE_MARGIN,
            )
        )


async def _time_close(stage: Stage, subscription: str, handler: Callable[[], Awaitable[None]]) -> float:
    started = asyncio.Event()

    async def handle(message: broker.Message) -> None:
        started.set()
        await handler()

    inbox = stage.bus.messages(FILLED, subscription=subscription, close_timeout=_CLOSE_TIMEOUT)
    await inbox.open()
    receiving = asyncio.create_task(inbox.receive(handle, concurrency=5))
    await started.wait()
    began = time.perf_counter()
    await inbox.close()
    took = time.perf_counter() - began
    _released.set()
    await asyncio.wait({receiving})
    _released.clear()
    return took


_released = asyncio.Event()


async def _never_returns() -> None:
    await _released.wait()


async def _ignores_cancellation() -> None:
    while not _released.is_set():
        try:
            await _released.wait()
        except asyncio.CancelledError:
            continue


async def _fails() -> None:
    raise ValueError("as every time")


_HANDLERS: dict[str, Callable[[], Awaitable[None]]] = {
    "never returns": _never_returns,
    "ignores its cancellation": _ignores_cancellation,
    "always fails": _fails,
}


def _resident() -> int:
    """Resident memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
