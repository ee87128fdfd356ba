"""Threads, running loops, executors and forks."""

from __future__ import annotations

import asyncio
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

import broker.blocking
from broker.errors import (
    BrokerError,
    Closed,
)
from broker.hooks import Event
from broker_inmem import Broker, InmemSettings
from tests.unit.broker.blocking.common import TOPIC, waiting


async def test_calls_work_in_a_thread_with_a_running_loop(inmem_broker: Broker) -> None:
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic(TOPIC)
        bus.topic(TOPIC).publish(b"1")
        with bus.messages(TOPIC, subscription="billing") as inbox:
            message = inbox.next_message()
            assert message is not None
            with message:
                assert asyncio.get_running_loop().is_running()
        assert waiting(bus) == (0, 0)


def test_call_on_the_loop_of_the_bus_is_refused(bus: broker.blocking.Bus) -> None:
    caught: list[BrokerError] = []

    def listener(event: Event) -> None:
        try:
            bus.health()
        except BrokerError as error:
            caught.append(error)

    bus.hooks.listen(listener)
    bus.topic(TOPIC).publish(b"")
    assert "event loop" in caught[0].message


def test_coroutine_functions_run_on_the_loop_of_the_bus(bus: broker.blocking.Bus) -> None:
    async def double(number: int, *, plus: int) -> int:
        await asyncio.sleep(0)
        return 2 * number + plus

    assert bus.call(double, 20, plus=2) == 42


def test_bus_cannot_be_pickled_but_settings_can(inmem_broker: Broker) -> None:
    settings = InmemSettings.from_url(inmem_broker.url)
    with broker.blocking.connect(settings) as bus:
        bus.admin.ensure_topic(TOPIC)
        with pytest.raises(TypeError, match="settings"):
            pickle.dumps(bus)

    def executor(pickled: bytes) -> int | None:
        with broker.blocking.connect(pickle.loads(pickled)) as bus:  # noqa: S301
            return bus.topic(TOPIC).publish(b"").offset

    with ThreadPoolExecutor(3) as pool:
        offsets = list(pool.map(executor, [pickle.dumps(settings)] * 3))
    assert all(offset is not None for offset in offsets)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_calls_in_a_forked_child_raise_closed(inmem_broker: Broker, bus: broker.blocking.Bus) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "nothing was raised"
        try:
            bus.close()
            bus.topic(TOPIC).publish(b"")
        except Closed as error:
            answer = str(error)
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    answer = os.read(reading, 10_000).decode()
    os.close(reading)
    assert "Open a bus in the child" in answer
    assert bus.topic(TOPIC).publish(b"").offset is not None
