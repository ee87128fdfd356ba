"""Handlers, codecs and callers that break their contract: nothing is lost or hangs, and the error says why."""

from __future__ import annotations

import asyncio

import pytest

from broker.capabilities import Limits
from broker.consuming.dead_letters import DeadLetterWriter
from broker.consuming.retry.policy import Retry
from broker.consuming.runner import serve
from broker.errors import ConfigurationError, MessageTooLarge
from broker.hooks import Hooks, logger
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from tests.unit.broker.consuming.scripted_source import NONE, VIEW, Letters, Raw, ScriptedSource, consuming, until


class Evil(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


async def test_an_error_whose_str_raises_is_dead_lettered(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where PySpark has logged in this process, the handlers of pytest ask the error for its text.
    monkeypatch.setattr(logger, "propagate", False)
    source = ScriptedSource()
    letters = Letters()
    source.add("1")
    once = Retry(max_attempts=1, initial=0, maximum=0)
    async with consuming(source, retry=once, letters=letters, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            raise Evil

        await consumer.receive(handle)
    assert letters.written[0].attributes["dead-letter-error"] == "Evil, which has no text"


async def test_a_dead_letter_write_that_raises_anything_is_repeated() -> None:
    source = ScriptedSource()
    letters = Letters()
    letters.odd_failures = [KeyError("odd")]
    source.add("1")
    async with consuming(source, letters=letters) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        await message.reject("no")
    assert letters.tried == 2
    assert source.outcomes(Outcome.ACK) == ["1"]


async def test_a_codec_error_dead_letters_the_message() -> None:
    class Odd:
        def encode(self, payload: object) -> bytes:
            return b""

        def decode(self, data: bytes | None) -> object:
            raise KeyError("boom")

    source = ScriptedSource()
    letters = Letters()
    source.add("1")
    async with consuming(source, letters=letters, codec=Odd(), stop_when_idle=0.05) as consumer:
        assert [message async for message in consumer] == []
    assert letters.written[0].attributes["dead-letter-reason"] == "cannot be decoded: KeyError: 'boom'"


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), -1.0, "3", True])
async def test_an_invalid_delay_is_refused(delay: float) -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source, ordered_by_key=True) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        with pytest.raises(ConfigurationError, match="delay"):
            await message.nack(delay)
        with pytest.raises(ConfigurationError, match="seconds"):
            await message.extend(delay)
        await message.ack()
    assert source.outcomes(Outcome.ACK) == ["1"]


async def test_a_plain_handler_that_returns_an_awaitable_raises_and_fails_no_message() -> None:
    source = ScriptedSource(redelivers=False)
    letters = Letters()
    source.add("1")
    async with consuming(source, letters=letters) as consumer:
        with pytest.raises(ConfigurationError, match="returned a coroutine, which nothing awaits"):
            await consumer.receive(lambda message: asyncio.sleep(0))
        with pytest.raises(ConfigurationError, match="handler is 5"):
            await consumer.receive(5)  # pyright: ignore[reportArgumentType]
    assert letters.written == []
    assert source.outcomes(Outcome.RELEASE) == ["1"]


async def test_stop_ends_receive_at_the_deadline_despite_a_stuck_handler() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2", "3")
    released = asyncio.Event()
    running = asyncio.Event()
    async with consuming(source, close_timeout=0.1) as consumer:

        async def handle(message: Message) -> None:
            running.set()
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue

        receiving = asyncio.create_task(serve(consumer.handled_by(handle)))
        await running.wait()
        await until(lambda: source.fetched == 2)
        consumer.stop()
        # Undelivered messages are released at once, not at the deadline.
        await until(lambda: source.outcomes(Outcome.RELEASE) == ["2"])
        async with asyncio.timeout(60):
            await receiving
        assert not released.is_set()
        released.set()


async def test_a_refused_letter_is_shortened_before_it_loses_attributes_and_retried_in_full() -> None:
    tried: list[OutboundMessage] = []
    original = Message("orders", b"x", Raw("1", None, 1, NONE), VIEW)

    async def publish(letter: OutboundMessage) -> None:
        tried.append(letter)
        if len(tried) < 8:
            raise MessageTooLarge("too large")

    writer = DeadLetterWriter("orders.dead", publish, Limits(), Hooks())
    reason, error = "reason " * 500, ValueError("error " * 500)
    await writer.write(original, reason=reason, error=error, attempts=1, subscription="billing")
    sizes = [sum(map(len, letter.attributes.values())) for letter in tried]
    assert sizes[1] < 600 < 4000 < sizes[0]
    assert sizes[3] < 600 < 4000 < sizes[2]
    cut = [False, False, True, True, True, True]
    assert ["dead-letter-cut" in letter.attributes for letter in tried] == [*cut, False, False]
    assert [letter.data for letter in tried[:6]] == [b"x"] * 5 + [b""]
    assert [letter.id for letter in tried[6:]] == [letter.id for letter in tried[:2]]
