"""The library's producer, and what it knows of topics. Lives in the producer's thread; its calls block for a moment.

`ProducerThread`: the thread that gives whole batches to one producer of the library and polls for their reports.

*Concurrency.* `publish` may be called any number of times at once; messages go to the client in the order of the calls,
and order per partition is kept by its idempotence. The same thread produces and polls, because handing the
interpreter from one to the other per message costs more than either. *Back-pressure.* At most `window` messages are
with the client; what is beyond waits in its own call, and so does what the client's queue has no room for; what an
empty queue has no room for fails. *Idle.* With nothing to do the thread sleeps until a call comes, and looks for news
of the connection once in a second. *Delay.* While nothing waits to be produced the client does not linger. *Failure.*
Every message has its own outcome. A message that the client could not be given in time fails as not sent. A client with
a fatal error is given up: what it had on the way fails, and the next message is produced by a new one. *Stop.* What is
on the way is awaited to the deadline; then the rest fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
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
    refused_error,
    unknown_outcome,
)
from broker_kafka.client.partitioner import Partitioner, choose_partition
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import OwnerThread
from broker_kafka.codec.headers import encode_headers, encode_time
from broker_kafka.config.oauth import with_oauth_token
from broker_kafka.errors import configuration_error, kafka_error, translate

__all__ = ["ProducerClient", "ProducerThread"]


_CONNECT: Final = 0.5
_FIRST_LOOK: Final = 0.1
_LONGEST_LOOK: Final = 10.0
_KNOWN: Final = 30.0


class ProducerClient:
    """
    :param make: makes the producer, and the next one when it was dropped.
    :param rebootstrapper: holds the producer.
    :param changed: when this process last changed a topic, by `monotonic`; what was known of it before is forgotten.
    """

    def __init__(
        self, make: Callable[[], Producer], rebootstrapper: Rebootstrapper, changed: Mapping[str, float]
    ) -> None:
        self._make = make
        self._rebootstrapper = rebootstrapper
        self._changed = changed
        self._connected = False
        self._look_for = _FIRST_LOOK
        self._known: dict[str, tuple[int, float]] = {}
        self.producer: Producer | None = None

    def get(self) -> Producer:
        """The producer; a new one if there is none."""
        if self.producer is None:
            self.producer = self._make()
            self._rebootstrapper.watch(self.producer)
            self._connected = False
        return self.producer

    def refused(self) -> KafkaError | None:
        """Why the brokers refused what the open transaction writes to, so that it has to be undone, if they did."""
        try:
            # It does nothing within a transaction but to tell what is wrong with that one.
            self.get().begin_transaction()
        except KafkaException as error:
            found = error.args[0]
            return found if found.txn_requires_abort() else None
        return None

    def drop(self) -> Producer | None:
        """Have the next `get` make a new one; the old one."""
        self._rebootstrapper.unwatch()
        producer, self.producer = self.producer, None
        return producer

    def connect(self, topic: str) -> Producer:
        """The producer, which has asked for a topic: left alone, it connects to a broker half a second later."""
        producer = self.get()
        if not self._connected:
            self._connected = True
            with suppress(KafkaException):
                producer.list_topics(topic, timeout=_CONNECT)
        return producer

    def partitions(self, topic: str) -> int:
        """How many the topic has; asked for again after a while.

        :raises BrokerError, KafkaException: as `look_up`.
        """
        known = self._known.get(topic)
        if known is None or monotonic() >= known[1] + _KNOWN or known[1] <= self._changed.get(topic, 0.0):
            return self.look_up(topic)
        return known[0]

    def look_up(self, topic: str) -> int:
        """Ask the brokers for the topic's partitions.

        :raises TopicNotFound, NotAuthorized: what they say of it.
        :raises KafkaException: nobody answered; the next attempt waits longer.
        """
        asked = monotonic()
        try:
            found = self.get().list_topics(topic, timeout=self._look_for).topics[topic]
        except KafkaException:
            self._look_for = min(2 * self._look_for, _LONGEST_LOOK)
            raise
        self._look_for = _FIRST_LOOK
        if found.error is not None:
            raise translate(found.error, f"Publishing to {topic!r}")
        self._known[topic] = len(found.partitions), asked
        return len(found.partitions)


_TICK: Final = 0.001
_LONGEST_TICK: Final = 0.005
_IDLE: Final = 1.0
_PURGE: Final = 1.0
_BATCH: Final = 1_000_000  # the client's default
_STOPS: Final = frozenset({KafkaError._QUEUE_FULL, KafkaError._FATAL})
_UNKNOWN: Final = frozenset({KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})
_headers: Final = cast("Callable[[OutboundMessage], list[tuple[str, str | bytes | None]]]", encode_headers)
_NEW_TOPIC_MS: Final = 1000  # a topic may be unknown for so long; librdkafka's half a minute is for slow clusters


class ProducerThread(OwnerThread[ProducerClient]):
    """:param config: of librdkafka, as `KafkaSettings.client_config("producer")` makes it.

    :param window: the most messages without a report.
    :param timeout: seconds in which a message is given to the client, or fails; the client has its own after that.
    :param eager: send at once while nothing more waits, whatever `linger.ms` says.
    :param partitioner: chooses the partition of messages that name none; None leaves it to the client.
    :param changed: when topics were changed, as of `ProducerClient`.
    """

    _splits = True
    """Whether what a broker refuses with its batch is sent again."""

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
    ) -> None:
        super().__init__(name, Rebootstrapper(config))
        self._config: dict[str, Any] = {"topic.metadata.propagation.max.ms": _NEW_TOPIC_MS, **config}
        self._listener: Callable[[KafkaError], object] | None = self._config.pop("error_cb", None)
        self._window = window
        self._timeout = timeout
        self._eager = eager
        self._partitioner = partitioner
        self._changed: Mapping[str, float] = {} if changed is None else changed  # an empty one is filled later
        self._backlog: deque[PublishCall] = deque()
        self._ended_calls: list[PublishCall] = []
        self._trouble: KafkaError | None = None
        self._fatal: KafkaError | None = None
        self._reports = Reports(self._call_ended)
        self._splitting = Splitting(
            self._backlog.append,
            lambda call: self._ended_calls.append(call),
            lambda topic: not_sent(topic, self._timeout, self._trouble),
            batch=int(batch) if (batch := str(config.get("batch.size"))).isdecimal() else _BATCH,
        )
        self._wait = _TICK
        """How long to wait for reports; a command waits as long."""
        self._stop_by = self._purge_for = 0.0

    # -- for the loop --------------------------------------------------------------------------------------

    async def publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True, placed: bool = False
    ) -> Sequence[Outcome]:
        """Produce these in order; one entry each, None for a message that is on the broker and needs no receipt.

        A cancelled call goes on; its outcomes are dropped.

        :param placed: each is a key, a body and a partition, and nothing else, which goes the short way too.
        :raises Closed: the thread was stopped.
        """
        if not messages:
            return []
        waiter: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        refused = self._splitting.failed if self._splits else None
        deadline = monotonic() + self._timeout
        call = PublishCall(topic, messages, waiter, receipts=receipts, deadline=deadline, refused=refused)
        call.placed = placed and not receipts
        self.submit(lambda client: self._backlog.append(call))
        return await waiter

    async def stop(self, timeout: float) -> bool:
        """Deliver what is on the way for at most `timeout` seconds, fail the rest, and end the thread."""
        self._purge_for = min(_PURGE, timeout / 4)
        self._stop_by = monotonic() + timeout - 2 * self._purge_for
        return await super().stop(timeout)

    # -- the thread ----------------------------------------------------------------------------------------

    def _open(self) -> ProducerClient:
        client = ProducerClient(self._make, self._rebootstrapper, self._changed)
        client.get()
        return client

    def _make(self) -> Producer:
        try:
            return Producer({**with_oauth_token(self._config), "error_cb": self._heard})
        except (KafkaException, TypeError, ValueError) as error:
            raise configuration_error(error, "Opening a producer", self._config) from error

    def _turn(self, client: ProducerClient) -> None:
        if self._backlog:
            self._produce(client)
        if self._reports.missing or self._backlog:
            self._poll(client, self._wait, eager=self._eager and not self._backlog)
        else:
            self._serve(client, _IDLE)
            self._poll(client, 0.0)

    def _shut(self, client: ProducerClient) -> None:
        while (self._backlog or self._reports.missing) and monotonic() < self._stop_by:
            if self._backlog:
                self._produce(client)
            self._poll(client, _TICK, eager=True)
        self._give_up(client, Closed(f"{self._name} was closed before the message was sent"))

    # -- producing -----------------------------------------------------------------------------------------

    def _produce(self, client: ProducerClient) -> None:
        """Give the client what it has room for, page by page."""
        backlog, reports, splitting = self._backlog, self._reports, self._splitting
        while backlog:
            call = backlog[0]
            if splitting.topics and splitting.takes(call):
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
        """Produce the next messages of a call; False if the client takes no more for now."""
        try:
            producer = client.connect(call.topic)
            partitions = client.partitions(call.topic) if self._partitioner is not None else 0
        except (BrokerError, KafkaException) as error:
            return self._no_topic(call, error)
        run = call.following(min(room, PAGE))
        try:
            if not call.placed and (partitions or not run[0].plain):
                return self._produce_singly(client, producer, call, run, partitions)
            return self._produce_plain(client, producer, call, run)
        except Exception as error:
            # Whatever a message holds, it must not take the thread with it.
            logger.warning("%s: the client failed: %s", self._name, error, exc_info=True)
            self._fail_rest(call, translate(error, f"Publishing to {call.topic!r}"))
            return True

    def _produce_plain(
        self, client: ProducerClient, producer: Producer, call: PublishCall, run: Sequence[OutboundMessage]
    ) -> bool:
        """Produce plain or placed messages in one go; False if the client takes no more for now."""
        page: Page | Tally
        rows: list[dict[str, Any]]
        # The client heeds the partition of a batch, and that of no message.
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
            elif error.code() in _STOPS or (not queued and error.code() in _UNKNOWN):
                # From here on the client has taken none.
                return self._refused(client, call, error)
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
        """Produce messages of any kind one by one; False if the client takes no more for now."""
        page = self._reports.page(call, len(run))
        produce, topic, choose = producer.produce, call.topic, self._partitioner
        number = len(run)
        refusal: BaseException | None = None
        report = page.reports[0]
        try:
            for message, report in zip(run, page.reports, strict=False):
                partition = message.partition
                if partition is None:
                    partition = -1 if choose is None else choose_partition(choose, topic, message.key, partitions)
                produce(
                    topic,
                    message.data,
                    message.key,
                    partition,
                    on_delivery=report,
                    timestamp=encode_time(message),
                    headers=_headers(message),
                )
        except Exception as error:
            # Whatever a message holds, it must not take the thread with it.
            number, refusal = page.place_of(report), error
        call.next += number
        self._reports.accepted(page, call, number)
        if refusal is None:
            return True
        found = KafkaError(KafkaError._QUEUE_FULL) if isinstance(refusal, BufferError) else kafka_error(refusal)
        if found is not None:
            return self._refused(client, call, found, refusal)
        self._fail_next(call, refused_error(refusal, topic, call.messages[call.next]))
        return True

    def _refused(
        self, client: ProducerClient, call: PublishCall, error: KafkaError, told: BaseException | None = None
    ) -> bool:
        """The client did not take the call's next message; whether to go on. `told` may be what its caller gets."""
        code = error.code()
        if code == KafkaError._QUEUE_FULL and self._reports.missing:
            return False
        if code == KafkaError._FATAL:
            self._replace(client)
        elif code in _UNKNOWN and not call.looked_up:
            # The client asks about a topic again only after a while.
            try:
                client.look_up(call.topic)
                call.looked_up = True
            except (BrokerError, KafkaException) as failure:
                return self._no_topic(call, failure)
        else:
            own = told if isinstance(told, BrokerError) else None
            self._fail_next(call, own or self._translated(error, call, call.next))
        return True

    def _fail_next(self, call: PublishCall, error: BrokerError) -> None:
        """The message that the client did not take fails."""
        call.fail_next(error)
        if not call.left:
            self._call_ended(call)

    def _no_topic(self, call: PublishCall, error: BaseException) -> bool:
        """The topic could not be looked up; whether to go on with other calls."""
        failure = translate(error, f"Publishing to {call.topic!r}")
        if failure.retriable and monotonic() < call.deadline:
            return False
        self._fail_rest(call, failure)
        return True

    # -- reports -------------------------------------------------------------------------------------------

    def _poll(self, client: ProducerClient, wait: float, *, eager: bool = False) -> None:
        """Take reports; hand over the calls that have all of theirs."""
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
        if self._ended_calls:
            self._wait = _TICK
            self._hand_over()
        elif wait:
            self._wait = min(1.5 * wait, _LONGEST_TICK)

    def _call_ended(self, call: PublishCall) -> None:
        if not (self._splitting.topics and self._splitting.keeps(call)):
            self._ended_calls.append(call)

    def _hand_over(self) -> None:
        """Give the loop the outcomes of all calls that have ended, at once."""
        calls, self._ended_calls = self._ended_calls, []
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

    # -- ends ----------------------------------------------------------------------------------------------

    def _replace(self, client: ProducerClient) -> None:
        """Give up a client with a fatal error; the next message gets a new one."""
        if client.producer is not None:
            logger.warning("%s: a fatal error, going on with a new client: %s", self._name, self._fatal)
            self._drop_client(client)

    def _give_up(self, client: ProducerClient, reason: BrokerError) -> None:
        """Fail what has no outcome yet, and let go of the client."""
        self._drop_client(client)
        self._splitting.drain(self._reports, self._backlog)
        while self._backlog:
            self._fail_rest(self._backlog.popleft(), reason)
        self._hand_over()

    def _drop_client(self, client: ProducerClient) -> None:
        producer = client.drop()
        if producer is not None:
            if self._reports.missing:
                producer.purge(blocking=False)
            until = monotonic() + (self._purge_for or _PURGE)
            while self._reports.missing and monotonic() < until:
                try:
                    producer.poll(_TICK)
                except (KafkaException, SystemError):
                    continue  # the fatal error again, raised between the reports
        for call in self._reports.abandon():
            call.fail_unreported(unknown_outcome)
            if not call.left:
                self._call_ended(call)

    def _fail_rest(self, call: PublishCall, reason: BrokerError) -> None:
        """Those that the client was not given fail."""
        call.fail_rest(reason)
        if not call.left:
            self._call_ended(call)

    # -- what the client tells -----------------------------------------------------------------------------

    def _heard(self, error: KafkaError) -> None:
        """The client's `error_cb`, called from within a poll; it never raises."""
        if error.fatal():
            self._fatal = error
        else:
            self._trouble = error
        if self._listener is not None:
            self._listener(error)
