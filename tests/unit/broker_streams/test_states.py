"""States that are watched."""

from __future__ import annotations

import asyncio

from broker_streams.recovery import CopyState
from broker_streams.states import StateSignal


async def test_s1_a_watcher_waits_for_the_next_state() -> None:
    signal = StateSignal(CopyState.IDLE)
    states = signal.watch()
    assert await anext(states) is CopyState.IDLE
    waiting = asyncio.ensure_future(anext(states))
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.change(CopyState.RUNNING)
    assert await waiting is CopyState.RUNNING
    assert signal.state is CopyState.RUNNING


async def test_s1_a_watcher_that_does_not_read_gets_the_latest_state_and_the_end() -> None:
    signal = StateSignal(CopyState.IDLE)
    slow, late = signal.watch(), signal.watch()
    for state in (CopyState.RECOVERING, CopyState.RUNNING):
        signal.change(state)
    assert await anext(slow) is CopyState.RUNNING
    signal.end()
    assert [state async for state in slow] == []
    assert [state async for state in late] == [CopyState.RUNNING]
    assert [state async for state in signal.watch()] == [CopyState.RUNNING]
