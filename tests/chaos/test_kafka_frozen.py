"""A member is frozen with unsettled records for longer than its session, and then commits them."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from uuid import uuid4

import pytest

import broker
from tests.chaos.test_kafka_processes import OF_PROTOCOLS, PROTOCOLS, SESSIONS
from tests.servers.kafka import shared_server
from tests.servers.kafka_client import RawAdmin, produce

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-frozen")]

HELD = 10
RECORDS = 200


@OF_PROTOCOLS
async def test_a_frozen_member_loses_its_partition_and_commits_nothing(protocol: str) -> None:
    server = shared_server()
    raw = RawAdmin(server.bootstrap)
    topic, group = raw.make_topic(partitions=1), f"frozen-{uuid4().hex[:8]}"
    await asyncio.to_thread(produce, server.bootstrap, topic, [b"%d" % n for n in range(RECORDS)])
    url = f"{server.url}?{PROTOCOLS[protocol]}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.chaos.kafka_frozen_process", url, topic, group, str(HELD), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def said() -> list[str]:
        assert process.stdout is not None
        return (await process.stdout.readline()).decode().split()

    try:
        async with asyncio.timeout(SESSIONS[protocol] + 60):
            assert await said() == ["held", *map(str, range(HELD))]
            process.send_signal(signal.SIGSTOP)
            async with broker.connect(url) as bus, bus.records(topic, group=group) as survivor:
                # Nothing was committed, so it starts where the frozen one started.
                seen: list[broker.Record] = []
                while len(seen) < RECORDS:
                    seen += await survivor.next_batch()
                assert [record.offset for record in seen] == list(range(RECORDS))
                await seen[-1].commit()
                process.send_signal(signal.SIGCONT)
                process.stdin.write(b"commit\n")
                await process.stdin.drain()
                # In any order: the group's answers to the commit and to the next heartbeat.
                lost, refused, (word, *why) = sorted([await said() for _ in range(3)])
                assert (lost, refused, word) == (["lost", "0"], ["refused"], "warned")
                assert f"of group {group!r} lost its partitions: its process was suspended for" in " ".join(why)
                assert "session_timeout_ms" in " ".join(why)
                assert raw.committed(group, topic).offset == RECORDS
            # Alone again, it continues after the survivor's records.
            await asyncio.to_thread(produce, server.bootstrap, topic, [b"more"])
            assert await said() == ["read", str(RECORDS)]
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
