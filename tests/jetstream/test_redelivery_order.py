"""Order across a crash: what an earlier consumer held comes to a key-ordered one in the order of the stream."""

from __future__ import annotations

import asyncio

from broker.messages import Message
from broker.outbound import OutboundMessage
from broker_jetstream.codec import MessageView, NativeMessage
from broker_jetstream.messages import GATHER_STEP, in_stream_order
from tests.jetstream.conftest import Open
from tests.jetstream.support import make_topic, publish, receive, subscribe

LEASE = 1.0


async def test_redelivered_messages_come_in_order_whenever_their_leases_ended(open_backend: Open, topic: str) -> None:
    dead, heir = await open_backend(lease_seconds=LEASE), await open_backend(lease_seconds=LEASE)
    await make_topic(dead, topic)
    await publish(dead, topic, *(OutboundMessage(b"%d" % number, b"key") for number in range(200)))
    source = await subscribe(dead, topic, ordered_by_key=True)
    held = await receive(source, 150)
    await asyncio.sleep(LEASE / 2)
    assert not any(await source.extend(held[:50]))
    # From here on no lease is renewed, as after a crash; the leases of the first fifty end last.
    await asyncio.sleep(LEASE * 1.3)
    found = await receive(await subscribe(heir, topic, ordered_by_key=True), 200)
    assert [int(message.data or b"") for message in found] == list(range(200))
    assert [message.delivery_attempt for message in found] == [2] * 150 + [1] * 50


async def test_what_a_living_consumer_holds_is_not_waited_for(open_backend: Open, topic: str) -> None:
    living, second = await open_backend(), await open_backend()
    await make_topic(living, topic)
    await publish(living, topic, *(OutboundMessage(b"%d" % number) for number in range(10)))
    await receive(await subscribe(living, topic, ordered_by_key=True), 10)
    await publish(living, topic, *(OutboundMessage(b"%d" % number) for number in range(10, 10 + 2 * GATHER_STEP)))
    source = await subscribe(second, topic, ordered_by_key=True)
    found = await source.fetch(1000, 1 << 24, 5.0)
    assert [int(message.data or b"") for message in found] == list(range(10, 10 + len(found)))
    assert 0 < len(found) <= GATHER_STEP


async def test_with_nothing_to_inherit_the_first_fetch_ends_by_silence(open_backend: Open, topic: str) -> None:
    living, second = await open_backend(), await open_backend()
    await make_topic(living, topic)
    await publish(living, topic, OutboundMessage(b"held"))
    await receive(await subscribe(living, topic, ordered_by_key=True), 1)
    source = await subscribe(second, topic, ordered_by_key=True)
    assert await source.fetch(10, 1 << 24, 0.5) == []


def test_new_messages_stay_behind_in_their_order() -> None:
    def message(sequence: int, attempt: int) -> Message[bytes]:
        reply = b"$JS.ACK.s.c.%d.%d.%d.0.0" % (attempt, sequence, sequence)
        return Message("s", b"", NativeMessage(b"s.0", reply, b"", b""), MessageView())

    came = [message(8, 2), message(9, 2), message(3, 2), message(4, 3), message(11, 1), message(10, 1)]
    assert [int(m.raw.reply.split(b".")[5]) for m in in_stream_order(came)] == [3, 4, 8, 9, 11, 10]
