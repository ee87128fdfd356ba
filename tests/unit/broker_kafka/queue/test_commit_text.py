"""The text beside the positions of a queue, and what others learn from it."""

from __future__ import annotations

from broker.driver.contract import TopicPartition
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.queue.admin.inspecting import topic_without_name
from broker_kafka.queue.markers.commit_text import (
    commit_text,
    key_mark,
    key_mark_in,
    member_mark,
    member_mark_in,
    topic_mark,
    topic_mark_in,
    writer_in,
)
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.settings import KafkaSettings

SHARED = QueueFilter.of("billing", KafkaSettings(queue="markers", marker_topic="mq-markers"))
OWN = QueueFilter.of("billing", KafkaSettings(queue="markers"))
BY_SHARED, BY_OWN = (commit_text("member", topic_mark=each.topic_mark) for each in (SHARED, OWN))


def test_what_was_written_is_read() -> None:
    text = commit_text("member", "writer", topic_mark=topic_mark("markers"), key_mark=key_mark(b"k"))
    assert (writer_in(text), member_mark_in(text)) == ("writer", member_mark("member"))
    assert (topic_mark_in(text), key_mark_in(text)) == (topic_mark("markers"), key_mark(b"k"))
    assert (writer_in(BY_OWN), key_mark_in(BY_OWN)) == (None, "")
    assert topic_mark_in(BY_OWN) == topic_mark("billing.markers")
    assert topic_mark_in("of another program") is None


def test_markers_without_a_topic_are_of_the_topic_that_the_subscription_reads() -> None:
    assert named(SHARED, orders="") == "orders"
    # Beside members of kafka-mq-go ours may have a marker topic of their own.
    assert named(SHARED, orders=BY_OWN) == "orders"
    assert named(SHARED, orders="", invoices=BY_OWN) == "orders"
    assert named(SHARED, orders=BY_SHARED, invoices=BY_OWN) == "orders"
    assert named(OWN, orders=BY_SHARED, invoices=BY_OWN) == "invoices"
    assert named(SHARED, orders="", invoices="") == named(SHARED) == ""


def named(queue_filter: QueueFilter, **texts: str) -> str:
    stored = {TopicPartition(topic, n): StoredOffset(1, text) for topic, text in texts.items() for n in (0, 1)}
    return topic_without_name(queue_filter, stored)
