"""The lock of a `FileOffsetStore` is held by a process that stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from broker.driver.contract import TopicPartition
from broker.errors import ConfigurationError, SettleError
from broker_kafka.offsets import FileOffsetStore, GroupMember, StoredOffset

OWNER, PLACE = GroupMember("audit", 1, "m"), TopicPartition("flights", 0)
SECONDS = 20.0

_HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def frozen_holder(directory: Path) -> Generator[subprocess.Popen[bytes]]:
    """A process that has locked the group's file, and was stopped."""
    command = [sys.executable, "-c", _HOLD, str(directory / "audit.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            holder.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
            yield holder
        finally:
            holder.kill()


async def test_a_lock_that_is_not_given_back_is_an_error_that_names_it(tmp_path: Path):
    store = FileOffsetStore(tmp_path, lock_timeout=0.3)
    with frozen_holder(tmp_path):
        async with asyncio.timeout(SECONDS):
            found: list[Any] = [
                (await store.claim(OWNER, [PLACE]))[PLACE],
                (await store.commit(OWNER, {PLACE: StoredOffset(5)}))[PLACE],
                (await store.reset(OWNER.group, {PLACE: StoredOffset(5)}))[PLACE],
            ]
            # Who only reads needs no lock.
            assert await store.fetch(OWNER.group, [PLACE]) == {PLACE: None}
    for error in found:
        assert isinstance(error, SettleError)
        assert error.retriable
        assert repr(str(tmp_path / "audit.lock")) in error.message
        assert "0.3 s" in error.message
        assert "lslocks" in error.advice
        assert "lock_timeout" in error.advice


async def test_a_lock_that_is_given_back_in_time_is_taken(tmp_path: Path):
    store = FileOffsetStore(tmp_path, lock_timeout=SECONDS)
    with frozen_holder(tmp_path) as holder:
        commit = asyncio.create_task(store.commit(OWNER, {PLACE: StoredOffset(5)}))
        await asyncio.wait((commit,), timeout=0.2)
        assert not commit.done()
        holder.kill()
        assert await commit == {PLACE: None}


def test_a_commit_that_waits_for_the_lock_is_cancelled_at_once_and_leaves_no_thread(tmp_path: Path):
    store = FileOffsetStore(tmp_path)

    async def cancel() -> None:
        commits = [asyncio.create_task(store.commit(OWNER, {PLACE: StoredOffset(5)})) for _ in range(50)]
        await asyncio.wait(commits, timeout=0.2)
        assert not any(commit.done() for commit in commits)
        # Whoever waits takes nobody's thread.
        async with asyncio.timeout(SECONDS):
            assert await store.fetch(OWNER.group, [PLACE]) == {PLACE: None}
        for commit in commits:
            commit.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*commits)

    with frozen_holder(tmp_path):
        # The end of a loop waits for the threads that work for it.
        running = Thread(target=asyncio.run, args=(cancel(),), daemon=True)
        running.start()
        running.join(SECONDS / 4)
        assert not running.is_alive()
    assert not (tmp_path / "audit.json").exists()


async def test_many_that_want_the_lock_all_get_it(tmp_path: Path):
    stores = [FileOffsetStore(tmp_path) for _ in range(4)]
    places = [TopicPartition("flights", number) for number in range(60)]
    async with asyncio.timeout(SECONDS):
        results = await asyncio.gather(
            *(stores[number % 4].commit(OWNER, {place: StoredOffset(number)}) for number, place in enumerate(places))
        )
    assert results == [{place: None} for place in places]
    assert len(await stores[0].stored(OWNER.group)) == len(places)


@pytest.mark.parametrize("value", [0, -1.0, None, "5", True, float("inf"), float("nan")])
def test_a_time_for_the_lock_that_is_none_is_refused(tmp_path: Path, value: Any):
    with pytest.raises(ConfigurationError, match=r"lock_timeout is .*seconds above 0"):
        FileOffsetStore(tmp_path, lock_timeout=value)
