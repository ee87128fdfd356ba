"""Closing while a seek is under way."""

from __future__ import annotations

import asyncio
import sys
import uuid
from asyncio.subprocess import PIPE

import pytest

import broker
from broker.bus import Bus
from broker.driver.contract import TopicPartition
from broker.errors import Closed
from broker.testing.waiting import eventually, numbered
from tests.servers.proxy import Proxy
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")

PARTITIONS = 8

MEMBER = """
import asyncio, sys
import broker
from broker_pulsar.client import pulsar

async def main(url, topic):
    async with broker.connect(url) as bus, bus.records(topic, group="billing") as log:
        partitions = [(topic, number) for number in range(int(sys.argv[3]))]
        while log.assignment() != partitions:
            await asyncio.sleep(0.01)
        seeking = asyncio.create_task(log.seek(dict.fromkeys(partitions)))
        native = bus.backend.client
        while not seeking.done():
            consumers = [each for each in tuple(native._consumers) if isinstance(each, pulsar.Consumer)]
            if not all(each.is_connected() for each in consumers):
                break
            await asyncio.sleep(0.001)
        await log.close()
        try:
            await seeking
        except broker.BrokerError:
            pass  # Closed, or another one on a busy machine.
    print("closed", flush=True)

asyncio.run(main(*sys.argv[1:3]))
"""
"""A member that closes when the broker has disconnected one of the consumers that seek."""


async def test_a_process_that_closes_during_a_seek_ends_with_its_own_exit_code(
    bus: Bus, pulsar_server: PulsarServer
) -> None:
    """The client does not answer the seek, and a thread that waits within the client would abort the process."""
    topic = f"many-{uuid.uuid4().hex[:12]}"
    await bus.admin.ensure_topic(topic, partitions=PARTITIONS)
    await bus.topic(topic).publish_batch(numbered(100))
    arguments = (pulsar_server.url, topic, str(PARTITIONS))
    member = await asyncio.create_subprocess_exec(sys.executable, "-c", MEMBER, *arguments, stdout=PIPE, stderr=PIPE)
    said, errors = await member.communicate()
    assert (member.returncode, said) == (0, b"closed\n"), errors.decode()


async def test_a_seek_under_way_ends_with_the_close(pulsar_server: PulsarServer, topic: str, web: Proxy) -> None:
    """The HTTP API does not answer, and would be waited for as long as `request_timeout`."""
    url = f"{pulsar_server.service_url}?admin_url=http://127.0.0.1:{web.port}&request_timeout=600"
    async with broker.connect(url) as bus, bus.records(topic, group="billing", close_timeout=1.0) as log:
        await eventually(log.assignment, 60, "the assignment")
        web.hold()
        try:
            seeking = asyncio.create_task(log.seek({TopicPartition(topic, 0): None}))
            await eventually(lambda: web.held, 60, "a request")
            # It may be one of the member; the seek makes its own.
            await asyncio.sleep(0.5)
            await log.close()
            with pytest.raises(Closed):
                await seeking
        finally:
            web.hold(False)
