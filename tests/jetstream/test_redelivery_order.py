"""Order across a crash: a key-ordered consumer gets the messages of a dead one in stream order."""

from __future__ import annotations

from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.waiting import let_pass
from broker_jetstream.codec import MessageView, NativeMessage
from broker_jetstream.messages import GATHER_STEP, in_stream_order
from tests.jetstream.conftest import Open
from tests.jetstream.support import make_topic, publish, receive, subscribe

LEASE = 3.0


async def test_redelivered_messages_come_in_order_whenever_their_leases_ended(open_backend: Open, topic: str) -> None:
    dead, successor = await open_backend(lease_seconds=LEASE), await open_backend(lease_seconds=LEASE)
    await make_topic(dead, topic)
    await publish(dead, topic, *(OutboundMessage(b"%d" % number, b"key") for number in range(200)))
    source = await subscribe(dead, topic, ordered_by_key=True)
    leased = await receive(source, 150)
    await let_pass(LEASE / 4)
    assert not any(await source.extend(leased[:50]))
    # From here on no lease is renewed, as after a crash; the leases of the first fifty end last.
    await let_pass(LEASE * 1.3)
    found = await receive(await subscribe(successor, topic, ordered_by_key=True), 200)
    assert [int(message.data or b"") for message in found] == list(range(200))
    assert [message.delivery_attempt for message in found] == [2] * 150 + [1] * 50


async def test_unsettled_messages_of_a_live_consumer_do_not_delay_a_fetch(open_backend: Open, topic: str) -> None:
    living, second = await open_backend(), await open_backend()
    await make_topic(living, topic)
    await publish(living, topic, *(OutboundMessage(b"%d" % number) for number in range(10)))
    await receive(await subscribe(living, topic, ordered_by_key=True), 10)
    await publish(living, topic, *(OutboundMessage(b"%d" % number) for number in range(10, 10 + 2 * GATHER_STEP)))
    source = await subscribe(second, topic, ordered_by_key=True)
    found = await source.fetch(1000, 1 << 24, 30.0)
    assert [int(message.data or b"") for message in found] == list(range(10, 10 + len(found)))
    assert 0 < len(found) <= GATHER_STEP


async def test_the_first_fetch_ends_when_no_redelivery_arrives(open_backend: Open, topic: str) -> None:
    living, second = await open_backend(), await open_backend()
    await make_topic(living, topic)
    await publish(living, topic, OutboundMessage(b"leased"))
    await receive(await subscribe(living, topic, ordered_by_key=True), 1)
    source = await subscribe(second, topic, ordered_by_key=True)
    assert await source.fetch(10, 1 << 24, 0.5) == []


def test_new_messages_follow_redelivered_ones_in_their_order() -> None:
    def message(sequence: int, attempt: int) -> Message[bytes]:
        reply = b"$JS.ACK.s.c.%d.%d.%d.0.0" % (attempt, sequence, sequence)
        return Message("s", b"", NativeMessage(b"s.0", reply, b"", b""), MessageView())

    arrived = [message(8, 2), message(9, 2), message(3, 2), message(4, 3), message(11, 1), message(10, 1)]
    assert [int(m.raw.reply.split(b".")[5]) for m in in_stream_order(arrived)] == [3, 4, 8, 9, 11, 10]
