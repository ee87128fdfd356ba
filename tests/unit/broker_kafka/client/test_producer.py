"""When a producer thread ends, every pending call gets its outcomes."""

from __future__ import annotations

import asyncio

import pytest

from broker import Closed, OutboundMessage
from broker_kafka.client.producer import ProducerClient, ProducerThread

UNREACHABLE = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


def message(number: int) -> OutboundMessage:
    return OutboundMessage(b"%d" % number, b"k")


async def test_a_failure_while_the_thread_stops_fails_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = ProducerThread(UNREACHABLE)
    await thread.start()
    poll = thread._poll

    def broken(*args: object, **options: object) -> None:
        if thread._stopping:
            raise SystemError("no error of the client")
        poll(*args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(thread, "_poll", broken)
    calls = [asyncio.ensure_future(thread.publish("orders", [message(number)])) for number in range(3)]
    await asyncio.sleep(0.05)
    assert await thread.stop(4.0)
    outcomes = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert all(isinstance(outcome, Exception) for (outcome,) in outcomes)


async def test_a_call_after_the_end_is_closed() -> None:
    thread = ProducerThread(UNREACHABLE)
    await thread.start()
    assert await thread.stop(1.0)
    with pytest.raises(Closed):
        await thread.publish("orders", [message(0)])


class _Broken(ProducerThread):
    def _turn(self, client: ProducerClient) -> None:
        raise RuntimeError("a defect")


async def test_a_failure_right_after_the_start_is_a_crash() -> None:
    crashes: list[bool] = []
    thread = _Broken(UNREACHABLE, on_crash=lambda: crashes.append(True))
    # The loop learns that the client is open only after the thread has ended.
    asyncio.get_running_loop().call_soon(thread._thread.join, 5.0)
    await thread.start()
    assert await thread.stop(1.0)
    assert crashes == [True]
