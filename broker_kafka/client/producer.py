"""The producer client of a thread, and `ProducerThread`, which hands whole batches to it and polls for their reports.

*Concurrency.* Any number of `publish` calls at once; messages go to the client in the order of the calls, and its
idempotence keeps the order per partition. One thread produces and polls, because switching threads per message costs
more than either. *Back-pressure.* At most `window` messages are with the client. The rest waits in its call, also when
the client's queue is full; a message that an empty queue has no room for fails. *Idle.* Without work the thread sleeps
until the next call, and polls for connection errors once a second. *Linger.* While no call waits, the client does not
linger. *Failure.* Each message has its own outcome. A message that was not handed to the client in time fails as not
sent. A client with a fatal error is closed: its messages fail, and a new client produces the next one. *Stop.* Messages
are delivered until the deadline; then the rest fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, time
from typing import Any, Final, cast

from confluent_kafka import KafkaError, KafkaException, Producer

from broker import BrokerError, Closed, OutboundMessage
from broker.driver import logger
from broker_kafka.client.batch_splitting import Splitting
from broker_kafka.client.delivery_reports import (
    PAGE,
    Outcome,
    Page,
    PublishCall,
    Reports,
    Tally,
    complete_calls,
    not_sent,
    publish_error,
    rejected_error,
)
from broker_kafka.client.partitioner import Partitioner, choose_partition
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import Command, OwnerThread
from broker_kafka.codec.headers import encode_headers, encode_time
from broker_kafka.config.oauth import with_oauth_token
from broker_kafka.errors import configuration_error, kafka_error, translate

__all__ = ["ProducerClient", "ProducerThread"]


_CONNECT_SECONDS: Final = 0.5
_FIRST_LOOKUP_SECONDS: Final = 0.1
_LONGEST_LOOKUP_SECONDS: Final = 10.0
_METADATA_SECONDS: Final = 30.0


class ProducerClient:
    """The current producer, and the partitions of its topics. Its calls block for a moment.

    :ivar connected: the producer, once it was asked for a topic; `connect` returns the same.
    :param make: opens a producer.
    :param rebootstrapper: watches the producer.
    :param changed: when this process last changed a topic, by `monotonic`; older metadata of the topic is not used.
    """

    def __init__(
        self, make: Callable[[], Producer], rebootstrapper: Rebootstrapper, changed: Mapping[str, float]
    ) -> None:
        self._make = make
        self._rebootstrapper = rebootstrapper
        self._changed = changed
        self._lookup_seconds = _FIRST_LOOKUP_SECONDS
        self._partitions: dict[str, tuple[int, float]] = {}
        """By topic: their number, and when it was read."""
        self.producer: Producer | None = None
        self.connected: Producer | None = None

    def get(self) -> Producer:
        """The producer; opens one if there is none."""
        if self.producer is None:
            self.producer = self._make()
            self._rebootstrapper.watch(self.producer)
        return self.producer

    def abort_reason(self) -> KafkaError | None:
        """The error for which the open transaction has to be aborted, if there is one."""
        try:
            # Within a transaction this changes nothing, and raises the error of the transaction.
            self.get().begin_transaction()
        except KafkaException as error:
            found = error.args[0]
            return found if found.txn_requires_abort() else None
        return None

    def drop(self) -> Producer | None:
        """Have the next `get` open a new producer; return the old one."""
        self._rebootstrapper.unwatch()
        producer, self.producer = self.producer, None
        self.connected = None
        return producer

    def connect(self, topic: str) -> Producer:
        """The producer, which has read metadata of a topic: otherwise it connects to a broker half a second later."""
        if self.connected is None:
            self.connected = self.get()
            with suppress(KafkaException):
                self.connected.list_topics(topic, timeout=_CONNECT_SECONDS)
        return self.connected

    def partitions(self, topic: str) -> int:
        """The number of partitions of a topic, from metadata of the last seconds.

        :raises BrokerError, KafkaException: as `look_up`.
        """
        known = self._partitions.get(topic)
        if known is None or monotonic() >= known[1] + _METADATA_SECONDS or known[1] <= self._changed.get(topic, 0.0):
            return self.look_up(topic)
        return known[0]

    def look_up(self, topic: str) -> int:
        """Read the number of partitions of a topic from the brokers.

        :raises TopicNotFound, NotAuthorized: the brokers' answer.
        :raises KafkaException: no broker answered; the next call waits longer.
        """
        started = monotonic()
        try:
            found = self.get().list_topics(topic, timeout=self._lookup_seconds).topics[topic]
        except KafkaException:
            self._lookup_seconds = min(2 * self._lookup_seconds, _LONGEST_LOOKUP_SECONDS)
            raise
        self._lookup_seconds = _FIRST_LOOKUP_SECONDS
        if found.error is not None:
            raise translate(found.error, f"Publishing to {topic!r}")
        self._partitions[topic] = len(found.partitions), started
        return len(found.partitions)


_POLL_SECONDS: Final = 0.001
_LONGEST_POLL_SECONDS: Final = 0.005
_IDLE_SECONDS: Final = 1.0
_PURGE_SECONDS: Final = 1.0
_DEFAULT_BATCH_SIZE: Final = 1_000_000
_RECENT_MS: Final = 60_000
"""No topic is expected to keep records for less."""
_REJECTS_REST: Final = frozenset({KafkaError._QUEUE_FULL, KafkaError._FATAL})
"""With one of these the client rejects the rest of a batch, too."""
_UNKNOWN: Final = frozenset({KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})
_headers: Final = cast("Callable[[OutboundMessage], list[tuple[str, str | bytes | None]]]", encode_headers)
_PROPAGATION_MS: Final = 1000  # librdkafka's default of 30 s delays TopicNotFound


class ProducerThread(OwnerThread[ProducerClient]):
    """:param config: of librdkafka, from `KafkaSettings.client_config("producer")`.
    :param window: most messages without a report.
    :param timeout: seconds until a message that was not handed to the client fails; the client's own timeout follows.
    :param eager: ignore `linger.ms` while no call waits.
    :param partitioner: chooses the partition of messages that name none; None leaves that to the client.
    :param changed: as of `ProducerClient`.
    :param on_old: called on the loop with a topic and given publish times that are over a minute old.
    :param on_crash: called on the loop if a defect has ended the thread.
    """

    _splits = True
    """Whether a batch that a broker rejects as too large is split and sent again."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        name: str = "Kafka producer",
        window: int = 50_000,
        timeout: float = 30.0,
        eager: bool = True,
        partitioner: Partitioner | None = None,
        changed: Mapping[str, float] | None = None,
        on_old: Callable[[str, Sequence[int]], object] | None = None,
        on_crash: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name, Rebootstrapper(config))
        self._config: dict[str, Any] = {"topic.metadata.propagation.max.ms": _PROPAGATION_MS, **config}
        self._listener: Callable[[KafkaError], object] | None = self._config.pop("error_cb", None)
        self._window = window
        self._timeout = timeout
        self._eager = eager
        self._partitioner = partitioner
        self._changed: Mapping[str, float] = {} if changed is None else changed
        self._on_old = on_old
        self._on_crash = on_crash
        self._backlog: deque[PublishCall] = deque()
        self._complete: list[PublishCall] = []
        self._trouble: KafkaError | None = None
        self._fatal: KafkaError | None = None
        self._reports = Reports(self._call_ended)
        self._splitting = Splitting(
            self._backlog.append,
            lambda call: self._complete.append(call),
            lambda topic: not_sent(topic, self._timeout, self._trouble),
            batch=int(batch) if (batch := str(config.get("batch.size"))).isdecimal() else _DEFAULT_BATCH_SIZE,
        )
        self._wait = _POLL_SECONDS
        """How long a poll waits for reports; commands wait as long."""
        self._stop_by = self._purge_for = 0.0

    # -- called on the loop --------------------------------------------------------------------------------------

    async def publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True, placed: bool = False
    ) -> Sequence[Outcome]:
        """Produce messages in order; return one outcome each, None for success without a receipt.

        A cancelled call goes on; its outcomes are dropped.

        :param placed: each message is a key, a body and a partition, and nothing else, which is faster.
        :raises Closed: the thread was stopped.
        :raises BrokerError: the thread has failed.
        """
        if not messages:
            return []
        waiter: asyncio.Future[list[Outcome]] = self._loop.create_future()
        call = PublishCall(
            topic,
            messages,
            waiter,
            receipts=receipts,
            deadline=monotonic() + self._timeout,
            placed=placed and not receipts,
            on_error=self._splitting.failed if self._splits else None,
        )
        self._put(call)
        return await waiter

    async def stop(self, timeout: float) -> bool:
        """Deliver messages for at most `timeout` seconds, fail the rest, and end the thread."""
        self._purge_for = min(_PURGE_SECONDS, timeout / 4)
        self._stop_by = monotonic() + timeout - 2 * self._purge_for
        return await super().stop(timeout)

    # -- the thread ----------------------------------------------------------------------------------------

    def _open(self) -> ProducerClient:
        client = ProducerClient(self._make, self._rebootstrapper, self._changed)
        client.get()
        return client

    def _make(self) -> Producer:
        try:
            return Producer({**with_oauth_token(self._config), "error_cb": self._on_error})
        except (KafkaException, TypeError, ValueError) as error:
            raise configuration_error(error, "Opening a producer", self._config) from error

    def _run_command(self, command: Command, client: ProducerClient) -> None:
        if isinstance(command, PublishCall):
            self._backlog.append(command)
        else:
            super()._run_command(command, client)

    def _turn(self, client: ProducerClient) -> None:
        if self._backlog:
            self._produce(client)
        if self._reports.missing or self._backlog:
            self._poll(client, self._wait, eager=self._eager and not self._backlog)
        else:
            self._serve(client, _IDLE_SECONDS)
            self._poll(client, 0.0)

    def _shut(self, client: ProducerClient) -> None:
        try:
            while (self._backlog or self._reports.missing) and monotonic() < self._stop_by:
                if self._backlog:
                    self._produce(client)
                self._poll(client, _POLL_SECONDS, eager=True)
        finally:
            self._give_up(client, Closed(f"{self._name} was closed before the message was sent"))

    def _crashed(self, error: BrokerError) -> None:
        if self._on_crash is not None:
            self._on_crash()

    # -- producing -----------------------------------------------------------------------------------------

    def _produce(self, client: ProducerClient) -> None:
        """Hand the client the messages that it has room for, page by page."""
        backlog, reports, splitting = self._backlog, self._reports, self._splitting
        while backlog:
            call = backlog[0]
            if splitting.topics and splitting.intercept(call):
                backlog.popleft()
                continue
            room = self._window - reports.missing
            if call.deadline < monotonic():
                self._fail_rest(call, not_sent(call.topic, self._timeout, self._trouble))
            elif room <= 0 or not self._produce_page(client, call, room):
                return
            if call.next == len(call.messages):
                backlog.popleft()
            self._poll(client, 0.0)

    def _produce_page(self, client: ProducerClient, call: PublishCall, room: int) -> bool:
        """Produce the next messages of a call; False if the client accepts no more for now."""
        try:
            producer = client.connect(call.topic) if client.connected is None else client.connected
            partitions = client.partitions(call.topic) if self._partitioner is not None else 0
        except (BrokerError, KafkaException) as error:
            return self._lookup_failed(call, error)
        most, messages = min(room, PAGE), call.messages
        run = call.following(most) if call.next or call.placed or len(messages) > most else messages
        try:
            if not call.placed and (partitions or not run[0].plain):
                return self._produce_singly(client, producer, call, run, partitions)
            return self._produce_plain(client, producer, call, run)
        except Exception as error:
            # No message may end the thread.
            logger.warning("%s: the client failed: %s", self._name, error, exc_info=True)
            self._fail_rest(call, translate(error, f"Publishing to {call.topic!r}"))
            return True

    def _produce_plain(
        self, client: ProducerClient, producer: Producer, call: PublishCall, run: Sequence[OutboundMessage]
    ) -> bool:
        """Produce plain or placed messages with one call; False if the client accepts no more for now."""
        page: Page | Tally
        rows: list[dict[str, Any]]
        # The client uses the partition of the batch, not of a message.
        partition = (run[0].partition or 0) if call.placed else -1
        if call.receipts:
            page, shared = self._reports.page(call, len(run)), None
            rows = [
                {"value": message.data, "key": message.key, "callback": report}
                for message, report in zip(run, page.reports, strict=False)
                if message.plain
            ]
        else:
            page = self._reports.tally(call)
            shared = page.report
            rows = [{"value": each.data, "key": each.key} for each in run if call.placed or each.plain]
        if len(rows) < len(run):
            self._reports.accepted(page, call, 0)
            return self._produce_singly(client, producer, call, run, 0)
        queued = producer.produce_batch(call.topic, rows, partition, shared)
        self._reports.accepted(page, call, queued)
        if queued == len(rows):
            call.next += queued
            return True
        for row in rows:
            error: KafkaError | None = row.get("_error")
            if error is None:
                call.next += 1
            elif error.code() in _REJECTS_REST or (not queued and error.code() in _UNKNOWN):
                return self._rejected(client, call, error)
            else:
                self._fail_next(call, self._translated(error, call, call.next))
        return True

    def _produce_singly(
        self,
        client: ProducerClient,
        producer: Producer,
        call: PublishCall,
        run: Sequence[OutboundMessage],
        partitions: int,
    ) -> bool:
        """Produce messages of any kind one by one; False if the client accepts no more for now."""
        page = self._reports.page(call, len(run))
        produce, topic, choose = producer.produce, call.topic, self._partitioner
        number = len(run)
        failure: BaseException | None = None
        report = page.reports[0]
        recent = 1000 * time() - _RECENT_MS
        old: list[int] = []
        try:
            for message, report in zip(run, page.reports, strict=False):
                partition = message.partition
                if partition is None:
                    partition = -1 if choose is None else choose_partition(choose, topic, message.key, partitions)
                timestamp = encode_time(message)
                produce(
                    topic,
                    message.data,
                    message.key,
                    partition,
                    on_delivery=report,
                    timestamp=timestamp,
                    headers=_headers(message),
                )
                if 0 < timestamp < recent:
                    old.append(timestamp)
        except Exception as error:
            # No message may end the thread.
            number, failure = page.place_of(report), error
        call.next += number
        self._reports.accepted(page, call, number)
        if old and self._on_old is not None:
            self._post(self._on_old, topic, old)
        if failure is None:
            return True
        found = KafkaError(KafkaError._QUEUE_FULL) if isinstance(failure, BufferError) else kafka_error(failure)
        if found is not None:
            return self._rejected(client, call, found, failure)
        self._fail_next(call, rejected_error(failure, topic, call.messages[call.next]))
        return True

    def _rejected(
        self, client: ProducerClient, call: PublishCall, error: KafkaError, raised: BaseException | None = None
    ) -> bool:
        """The client rejected the next message of a call; returns whether to go on.

        :param raised: the outcome of the message, if it is a BrokerError.
        """
        code = error.code()
        if code == KafkaError._QUEUE_FULL and self._reports.missing:
            return False
        if code == KafkaError._FATAL:
            self._replace(client)
        elif code in _UNKNOWN and not call.looked_up:
            # The client itself reads the topic's metadata again only after a while.
            try:
                client.look_up(call.topic)
                call.looked_up = True
            except (BrokerError, KafkaException) as failure:
                return self._lookup_failed(call, failure)
        else:
            own = raised if isinstance(raised, BrokerError) else None
            self._fail_next(call, own or self._translated(error, call, call.next))
        return True

    def _fail_next(self, call: PublishCall, error: BrokerError) -> None:
        call.fail_next(error)
        if not call.left:
            self._call_ended(call)

    def _lookup_failed(self, call: PublishCall, error: BaseException) -> bool:
        """The topic could not be looked up; returns whether to go on with other calls."""
        failure = translate(error, f"Publishing to {call.topic!r}")
        if failure.retriable and monotonic() < call.deadline:
            return False
        self._fail_rest(call, failure)
        return True

    # -- reports -------------------------------------------------------------------------------------------

    def _poll(self, client: ProducerClient, wait: float, *, eager: bool = False) -> None:
        """Run the callbacks of the client; return the complete calls to the loop."""
        producer = client.producer
        if producer is not None:
            try:
                if eager:
                    producer.flush(wait)
                else:
                    producer.poll(wait)
            except (KafkaException, SystemError) as raised:
                error = kafka_error(raised)
                if error is None:
                    raise
                if error.fatal():
                    self._fatal = error
                    self._replace(client)
        if self._splitting.draining:
            self._splitting.drain(self._reports, self._backlog)
        if self._complete:
            self._wait = _POLL_SECONDS
            self._return_calls()
        elif wait:
            self._wait = min(1.5 * wait, _LONGEST_POLL_SECONDS)

    def _call_ended(self, call: PublishCall) -> None:
        if not (self._splitting.topics and self._splitting.retain(call)):
            self._complete.append(call)

    def _return_calls(self) -> None:
        """Return the outcomes of the complete calls to the loop, with one wake-up."""
        calls, self._complete = self._complete, []
        for call in calls:
            if not call.failed:
                self._trouble = None
                continue
            outcomes = call.outcomes
            for index, outcome in enumerate(outcomes):
                if isinstance(outcome, KafkaError):
                    outcomes[index] = self._translated(outcome, call, index)
        self._post(complete_calls, calls)

    def _translated(self, error: KafkaError, call: PublishCall, index: int) -> BrokerError:
        return publish_error(error, call.topic, call.messages[index], self._trouble)

    # -- closing ----------------------------------------------------------------------------------------------

    def _replace(self, client: ProducerClient) -> None:
        """Close a client with a fatal error; the next message opens a new one."""
        if client.producer is not None:
            logger.warning("%s: fatal error, a new client is opened: %s", self._name, self._fatal)
            self._drop_client(client)

    def _give_up(self, client: ProducerClient, reason: BrokerError) -> None:
        """Close the client, and fail every message without an outcome."""
        self._drop_client(client)
        self._splitting.drain(self._reports, self._backlog)
        while self._backlog:
            self._fail_rest(self._backlog.popleft(), reason)
        self._return_calls()

    def _drop_client(self, client: ProducerClient) -> None:
        producer = client.drop()
        if producer is not None:
            if self._reports.missing:
                producer.purge(blocking=False)
            until = monotonic() + (self._purge_for or _PURGE_SECONDS)
            while self._reports.missing and monotonic() < until:
                try:
                    producer.poll(_POLL_SECONDS)
                except (KafkaException, SystemError):
                    continue  # the fatal error, raised again between reports
        for call in self._reports.abandon():
            call.fail_unreported()
            if not call.left:
                self._call_ended(call)

    def _fail_rest(self, call: PublishCall, reason: BrokerError) -> None:
        call.fail_rest(reason)
        if not call.left:
            self._call_ended(call)

    def _on_error(self, error: KafkaError) -> None:
        """`error_cb` of the client, called within a poll; never raises."""
        if error.fatal():
            self._fatal = error
        else:
            self._trouble = error
        if self._listener is not None:
            self._listener(error)
