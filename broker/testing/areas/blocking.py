"""Conformance tests of `broker.blocking`: the same results from threads, beside a running event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import broker.blocking
from broker.errors import Closed, TopicNotFound
from broker.outbound import OutboundMessage
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import numbered

__all__ = ["Blocking"]


class Blocking(ConformanceCase):
    """`broker.blocking`, in a thread beside the event loop of the test."""

    @promise(
        "blocking.publish-and-consume",
        "Every way to publish and consume works without `await`, with the same results.",
    )
    async def test_publish_and_consume(self, harness: Harness) -> None:
        topic = await harness.topic()

        def work() -> None:
            with broker.blocking.connect(harness.url()) as bus, bus.messages(topic, subscription="readers") as inbox:
                receipts = bus.topic(topic).publish_batch(
                    [OutboundMessage(body, key="k", attributes={"a": "b"}) for body in numbered(30)]
                )
                assert len(receipts) == 30
                first = inbox.next_message(timeout=harness.patience)
                assert first is not None
                assert (first.key, dict(first.attributes)) == (b"k", {"a": "b"})
                first.ack()
                seen = {first.data}
                for message in inbox:
                    with message:
                        seen.add(message.data)
                    if len(seen) == 15:
                        break
                while len(seen) < 30:
                    batch = inbox.next_batch(5, timeout=harness.patience)
                    assert batch
                    seen.update(message.data for message in batch)
                    batch.ack()
                assert seen == set(numbered(30))
                assert inbox.next_message(timeout=harness.quiet) is None

        await asyncio.to_thread(work)

    @promise(
        "blocking.several-threads",
        "Several threads publish and consume over one bus; every message is handled once.",
    )
    async def test_several_threads(self, harness: Harness) -> None:
        topic = await harness.topic()
        seen: list[bytes | None] = []
        lock = threading.Lock()

        def work() -> None:
            with broker.blocking.connect(harness.url()) as bus, bus.messages(topic, subscription="readers") as inbox:

                def publish(number: int) -> None:
                    for body in numbered(25, f"p{number}"):
                        bus.topic(topic).publish(body)

                def consume() -> None:
                    until = time.monotonic() + harness.patience
                    while len(seen) < 100 and time.monotonic() < until:
                        message = inbox.next_message(timeout=harness.quiet)
                        if message is not None:
                            message.ack()
                            with lock:
                                seen.append(message.data)

                threads = [threading.Thread(target=publish, args=(number,)) for number in range(4)]
                threads += [threading.Thread(target=consume) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert inbox.next_message(timeout=harness.quiet) is None

        await asyncio.to_thread(work)
        assert sorted(body or b"" for body in seen) == sorted(b for n in range(4) for b in numbered(25, f"p{n}"))

    @promise(
        "blocking.errors-are-the-same",
        "Calls raise the error classes of the asynchronous API.",
    )
    async def test_errors_are_the_same(self, harness: Harness) -> None:
        topic = await harness.topic()

        def work() -> None:
            bus = broker.blocking.connect(harness.url())
            with bus:
                with pytest.raises(TopicNotFound):
                    bus.topic(unique("missing")).publish(b"x")
                publisher = bus.topic(topic)
            with pytest.raises(Closed):
                publisher.publish(b"x")

        await asyncio.to_thread(work)

    @requires("records")
    @promise("blocking.records-and-log", "Records are read and committed, and the log is read, without `await`.")
    async def test_records_and_log(self, harness: Harness) -> None:
        topic = await harness.topic(partitions=1)

        def work() -> None:
            with broker.blocking.connect(harness.url()) as bus:
                bus.topic(topic).publish_batch(numbered(20))
                with bus.records(topic, group="readers") as log:
                    seen: list[bytes | None] = []
                    while len(seen) < 20:
                        batch = log.next_batch(7, timeout=harness.patience)
                        assert batch
                        seen.extend(record.data for record in batch)
                        batch.commit()
                    assert seen == numbered(20)
                read = [record.data for batch in bus.log.read(topic, 0, max_records=6) for record in batch]
                assert read == numbered(20)

        await asyncio.to_thread(work)
