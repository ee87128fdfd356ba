"""Connecting, and publishing without await."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all

import pytest

import broker.blocking
from broker.codecs import Json
from broker.errors import (
    Closed,
    ConnectionFailed,
    InvalidMessage,
    InvalidSetting,
    PublishError,
    TopicNotFound,
    UnknownScheme,
)
from broker.outbound import OutboundMessage
from broker_inmem import Broker
from tests.unit.broker.blocking.common import TOPIC


def test_errors_of_connecting_come_from_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownScheme):
        broker.blocking.connect("carrier-pigeon:")
    monkeypatch.delenv("BROKER_URL", raising=False)
    with pytest.raises(InvalidSetting, match="BROKER_URL"):
        broker.blocking.connect()


def test_failed_open_leaves_no_thread(inmem_broker: Broker) -> None:
    before = threading.active_count()
    inmem_broker.faults.fail("open")
    with pytest.raises(ConnectionFailed):
        broker.blocking.connect(inmem_broker.url).open()
    assert threading.active_count() == before


def test_closed_bus_has_no_thread_and_refuses_calls(inmem_broker: Broker) -> None:
    before = threading.active_count()
    bus = broker.blocking.connect(inmem_broker.url)
    with pytest.raises(Closed, match="not open"):
        bus.topic(TOPIC).publish(b"")
    with bus:
        bus.admin.ensure_topic(TOPIC)
        topic = bus.topic(TOPIC)
        inbox = bus.messages(TOPIC, subscription="billing")
        inbox.open()
        assert bus.health().ok
    assert threading.active_count() == before
    bus.close()
    inbox.close()
    topic.close()
    inbox.stop()
    assert not bus.health().ok
    for call in (bus.admin.topics, inbox.next_message, lambda: topic.publish(b"")):
        with pytest.raises(Closed):
            call()
    with pytest.raises(Closed):
        bus.open()
    assert threading.active_count() == before


def test_publishing_one_many_and_through_the_pipeline(bus: broker.blocking.Bus) -> None:
    topic = bus.topic(TOPIC, Json(dict[str, int]))
    assert bus.topic(TOPIC) is bus.topic(TOPIC)
    assert topic.name == TOPIC
    assert topic.publish({"n": 0}, key="k", attributes={"a": "b"}).offset == 0
    assert [receipt.offset for receipt in topic.publish_batch([{"n": 1}, OutboundMessage(b"raw", "k")])] == [1, 2]
    topic.publish_batch([{"n": 3}, OutboundMessage(b"raw", "k")], receipts=False)
    futures = [topic.enqueue({"n": n}, key="k") for n in range(5, 50)]
    topic.flush()
    assert [future.result().offset for future in futures] == list(range(5, 50))
    assert bus.log.bounds(TOPIC)[0] == (0, 50)


def test_publish_errors_are_the_asynchronous_ones(bus: broker.blocking.Bus) -> None:
    with pytest.raises(TopicNotFound):
        bus.topic("missing").publish(b"")
    with pytest.raises(InvalidMessage):
        bus.topic(TOPIC).enqueue(OutboundMessage(b""), key="k")


def test_unretrieved_failures_are_raised_by_flush_and_close(inmem_broker: Broker) -> None:
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic(TOPIC)
        topic = bus.topic(TOPIC)
        inmem_broker.faults.fail_publish(InvalidMessage("refused"), times=3)
        raised, inspected, unseen = (topic.enqueue(b"") for _ in range(3))
        with pytest.raises(InvalidMessage):
            raised.result()
        assert isinstance(inspected.exception(), InvalidMessage)
        wait_for_all([unseen])
        with pytest.raises(PublishError, match="1 of 1"):
            topic.flush()
        topic.flush()
        inmem_broker.faults.fail_publish(InvalidMessage("refused"))
        topic.enqueue(b"")
        with pytest.raises(PublishError):
            bus.close()


def test_order_per_key_of_each_thread_is_kept(bus: broker.blocking.Bus) -> None:
    def produce(key: int) -> None:
        topic = bus.topic(TOPIC)
        for n in range(50):
            topic.enqueue(b"%d" % n, key=str(key))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(produce, range(4)))
    bus.topic(TOPIC).flush()
    records = [record for batch in bus.log.read(TOPIC, 0) for record in batch]
    assert len(records) == 200
    for key in range(4):
        assert [record.data for record in records if record.key == b"%d" % key] == [b"%d" % n for n in range(50)]
