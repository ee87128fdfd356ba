"""The fixtures for applications, in a separate pytest run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

APPLICATION = """
import os

import broker


async def test_real_time(broker_bus):
    await broker_bus.admin.ensure_topic("orders")
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        await broker_bus.topic("orders").publish(b"1", key="a")
        message = await inbox.next_message(5)
        await message.ack()
    assert message.data == b"1"


async def test_time_stands_still(broker_bus, inmem_broker, manual_clock):
    await broker_bus.admin.ensure_topic("orders")
    await broker_bus.topic("orders").publish(b"1")
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        message = await inbox.next_message(5)
        await message.nack(delay=3600)
        assert await inbox.next_message(0.05) is None
        manual_clock.advance(3600)
        message = await inbox.next_message(5)
        assert message.delivery_attempt == 2
        await message.ack()
    assert inmem_broker.clock is manual_clock


async def test_code_that_connects_by_itself(inmem_broker, monkeypatch):
    monkeypatch.setenv("BROKER_URL", inmem_broker.url)
    async with broker.connect() as bus:
        await bus.admin.ensure_topic("orders")
    assert list(inmem_broker.topics) == ["orders"]


async def test_faults_end_with_the_test(broker_bus, inmem_broker):
    inmem_broker.faults.stop()


def test_that_fails(inmem_broker):
    assert inmem_broker.seed == 1234
    assert False
"""


def test_the_fixtures_work(tmp_path: Path) -> None:
    (tmp_path / "test_application.py").write_text(APPLICATION)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--broker-seed=1234", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert "4 passed" in run.stdout, run.stdout + run.stderr
    assert "1 failed" in run.stdout
    assert "--broker-seed=1234" in run.stdout


ASSERTIONS = """
import asyncio

import broker
import broker.blocking
import pytest
from broker.testing import make_message


@pytest.fixture
async def orders(broker_bus):
    await broker_bus.admin.ensure_topic("orders")
    await broker_bus.topic("orders").publish(b"one")
    return broker_bus


async def check(message):
    assert message.data == b"two"


async def check_batch(batch):
    assert batch[0].data == b"two"


async def check_in_a_group(message):
    async with asyncio.TaskGroup() as group:
        group.create_task(check(message))


async def test_fails_in_a_block(orders):
    async with orders.messages("orders", subscription="billing") as inbox:
        async for message in inbox:
            async with message:
                assert message.data == b"two"


async def test_fails_in_a_handler(orders):
    async with orders.messages("orders", subscription="billing") as inbox:
        await inbox.receive(check)


async def test_fails_in_a_plain_handler(orders):
    def check(message):
        assert message.data == b"two"

    async with orders.messages("orders", subscription="billing") as inbox:
        await inbox.receive(check)


async def test_fails_in_a_group_of_tasks(orders):
    async with orders.messages("orders", subscription="billing") as inbox:
        await inbox.receive(check_in_a_group)


async def test_fails_in_a_batch_handler(orders):
    async with orders.messages("orders", subscription="billing") as inbox:
        await inbox.receive_batches(check_batch)


async def test_fails_in_records_as_messages(orders):
    async with orders.records("orders", group="audit").as_messages() as inbox:
        await inbox.receive(check)


async def test_fails_in_a_task_that_nobody_awaits(orders):
    async with orders.messages("orders", subscription="billing") as inbox:
        receiving = asyncio.create_task(inbox.receive(check))
        await asyncio.wait([receiving])


async def test_fails_where_the_code_connects_by_itself(orders, inmem_broker):
    async with broker.connect(inmem_broker.url) as bus, bus.messages("orders", subscription="billing") as inbox:
        message = await inbox.next_message(timeout=60)
        async with message:
            assert message.data == b"two"


@pytest.fixture
def blocking_bus(inmem_broker):
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic("orders")
        bus.topic("orders").publish(b"one")
        yield bus


def test_fails_in_a_thread(blocking_bus):
    def check(message):
        assert message.data == b"two"

    with blocking_bus.messages("orders", subscription="billing") as inbox:
        inbox.receive(check)


def test_fails_in_a_block_of_a_thread(blocking_bus):
    with blocking_bus.messages("orders", subscription="billing") as inbox:
        message = inbox.next_message(timeout=60)
        with message:
            assert message.data == b"two"


async def test_fails_without_a_consumer():
    async with make_message(b"one") as message:
        assert message.data == b"two"


async def test_passes_as_other_errors_are_retried(orders):
    seen = []

    async def handle(message):
        seen.append(message.data)
        if len(seen) == 1:
            raise RuntimeError("again")
        inbox.stop()

    async with orders.messages("orders", subscription="billing", retry=broker.Retry(initial=0.01)) as inbox:
        await inbox.receive(handle)
    assert seen == [b"one", b"one"]


@pytest.mark.retries_assertions
async def test_passes_where_assertions_are_retried(orders):
    seen = []

    async def handle(message):
        seen.append(message.data)
        if len(seen) == 2:
            inbox.stop()
        assert len(seen) == 2

    async with orders.messages("orders", subscription="billing", retry=broker.Retry(initial=0.01)) as inbox:
        await inbox.receive(handle)


@pytest.fixture
async def receiving_until_the_end(orders):
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def handle(message):
        begun.set()
        await may_end.wait()
        assert message.data == b"two"

    async with orders.messages("orders", subscription="billing") as inbox:
        receiving = asyncio.create_task(inbox.receive(handle))
        await begun.wait()
        yield
        may_end.set()
        await asyncio.wait([receiving])


async def test_errors_while_the_fixtures_close(receiving_until_the_end):
    pass
"""


def test_a_failed_assertion_in_a_handler_fails_the_test(tmp_path: Path) -> None:
    (tmp_path / "test_application.py").write_text(ASSERTIONS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\naddopts = --strict-markers\n"
    )
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--timeout=60", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    ends = re.findall(r"^(PASSED|FAILED|ERROR) \S+::test_([a-z]+)_", run.stdout, re.MULTILINE)
    # The body of the last test passes, and its fixtures raise.
    wanted = [*[("FAILED", "fails")] * 11, *[("PASSED", "passes")] * 2, ("PASSED", "errors"), ("ERROR", "errors")]
    assert sorted(ends) == sorted(wanted), run.stdout + run.stderr
    assert "b'one' == b'two'" in run.stdout


def test_a_run_without_the_fixtures_does_not_import_the_broker() -> None:
    code = "import sys, broker_inmem.pytest_plugin; sys.exit('broker' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0
