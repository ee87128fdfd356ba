"""The coordinator of a group is away during a request: the process gets an error, and later an answer.

In a subprocess, because the test is that it survives.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

import pytest

from tests.kafka.raw_positions import store
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

pytestmark = pytest.mark.deep


@asynccontextmanager
async def asking(url: str, group: str) -> AsyncGenerator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.chaos.kafka_asking_process", url, group, stdin=PIPE, stdout=PIPE
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ask(process: Process) -> str:
    """Its answer; an empty line would be its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"ask\n")
    await process.stdin.drain()
    said = (await process.stdout.readline()).decode().strip()
    assert said, f"the process ended with {await process.wait()}"
    return said


async def answered(process: Process) -> None:
    async with asyncio.timeout(60):
        while await ask(process) != "read":
            continue


def found(admin: RawAdmin, group: str, topic: str) -> None:
    """Commit a position; it is the first on a new cluster, so a consumer has to look for its coordinator."""
    admin.committed(group, topic)
    store(admin, group, topic, 0)


async def test_a_coordinator_that_is_away_for_longer_than_a_request_timeout() -> None:
    with KafkaServer() as server:
        admin, group = RawAdmin(server.bootstrap), f"asked-{uuid4().hex[:8]}"
        topic = admin.make_topic()
        await asyncio.to_thread(found, admin, group, topic)
        async with asking(f"{server.url}?request_timeout=1", group) as process:
            await answered(process)
            await asyncio.to_thread(server.kill)
            assert await ask(process) == await ask(process) == "OperationTimeout"
            await asyncio.to_thread(server.start)
            await answered(process)
