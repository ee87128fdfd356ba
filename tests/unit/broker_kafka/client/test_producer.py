"""When a producer thread ends, every pending call gets its outcomes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

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


async def test_given_publish_times_that_are_old_are_reported() -> None:
    reported: asyncio.Future[tuple[str, list[int]]] = asyncio.get_running_loop().create_future()
    thread = ProducerThread(UNREACHABLE, on_old=lambda topic, times: reported.set_result((topic, list(times))))
    await thread.start()
    old, now = datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC)
    # A forwarded message keeps its time in a header.
    messages = [
        OutboundMessage(b"x", publish_time=now),
        OutboundMessage(b"x", publish_time=old),
        OutboundMessage(b"x", publish_time=old, native=object()),
        OutboundMessage(b"x"),
    ]
    call = asyncio.ensure_future(thread.publish("orders", messages))
    assert await asyncio.wait_for(reported, 60) == ("orders", [1_577_836_800_000])
    await thread.stop(4.0)
    await call


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
