"""`broker.run` in a real process, with real signals."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from typing import Any

import pytest

import broker
import broker.blocking
from broker.consuming.runner import serve
from broker.errors import BackendError, ConfigurationError
from broker.messages import Message, Outcome
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming

PROGRAM = """
import asyncio, sys
import broker

async def handle(message):
    print("started", flush=True)
    await asyncio.sleep(0.3)
    print("finished", message.data.decode(), flush=True)

async def prepare(bus):
    await bus.open()
    await bus.admin.ensure_topic("orders")
    await bus.topic("orders").publish_batch([b"1", b"2", b"3"])

bus = broker.connect("inmem:")

async def main():
    await prepare(bus)
    await broker.serve(bus.messages("orders", subscription="billing").handled_by(handle))
    print("unsettled", (await bus.admin.lag("orders", "billing")).unsettled, flush=True)
    await bus.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_handlers_finish_and_releases_the_rest(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        rest = process.stdout.read().split("\n")
        assert process.wait(20) == 0
    assert rest[0].startswith("finished")
    assert "started" not in rest
    assert rest[1] == "unsettled 0"


STUCK = {
    "broker": """
import asyncio, broker

async def handle(message):
    print("started", flush=True)
    await asyncio.sleep(1000)

async def main():
    async with broker.connect("inmem:") as bus:
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"1")
        await broker.serve(bus.messages("orders", subscription="billing", close_timeout=0.5).handled_by(handle))
        print("unsettled", (await bus.admin.lag("orders", "billing")).unsettled, flush=True)

asyncio.run(main())
""",
    "broker.blocking": """
import time, broker.blocking

def handle(message):
    print("started", flush=True)
    time.sleep(1000)

with broker.blocking.connect("inmem:") as bus:
    bus.admin.ensure_topic("orders")
    bus.topic("orders").publish(b"1")
    broker.blocking.run(bus.messages("orders", subscription="billing", close_timeout=0.5).handled_by(handle))
    print("unsettled", bus.admin.lag("orders", "billing").unsettled, flush=True)
""",
}
STUCK["broker, in a thread"] = (
    STUCK["broker"]
    .replace("import asyncio", "import time, asyncio")
    .replace("async def handle", "def handle")
    .replace("await asyncio.sleep(1000)", "time.sleep(1000)")
)


@pytest.mark.parametrize("surface", list(STUCK))
def test_a_handler_that_never_returns_does_not_keep_the_process_alive(surface: str) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK[surface]], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "unsettled 0\n"
        assert process.wait(20) == 0


STUBBORN = """
import asyncio, broker
from broker.consuming import runner

runner._LAST_WAIT = 0.5

async def handle(message):
    print("started", flush=True)
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def prepare():
    async with broker.connect("inmem:stubborn") as bus:
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"1")

asyncio.run(prepare())
bus = broker.connect("inmem:stubborn")
broker.run(bus.messages("orders", subscription="billing", close_timeout=0.5).handled_by(handle))
print("returned", flush=True)
"""


def test_a_handler_that_swallows_its_cancellation_does_not_keep_the_process_alive() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "returned\n"
        assert "is left behind" in process.stderr.read()
        assert process.wait(20) == 0


async def _nothing(_: object) -> None:
    return


def _service() -> Any:
    return broker.connect("inmem:").messages("orders", subscription="billing").handled_by(_nothing)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("services", [(), (5,), (None,)])
async def test_run_refuses_anything_but_services(services: tuple[Any, ...]) -> None:
    for start in (broker.run, broker.blocking.run):
        with pytest.raises(ConfigurationError, match="serv"):
            start(*services)
    with pytest.raises(ConfigurationError, match="serv"):
        await serve(*services)


@pytest.mark.filterwarnings("error")
async def test_run_in_a_running_loop_or_another_thread_raises_with_advice() -> None:
    with pytest.raises(ConfigurationError, match=r"await broker\.serve"):
        broker.run(_service())
    with pytest.raises(ConfigurationError, match="main thread"):
        await asyncio.to_thread(broker.run, _service())
    gc.collect()


async def test_one_failing_service_stops_the_others_and_is_raised() -> None:
    bad, good = ScriptedSource(), ScriptedSource()
    good.add("1")
    async with consuming(bad) as bad_consumer, consuming(good) as good_consumer:
        handled = asyncio.Event()

        async def handle(message: Message) -> None:
            handled.set()
            bad.fail(BackendError("broken"))

        with pytest.raises(BackendError, match="broken"):
            async with asyncio.timeout(60):
                await serve(bad_consumer.handled_by(handle), good_consumer.handled_by(handle))
    assert good.outcomes(Outcome.ACK) == ["1"]


@pytest.mark.parametrize("by", ["receive", "receive_batches"])
async def test_a_consumer_that_was_stopped_before_it_opened_handles_nothing(by: str) -> None:
    handled: list[object] = []

    async def handle(messages: object) -> None:
        handled.append(messages)

    async with broker.connect("inmem:") as bus:
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"x")
        inbox = bus.messages("orders", subscription="billing")
        inbox.stop()
        async with inbox, asyncio.timeout(60):
            await getattr(inbox, by)(handle)
    assert handled == []


def test_a_consumer_of_threads_that_was_stopped_before_it_opened_handles_nothing() -> None:
    with broker.blocking.connect("inmem:") as bus:
        bus.admin.ensure_topic("orders")
        bus.topic("orders").publish(b"x")
        handled: list[object] = []
        service = bus.messages("orders", subscription="billing").handled_by(handled.append)
        service.consumer.stop()
        service.serve()
    assert handled == []
