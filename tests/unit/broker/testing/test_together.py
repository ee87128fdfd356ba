"""Conformance tests that share a restart: one restart for all, and one outcome each."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from broker.testing.areas.reconnect import Reconnecting
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.shared_restart import shares_restart
from broker_inmem import Broker
from tests.conformance.inmem_harness import InmemHarness


class SharedHarness(InmemHarness):
    """Harnesses that share one server."""

    in_matrix = False
    shares_restarts = True
    shared: ClassVar[Broker]
    restarts: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.broker = self.shared

    async def restart(self) -> None:
        type(self).restarts += 1
        await asyncio.sleep(0)
        await super().restart()


@pytest.fixture
def harness_class() -> type[SharedHarness]:
    SharedHarness.shared = Broker(SharedHarness.options)
    SharedHarness.restarts = 0
    return SharedHarness


def sharing(case: type) -> list[str]:
    return [name for name in dir(case) if hasattr(getattr(case, name), "__together__")]


async def run(case: Any, name: str, harness: Harness) -> None:
    try:
        await getattr(case(), name)(harness)
    finally:
        await harness.stop()


async def test_all_restart_once(harness_class: type[SharedHarness]) -> None:
    class Case(Reconnecting):
        pass

    names = sharing(Case)
    assert len(names) == 7
    for name in names:
        await run(Case, name, harness_class())
    assert harness_class.restarts == 1
    # Each outcome is reported once.
    await run(Case, names[0], harness_class())
    assert harness_class.restarts == 2


async def test_a_failure_is_raised_by_its_own_test_and_blocks_no_other(harness_class: type[SharedHarness]) -> None:
    class Case(ConformanceCase):
        @shares_restart
        @requires("harness.restart")
        @promise("some.fails", "It fails before its restart.")
        async def test_fails(self, harness: Harness) -> None:
            pytest.fail("as it must")

        @shares_restart
        @promise("some.restarts-twice", "It restarts twice.")
        async def test_restarts_twice(self, harness: Harness) -> None:
            await harness.restart()
            await harness.restart()

        @shares_restart
        @promise("some.passes", "It passes.")
        async def test_passes(self, harness: Harness) -> None:
            topic = await harness.topic()
            await harness.restart()
            assert (await (await harness.bus()).topic(topic).publish(b"after")).id

        @shares_restart
        @requires("missing_capability")
        @promise("some.needs", "It needs a missing capability.")
        async def test_needs(self, harness: Harness) -> None:
            await asyncio.Event().wait()

    await run(Case, "test_passes", harness_class())
    with pytest.raises(pytest.fail.Exception, match="as it must"):
        await run(Case, "test_fails", harness_class())
    await run(Case, "test_restarts_twice", harness_class())
    assert harness_class.restarts == 2


async def test_a_restart_that_fails_fails_all(harness_class: type[SharedHarness]) -> None:
    class Broken(harness_class):
        async def restart(self) -> None:
            raise OSError("no such server")

    class Case(Reconnecting):
        pass

    for name in sharing(Case)[:2]:
        with pytest.raises(OSError, match="no such server"):
            await run(Case, name, Broken())


async def test_without_sharing_each_test_restarts() -> None:
    harness = InmemHarness()
    await run(Reconnecting, "test_positions_survive", harness)
    assert not harness.shares_restarts
