"""The fixtures for applications, in a separate pytest run."""

from __future__ import annotations

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


def test_a_run_without_the_fixtures_does_not_import_the_broker() -> None:
    code = "import sys, broker_inmem.pytest_plugin; sys.exit('broker' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0
