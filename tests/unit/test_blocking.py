"""`broker.blocking`: the same surface without await, on the in-memory broker."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import pickle
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import contextmanager
from typing import Any, get_type_hints

import pytest

import broker.admin
import broker.blocking
import broker.bus
import broker.consumer
import broker.log_reader
import broker.messages
import broker.protocols
import broker.record_consumer
import broker.topic
from broker.blocking import AsMessagesOptions, MessageOptions, RecordOptions
from broker.codecs import Json
from broker.errors import (
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    InvalidMessage,
    InvalidSetting,
    PublishError,
    TopicNotFound,
    UnknownScheme,
)
from broker.hooks import Event, HandlerFailed
from broker.messages import OutboundMessage, SettleState
from broker.retry import Retry
from broker_inmem import Broker, InmemSettings

TOPIC = "orders"


@pytest.fixture
def bus(inmem_broker: Broker) -> Iterator[broker.blocking.Bus]:
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic(TOPIC, partitions=1)
        yield bus
        inmem_broker.faults.clear()


def publish(bus: broker.blocking.Bus, count: int, first: int = 0) -> None:
    bus.topic(TOPIC).publish_batch([OutboundMessage(b"%d" % n, key="k") for n in range(first, first + count)])


def waiting(bus: broker.blocking.Bus) -> tuple[int, int | None]:
    lag = bus.admin.lag(TOPIC, "billing")
    return lag.waiting, lag.unsettled


# -- the surface ---------------------------------------------------------------------------------------------

ONLY_ASYNCHRONOUS = {
    "backend": "the backend's calls belong to the bus's loop; `bus.call` gets there",
    "make_engine": "inner",
    "member": "inner",
    "bus": "inner",
    "commit_records": "inner: the owner's side of a commit",
    "begin_settling": "inner",
    "codec": "inner",
}


def parameters(function: Callable[..., Any], options: type | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values()):
        if parameter.kind is parameter.VAR_KEYWORD and options is not None:
            found |= dict.fromkeys(get_type_hints(options), "option")
        elif parameter.name != "self":
            found[parameter.name] = parameter.kind.name
    return found


@pytest.mark.parametrize(
    ("asynchronous", "blocking"),
    [
        (broker.bus.Bus, broker.blocking.Bus),
        (broker.topic.TopicFacade, broker.blocking.Topic),
        (broker.consumer.MessageConsumer, broker.blocking.MessageConsumer),
        (broker.record_consumer.RecordConsumer, broker.blocking.RecordConsumer),
        (broker.log_reader.LogReaderFacade, broker.blocking.LogReader),
        (broker.admin.AdminFacade, broker.blocking.Admin),
        (broker.messages.Message, broker.blocking.BlockingMessage),
        (broker.messages.MessageBatch, broker.blocking.BlockingMessageBatch),
        (broker.messages.Record, broker.blocking.BlockingRecord),
        (broker.messages.RecordBatch, broker.blocking.BlockingRecordBatch),
        (broker.protocols.TransactionalPublisher, broker.blocking.TransactionalPublisher),
        (broker.protocols.Transaction, broker.blocking.Transaction),
        (broker.consumer.Service, broker.blocking.Service),
    ],
)
def test_blocking_surface_mirrors_the_asynchronous_one(asynchronous: type, blocking: type) -> None:
    options = {"messages": MessageOptions, "records": RecordOptions, "as_messages": AsMessagesOptions}
    fields: set[str] = set(getattr(asynchronous, "__struct_fields__", ()))
    for name, member in vars(asynchronous).items():
        if name.startswith("_") or name in ONLY_ASYNCHRONOUS or name in fields:
            continue
        if name in get_type_hints(blocking):
            continue
        assert hasattr(blocking, name), f"{blocking.__qualname__} has no {name}"
        mirrored = inspect.getattr_static(blocking, name)
        if not inspect.isfunction(member):
            assert not inspect.isfunction(mirrored), name
            continue
        assert not inspect.iscoroutinefunction(mirrored), name
        wanted = dict.fromkeys(parameters(member, None), None)
        found = dict.fromkeys(parameters(mirrored, options.get(name)), None)
        assert wanted == found, f"{blocking.__qualname__}.{name}"
    for name in ("__iter__", "__enter__", "__exit__"):
        awaited = {"__iter__": "__aiter__", "__enter__": "__aenter__", "__exit__": "__aexit__"}[name]
        assert hasattr(asynchronous, awaited) <= hasattr(blocking, name), name


@pytest.mark.parametrize(
    ("asynchronous", "blocking"),
    [
        (broker.messages.Message, broker.blocking.BlockingMessage),
        (broker.messages.Record, broker.blocking.BlockingRecord),
    ],
)
def test_blocking_messages_show_every_field(asynchronous: type, blocking: type) -> None:
    inner = {"raw", "view", "size", "owner", "decoded", "retries", "lease", "lease_ends", "outcome", "in_use", "scope"}
    for name in set(getattr(asynchronous, "__struct_fields__", ())) - inner - {"generation"}:
        assert isinstance(inspect.getattr_static(blocking, name), property), name


# -- connecting ----------------------------------------------------------------------------------------------


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
        bus.topic(TOPIC)
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
    for call in (bus.health, bus.admin.topics, inbox.next_message, lambda: topic.publish(b"")):
        with pytest.raises(Closed):
            call()
    with pytest.raises(Closed):
        bus.open()
    assert threading.active_count() == before


# -- publishing ----------------------------------------------------------------------------------------------


def test_publishing_one_many_and_through_the_pipeline(bus: broker.blocking.Bus) -> None:
    topic = bus.topic(TOPIC, Json(dict[str, int]))
    assert bus.topic(TOPIC) is bus.topic(TOPIC)
    assert topic.name == TOPIC
    assert topic.publish({"n": 0}, key="k", attributes={"a": "b"}).offset == 0
    assert [receipt.offset for receipt in topic.publish_batch([{"n": 1}, OutboundMessage(b"raw", "k")])] == [1, 2]
    futures = [topic.enqueue({"n": n}, key="k") for n in range(3, 50)]
    topic.flush()
    assert [future.result().offset for future in futures] == list(range(3, 50))
    assert bus.log.bounds(TOPIC)[0] == (0, 50)


def test_publish_errors_are_the_asynchronous_ones(bus: broker.blocking.Bus) -> None:
    with pytest.raises(TopicNotFound):
        bus.topic("missing").publish(b"")
    with pytest.raises(InvalidMessage):
        bus.topic(TOPIC).enqueue(OutboundMessage(b""), key="k")


def test_failed_futures_that_nobody_looked_at_are_raised_by_flush_and_close(inmem_broker: Broker) -> None:
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic(TOPIC)
        topic = bus.topic(TOPIC)
        inmem_broker.faults.fail_publish(InvalidMessage("refused"), times=3)
        looked_at, asked, unseen = (topic.enqueue(b"") for _ in range(3))
        with pytest.raises(InvalidMessage):
            looked_at.result()
        assert isinstance(asked.exception(), InvalidMessage)
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


# -- messages ------------------------------------------------------------------------------------------------


def test_messages_one_by_one_with_every_way_to_settle(bus: broker.blocking.Bus) -> None:
    bus.admin.ensure_topic("orders.dead")
    bus.topic(TOPIC).publish(OutboundMessage(b"body", "key", {"a": "b"}, id="order-1"))
    with bus.messages(TOPIC, subscription="billing", dead_letter="orders.dead") as inbox:
        message = inbox.next_message()
        assert message is not None
        assert (message.topic, message.id, message.key, message.data) == (TOPIC, "order-1", b"key", b"body")
        assert (dict(message.attributes), message.payload, message.delivery_attempt) == ({"a": "b"}, b"body", 1)
        assert message.state is SettleState.OPEN
        assert not message.lease_lost
        assert message.publish_time is not None
        assert OutboundMessage.from_message(message).id == "order-1"
        message.extend(60)
        message.nack(delay=0)
        again = inbox.next_message(timeout=5)
        assert again is not None
        assert again.delivery_attempt == 2
        again.reject("no use")
        publish(bus, 1)
        acked = inbox.next_message(timeout=5)
        assert acked is not None
        acked.ack()
        acked.ack()
        assert acked.state is SettleState.SETTLED
        assert inbox.next_message(timeout=0.01) is None
    assert waiting(bus) == (0, 0)
    (letter,) = bus.admin.list_dead("orders.dead")
    assert letter.reason == "no use"
    assert bus.admin.redrive("orders.dead").moved == 1


def test_iterating_with_blocks_acks_and_retries(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    failed: list[HandlerFailed] = []
    bus.hooks.listen(lambda event: failed.append(event) if isinstance(event, HandlerFailed) else None)
    done: list[bytes | None] = []
    retry = Retry(initial=0.0, jitter=0.0)
    with bus.messages(TOPIC, subscription="billing", retry=retry, stop_when_idle=0.2) as inbox:
        for message in inbox:
            with message:
                if message.data == b"3" and not failed:
                    raise ValueError("not yet")
                done.append(message.data)
    assert sorted(done, key=lambda body: int(body or b"")) == [b"%d" % n for n in range(10)]
    assert [str(event.error) for event in failed] == ["not yet"]
    assert waiting(bus) == (0, 0)


def test_leaving_the_loop_gives_back_the_rest(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    with bus.messages(TOPIC, subscription="billing") as inbox:
        for message in inbox:
            message.ack()
            break
    assert waiting(bus) == (9, 0)


def test_batches_are_settled_together_or_one_by_one(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    with bus.messages(TOPIC, subscription="billing", stop_when_idle=0.2) as inbox:
        batch = inbox.next_batch(4, timeout=5)
        assert 1 <= len(batch) <= 4
        assert [message.data for message in batch[1:]] == [message.data for message in batch][1:]
        batch[0].ack()
        batch.nack(delay=0)
        seen = 1
        for more in inbox.batches(3):
            assert 1 <= len(more) <= 3
            seen += len(more)
            more.ack()
        assert seen == 10
        with pytest.raises(ConfigurationError):
            inbox.batches(5000)
    assert waiting(bus) == (0, 0)


def test_receive_runs_handlers_in_threads_at_most_so_many_at_once(bus: broker.blocking.Bus) -> None:
    publish(bus, 30)
    running = 0
    most = 0
    lock = threading.Lock()
    meeting = threading.Barrier(3)
    threads: set[int] = set()

    def handle(message: broker.blocking.BlockingMessage) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            threads.add(threading.get_ident())
        meeting.wait(timeout=10)
        with lock:
            running -= 1

    with bus.messages(TOPIC, subscription="billing", stop_when_idle=0.2) as inbox:
        inbox.receive(handle, concurrency=3)
    assert most == 3
    assert len(threads) == 3
    assert threading.get_ident() not in threads
    assert waiting(bus) == (0, 0)


def test_receive_settles_by_what_the_handler_does(bus: broker.blocking.Bus) -> None:
    publish(bus, 5)
    tried: list[bytes | None] = []

    def handle(message: broker.blocking.BlockingMessage) -> None:
        tried.append(message.data)
        if message.data == b"0" and tried.count(b"0") == 1:
            raise StopIteration
        if message.data == b"1":
            message.ack()

    retry = Retry(initial=0.0, jitter=0.0)
    with bus.messages(TOPIC, subscription="billing", retry=retry, stop_when_idle=0.2) as inbox:
        inbox.receive(handle)
    assert sorted(tried, key=str) == [b"0", b"0", b"1", b"2", b"3", b"4"]
    assert waiting(bus) == (0, 0)


def test_receive_batches_takes_a_result_per_message(bus: broker.blocking.Bus) -> None:
    publish(bus, 6)
    tried: list[bytes | None] = []

    def handle(batch: broker.blocking.BlockingMessageBatch) -> list[BaseException | None]:
        bodies = [message.data for message in batch]
        results = [ValueError("not yet") if body == b"2" and body not in tried else None for body in bodies]
        tried.extend(bodies)
        return list(results)

    retry = Retry(initial=0.0, jitter=0.0)
    with bus.messages(TOPIC, subscription="billing", retry=retry, stop_when_idle=0.2) as inbox:
        inbox.receive_batches(handle, max_messages=4)
    assert sorted(tried, key=str) == [b"0", b"1", b"2", b"2", b"3", b"4", b"5"]
    assert waiting(bus) == (0, 0)


def test_coroutine_function_is_refused_as_a_handler(bus: broker.blocking.Bus) -> None:
    async def handle(message: object) -> None:
        """Would never be awaited."""

    with bus.messages(TOPIC, subscription="billing") as inbox, pytest.raises(ConfigurationError, match="coroutine"):
        inbox.receive(handle)


def test_stop_from_another_thread_ends_receive(bus: broker.blocking.Bus) -> None:
    publish(bus, 3)
    with bus.messages(TOPIC, subscription="billing") as inbox:
        inbox.receive(lambda _: inbox.stop())
    assert waiting(bus)[1] == 0


def test_handler_that_takes_too_long_fails_and_others_go_on(bus: broker.blocking.Bus) -> None:
    publish(bus, 3)
    release = threading.Event()
    done: list[bytes | None] = []

    def handle(message: broker.blocking.BlockingMessage) -> None:
        if message.data == b"0" and not done:
            release.wait(timeout=30)
            return
        done.append(message.data)

    retry = Retry(initial=0.0, jitter=0.0, timeout=0.1)
    try:
        with bus.messages(TOPIC, subscription="billing", retry=retry, stop_when_idle=0.3, prefetch=1) as inbox:
            inbox.receive(handle)
    finally:
        release.set()
    assert {b"1", b"2"} <= set(done)


def test_close_returns_within_its_deadline_whatever_the_handler_does(bus: broker.blocking.Bus) -> None:
    publish(bus, 1)
    started, release = threading.Event(), threading.Event()

    def handle(message: object) -> None:
        started.set()
        release.wait(timeout=30)

    inbox = bus.messages(TOPIC, subscription="billing", close_timeout=0.1)
    try:
        with inbox, ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(inbox.receive, handle)
            started.wait(timeout=10)
            inbox.close()
            receiving.result(timeout=10)
    finally:
        release.set()
    assert waiting(bus) == (1, 0)


def test_exit_of_a_handler_ends_receive_where_it_was_called(bus: broker.blocking.Bus) -> None:
    publish(bus, 3)

    def handle(message: object) -> None:
        raise SystemExit(3)

    with bus.messages(TOPIC, subscription="billing") as inbox:
        with pytest.raises(SystemExit) as raised:
            inbox.receive(handle)
        assert raised.value.code == 3
        assert bus.health().ok
    assert waiting(bus) == (3, 0)


def test_several_threads_share_a_consumer_and_each_message_goes_to_one(bus: broker.blocking.Bus) -> None:
    publish(bus, 200)
    seen: list[bytes | None] = []

    def drain() -> None:
        while (message := inbox.next_message(timeout=0.3)) is not None:
            with message:
                seen.append(message.data)

    with bus.messages(TOPIC, subscription="billing") as inbox, ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(drain) for _ in range(4)]:
            future.result()
    assert sorted(int(body or b"") for body in seen) == list(range(200))
    assert waiting(bus) == (0, 0)


def test_context_of_interceptors_is_seen_in_the_block_and_gone_after_it(bus: broker.blocking.Bus) -> None:
    current: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="none")

    @contextmanager
    def trace(message: broker.messages.Message[Any]) -> Generator[None]:
        token = current.set(message.id)
        yield
        current.reset(token)

    bus.hooks.around_handling(trace)
    bus.topic(TOPIC).publish_batch([OutboundMessage(b"", id="one"), OutboundMessage(b"", id="two")])
    seen: list[str] = []
    with bus.messages(TOPIC, subscription="billing", stop_when_idle=0.2) as inbox:
        message = inbox.next_message()
        assert message is not None
        with message:
            assert current.get() == message.id
        assert current.get() == "none"
        assert message.state is SettleState.SETTLED
        inbox.receive(lambda message: seen.append(current.get() + message.id))
    assert seen in (["twotwo"], ["oneone"])


def test_context_of_the_caller_is_seen_by_publish_interceptors(bus: broker.blocking.Bus) -> None:
    current: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="none")
    seen: list[str] = []

    def intercept(topic: str, messages: Any) -> Any:
        seen.append(current.get())
        return messages

    bus.hooks.on_publish(intercept)
    current.set("request-1")
    bus.topic(TOPIC).publish(b"")
    bus.topic(TOPIC).enqueue(b"").result()
    assert seen == ["request-1", "request-1"]


# -- records, log, transactions --------------------------------------------------------------------------------


def test_records_one_by_one_by_batch_and_committed(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    with bus.records(TOPIC, group="audit") as log:
        first = log.next_record()
        assert first is not None
        assert (first.partition, first.offset, first.key, first.data, first.payload) == (0, 0, b"k", b"0", b"0")
        first.commit()
        assert log.committed() == {(TOPIC, 0): 1}
        batch = log.next_batch(4, timeout=5)
        assert [record.offset for record in batch] == list(range(1, 1 + len(batch)))
        batch.commit()
        assert batch.to_arrow().num_rows == len(batch)
        for record in log:
            if record.offset == 9:
                break
        log.commit()
        assert log.assignment() == [(TOPIC, 0)]
        log.seek({(TOPIC, 0): 8})
        log.pause()
        assert log.next_record(timeout=0.01) is None
        log.resume()
        assert [record.offset for record in log.next_batch(10, timeout=5)] == [8, 9]
    assert log.closed
    with bus.records(TOPIC, group="audit", stop_when_idle=0.2) as log:
        assert list(log.batches()) == []


def test_records_as_messages(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    seen: list[bytes | None] = []
    with bus.records(TOPIC, group="audit").as_messages(stop_when_idle=0.2) as inbox:
        for message in inbox:
            with message:
                seen.append(message.data)
    assert seen == [b"%d" % n for n in range(10)]
    assert bus.admin.lag(TOPIC, "audit").waiting == 0


def test_log_reader_reads_without_a_group(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    assert list(bus.log.partitions(TOPIC)) == [0]
    batches = bus.log.read(TOPIC, 0, 2, 7, max_records=2)
    assert [record.offset for batch in batches for record in batch] == [2, 3, 4, 5, 6]
    for batch in bus.log.read(TOPIC, 0, max_records=3):
        assert [record.data for record in batch] == [b"0", b"1", b"2"]
        break


def test_transaction_publishes_all_or_nothing(bus: broker.blocking.Bus) -> None:
    bus.admin.ensure_topic("totals", partitions=1)
    publish(bus, 4)
    with (
        bus.records(TOPIC, group="sums") as log,
        bus.transactional_publisher("sums-1") as publisher,
    ):
        with pytest.raises(ZeroDivisionError), publisher.transaction(log) as tx:
            assert len(log.next_batch(10, timeout=5)) >= 1
            tx.publish("totals", b"half")
            raise ZeroDivisionError
        total = 0
        while total < 4:
            with publisher.transaction(log) as tx:
                batch = log.next_batch(10, timeout=5)
                tx.publish_batch("totals", [record.data or b"" for record in batch])
                total += len(batch)
    with bus.records("totals", group="reader", stop_when_idle=0.2) as results:
        assert [record.data for record in results] == [b"0", b"1", b"2", b"3"]
    assert bus.admin.lag(TOPIC, "sums").waiting == 0


# -- threads, loops and processes ------------------------------------------------------------------------------


async def test_usable_where_a_loop_already_runs(inmem_broker: Broker) -> None:
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic(TOPIC)
        bus.topic(TOPIC).publish(b"1")
        with bus.messages(TOPIC, subscription="billing") as inbox:
            message = inbox.next_message()
            assert message is not None
            with message:
                assert asyncio.get_running_loop().is_running()
        assert waiting(bus) == (0, 0)


def test_call_on_the_own_loop_is_refused_instead_of_waiting_for_itself(bus: broker.blocking.Bus) -> None:
    caught: list[BrokerError] = []

    def listener(event: Event) -> None:
        try:
            bus.health()
        except BrokerError as error:
            caught.append(error)

    bus.hooks.listen(listener)
    bus.topic(TOPIC).publish(b"")
    assert "event loop" in caught[0].message


def test_coroutine_functions_run_on_the_loop_of_the_bus(bus: broker.blocking.Bus) -> None:
    async def double(number: int, *, plus: int) -> int:
        await asyncio.sleep(0)
        return 2 * number + plus

    assert bus.call(double, 20, plus=2) == 42


def test_bus_cannot_be_pickled_but_settings_can(inmem_broker: Broker) -> None:
    settings = InmemSettings.from_url(inmem_broker.url)
    with broker.blocking.connect(settings) as bus:
        bus.admin.ensure_topic(TOPIC)
        with pytest.raises(TypeError, match="settings"):
            pickle.dumps(bus)

    def executor(pickled: bytes) -> int | None:
        with broker.blocking.connect(pickle.loads(pickled)) as bus:  # noqa: S301
            return bus.topic(TOPIC).publish(b"").offset

    with ThreadPoolExecutor(3) as pool:
        offsets = list(pool.map(executor, [pickle.dumps(settings)] * 3))
    assert all(offset is not None for offset in offsets)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_told_to_open_its_own_bus(inmem_broker: Broker, bus: broker.blocking.Bus) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "nothing was raised"
        try:
            bus.close()
            bus.topic(TOPIC).publish(b"")
        except Closed as error:
            answer = str(error)
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    answer = os.read(reading, 10_000).decode()
    os.close(reading)
    assert "Open a bus in the child" in answer
    assert bus.topic(TOPIC).publish(b"").offset is not None
