"""`TopicFacade`, the type of `bus.topic(name)`: publishes one message, a batch, or through the pipeline.

*Concurrency.* Tasks of one event loop may share a topic. Messages of a key are published in the order of the calls:
`publish` and `publish_batch` first wait for the messages that were enqueued before.

*Cancellation.* A cancelled `publish` may have published. An `enqueue` that is cancelled while it waits queues nothing.

*Failure.* Limits and capabilities of the backend are checked before anything is sent. `publish` and `publish_batch` try
once; the pipeline of `enqueue` retries retriable failures. A message that cannot be sent does not fail the rest of its
batch. The first message that the broker drops as a duplicate is logged, for callers that look at no receipt.

The backend sets the publish time of a message without one while it encodes the message. There it costs one look at the
clock per batch; here it would cost a copy of each message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from time import perf_counter
from typing import Any, Final, Generic, Literal, cast, overload

from typing_extensions import TypeVar

from broker.capabilities import Capabilities
from broker.codecs.envelopes import pack
from broker.driver.concurrency import check_loop
from broker.driver.contract import PublishTarget
from broker.driver.limits import MessageLimits
from broker.errors import BackendError, BrokerError, Closed, InvalidMessage, PublishError
from broker.hooks import Hooks, PublishCall, Published, logger
from broker.outbound import OutboundMessage, OutboundPayload, check_batch, check_no_fields
from broker.protocols import AnyCodec, EnvelopeCodec
from broker.publishing.outgoing import outcome_of
from broker.publishing.pipeline import PipelineSettings, PublishingPipeline
from broker.receipts import Receipt, count_duplicates

__all__ = ["TopicFacade", "codec_key"]


T = TypeVar("T", default=bytes)

_DEFAULT_PIPELINE: Final = PipelineSettings()

_Publish = Callable[[Sequence[OutboundMessage]], Awaitable[Sequence[Receipt | BrokerError | None]]]


def codec_key(codec: object) -> object:
    """The identity of a codec: equal codecs are one; a codec without a hash is only itself."""
    try:
        hash(codec)
    except TypeError:
        return id(codec)
    return codec


class TopicFacade(Generic[T]):
    """A topic to publish to; created by `bus.topic`, without I/O.

    :param target_factory: opens the publish target at the first publish.
    :param codec: turns payloads into bytes; None takes bytes as they are.
    :param pipeline: the bounds of `enqueue`.
    :param on_close: called once the topic has closed, after its flush.
    """

    __slots__ = (
        "__weakref__",
        "_able",
        "_calls",
        "_check",
        "_closed",
        "_closing",
        "_codec",
        "_duplicates_logged",
        "_encode",
        "_hooks",
        "_idle",
        "_interceptors",
        "_limits",
        "_loop",
        "_on_close",
        "_pipeline",
        "_pipeline_settings",
        "_target",
        "_target_factory",
        "name",
    )

    def __init__(
        self,
        name: str,
        target_factory: Callable[[], PublishTarget],
        codec: AnyCodec[T] | None,
        capabilities: Capabilities,
        hooks: Hooks,
        *,
        pipeline: PipelineSettings = _DEFAULT_PIPELINE,
        on_close: Callable[[TopicFacade[Any]], object] | None = None,
    ) -> None:
        self.name: Final = name
        self._target_factory = target_factory
        self._codec = codec if isinstance(codec, EnvelopeCodec) else None
        self._encode: Callable[[Any], bytes | None] | None = (
            None if codec is None or isinstance(codec, EnvelopeCodec) else codec.encode
        )
        self._able = capabilities.publish
        self._limits = MessageLimits(capabilities)
        self._check = self._limits.check
        self._hooks = hooks
        self._interceptors = hooks.publishing
        self._pipeline_settings = pipeline
        self._on_close = on_close
        self._pipeline: PublishingPipeline | None = None
        self._target: PublishTarget | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the first publish."""
        self._calls = 0
        self._idle: asyncio.Future[None] | None = None
        self._duplicates_logged = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether the topic has closed, after its flush; `bus.topic` then returns a new one."""
        return self._closing is not None and self._closing.done()

    async def publish(
        self,
        payload: T | OutboundMessage | OutboundPayload[T],
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Publish one message; return when the broker has stored it. A cancelled call may have published.

        :param payload: what the codec of the topic encodes, an `OutboundPayload` of it, or an `OutboundMessage`.
        :param key: the key of a payload, like the other fields; an outbound payload or message has its own.
        :raises InvalidMessage, MessageTooLarge, Unsupported: the broker cannot carry the message; nothing was sent.
        :raises TopicNotFound: the topic does not exist.
        :raises OperationTimeout: no answer in time; the message may be on the broker.
        :raises BrokerError: the message was not published.
        :raises Closed: the topic was closed before the call.
        """
        check_loop(self._loop)
        target = self._target or self._open()
        if type(payload) is OutboundMessage and (key is attributes is id is deliver_at is ttl is partition is None):
            message = payload
        else:
            message = self._outbound(payload, key, attributes, id, deliver_at, ttl, partition)
        # Not a coroutine of its own, which would cost as much as everything else but the round trip.
        call = PublishCall(self._interceptors, self.name, (message,)) if self._interceptors else None
        try:
            if call is not None:
                (message,) = call.messages
            self._check(message)
            if self._pipeline is not None and self._pipeline.messages and message.key is not None:
                await self._pipeline.drain()
            # The same as `_call`, for the same reason.
            self._calls += 1
            try:
                if self._hooks.hears_publishes:
                    outcomes = await self._call_observed(target.publish, (message,))
                else:
                    outcomes = await target.publish((message,))
            finally:
                self._calls -= 1
                if self._idle is not None:
                    self._report_idle(self._idle)
            if len(outcomes) != 1:
                raise _wrong_number(outcomes, 1)
            outcome = cast("Receipt | BrokerError", outcomes[0])
            if isinstance(outcome, BrokerError):
                raise outcome
        except BaseException as error:
            if call is not None:
                call.end((error,))
            raise
        if call is not None:
            call.end((outcome,))
        if outcome.duplicate:
            self._log_duplicates(outcomes)
        return outcome

    @overload
    async def publish_batch(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: Literal[True] = True
    ) -> list[Receipt]: ...
    @overload
    async def publish_batch(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: Literal[False]
    ) -> None: ...
    @overload
    async def publish_batch(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: bool
    ) -> list[Receipt] | None: ...
    async def publish_batch(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: bool = True
    ) -> list[Receipt] | None:
        """Publish many messages, in order per key; return their receipts in the order of the payloads.

        :param receipts: False returns None, which is faster on some brokers.
        :raises PublishError: some messages failed, the others are on the broker; `outcomes` has the result of each.
        :raises InvalidMessage: `payloads` is not a list of messages; nothing was sent.
        :raises BrokerError: nothing was sent, for instance because the topic does not exist.
        :raises Closed: the topic was closed before the call.
        """
        outcomes = await self._send_many(payloads, receipts=receipts)
        if receipts:
            found = [outcome for outcome in outcomes if isinstance(outcome, Receipt)]
            if len(found) < len(payloads):
                raise PublishError(outcomes)
            return found
        if outcomes.count(None) < len(outcomes) and any(isinstance(outcome, BrokerError) for outcome in outcomes):
            raise PublishError(outcomes)
        return None

    async def enqueue(
        self,
        payload: T | OutboundMessage | OutboundPayload[T],
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[Receipt]:
        """Queue one message for publishing; return a future of its receipt. Waits while the queue is full.

        Messages of a key are published in the order of the calls. A call cancelled while it waits for room queues
        nothing; cancelling the future does not withdraw the message. `flush` and `close` raise the failures of futures
        that were not looked at.

        :raises InvalidMessage, MessageTooLarge, Unsupported: the broker cannot carry the message; nothing was queued.
        :raises Closed: the topic was closed before the message was queued.
        """
        check_loop(self._loop)
        target = self._target or self._open()
        if type(payload) is OutboundMessage and (key is attributes is id is deliver_at is ttl is partition is None):
            message = payload
        else:
            message = self._outbound(payload, key, attributes, id, deliver_at, ttl, partition)
        if self._interceptors:
            return await self._enqueue_intercepted(message, target)
        pipeline = self._pipeline or self._open_pipeline(target)
        if message.plain and (future := pipeline.put_plain(message)) is not None:
            return future
        size = self._check(message)
        return pipeline.put_now(message, size) or await pipeline.put(message, size)

    async def flush(self) -> None:
        """Wait until all queued messages are on the broker.

        :raises PublishError: some messages failed, and their futures were not looked at.
        """
        check_loop(self._loop)
        if self._pipeline is not None:
            await self._pipeline.flush()

    async def close(self, timeout: float = 30.0) -> None:
        """Flush, wait for running calls, and close. May be called twice, even concurrently; cancelling the caller does
        not stop the close.

        :param timeout: seconds for the flush and the calls; unsent messages then fail.
        :raises PublishError: some messages failed, and their futures were not looked at.
        """
        check_loop(self._loop)
        if self._closing is None:
            self._closed = True
            target, self._target = self._target, None
            closing = self._close(target, timeout)
            self._closing = asyncio.get_running_loop().create_task(closing, name="broker-topic-close")
            if self._on_close is not None:
                on_close = self._on_close
                self._closing.add_done_callback(lambda _: on_close(self))
        elif self._closing.done():
            return
        await asyncio.shield(self._closing)

    async def _close(self, target: PublishTarget | None, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            if self._pipeline is not None:
                await self._pipeline.close(timeout)
        finally:
            try:
                await self._wait_idle(max(0.0, deadline - loop.time()))
            finally:
                if target is not None:
                    await target.close()

    def _open(self) -> PublishTarget:
        if self._closed:
            raise Closed(
                f"Topic {self.name!r} is closed",
                advice="Call bus.topic again; it returns a new topic once this one has flushed",
            )
        self._target = self._target_factory()
        self._loop = asyncio.get_running_loop()
        return self._target

    def _open_pipeline(self, target: PublishTarget) -> PublishingPipeline:
        send = partial(self._send, target)
        self._pipeline = PublishingPipeline(send, self._pipeline_settings, self._limits, self._able)
        return self._pipeline

    async def _enqueue_intercepted(self, message: OutboundMessage, target: PublishTarget) -> asyncio.Future[Receipt]:
        """Queue a message; its interceptors are left when it has its outcome."""
        with ExitStack() as stack:
            call = stack.enter_context(PublishCall(self._interceptors, self.name, (message,)))
            (message,) = call.messages
            pipeline = self._pipeline or self._open_pipeline(target)
            size = self._check(message)
            future = pipeline.put_now(message, size) or await pipeline.put(message, size)
            later = stack.pop_all()

        def ended(done: asyncio.Future[Receipt]) -> None:
            with later:
                call.outcomes = (outcome_of(done),)

        future.add_done_callback(ended)
        return future

    def _outbound(
        self,
        payload: T | OutboundMessage | OutboundPayload[T],
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> OutboundMessage:
        if isinstance(payload, (OutboundMessage, OutboundPayload)):
            message = cast("OutboundMessage | OutboundPayload[Any]", payload)
            check_no_fields(
                message, key=key, attributes=attributes, id=id, deliver_at=deliver_at, ttl=ttl, partition=partition
            )
            if isinstance(message, OutboundMessage):
                return message
            if self._codec is not None:
                return pack(self._codec, message.payload, message.encoded(None), self.name)
            return message.encoded(self._body(message.payload))
        if self._codec is not None:
            fields = OutboundMessage(None, key, attributes, id, deliver_at, ttl, partition)
            return pack(self._codec, payload, fields, self.name)
        return OutboundMessage(self._body(payload), key, attributes, id, deliver_at, ttl, partition)

    def _body(self, payload: Any) -> bytes | None:
        return payload if self._encode is None else _encoded(self._encode, payload)

    async def _send_many(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: bool
    ) -> Sequence[Receipt | BrokerError | None]:
        """Send the messages that can be sent; return the outcome of each payload."""
        check_loop(self._loop)
        target = self._target or self._open()
        check_batch(payloads)
        messages, unmade = self._made(payloads)
        if self._interceptors and messages:
            outcomes = await self._send_intercepted(target, messages, receipts=receipts)
        else:
            outcomes = await self._send_checked(target, messages, receipts=receipts)
        return _merged(outcomes, unmade)

    def _made(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]]
    ) -> tuple[list[OutboundMessage], dict[int, BrokerError]]:
        """The messages that can be made, and by index the errors of the others."""
        messages: list[Any] = list(payloads)
        unmade: dict[int, BrokerError] = {}
        for index, payload in enumerate(messages):
            if type(payload) is not OutboundMessage:
                try:
                    messages[index] = self._outbound(payload)
                except BrokerError as error:
                    unmade[index] = error
        if unmade:
            messages = [message for index, message in enumerate(messages) if index not in unmade]
        return messages, unmade

    async def _send_intercepted(
        self, target: PublishTarget, messages: Sequence[OutboundMessage], *, receipts: bool
    ) -> Sequence[Receipt | BrokerError | None]:
        with PublishCall(self._interceptors, self.name, messages) as call:
            outcomes = call.outcomes = await self._send_checked(target, call.messages, receipts=receipts)
        return outcomes

    async def _send_checked(
        self, target: PublishTarget, messages: Sequence[OutboundMessage], *, receipts: bool
    ) -> Sequence[Receipt | BrokerError | None]:
        """Send the messages that the broker can carry; return the outcome of each."""
        refused = self._limits.refused(messages)
        if refused:
            messages = [message for index, message in enumerate(messages) if index not in refused]
        outcomes: Sequence[Receipt | BrokerError | None] = ()
        if messages:
            if self._pipeline is not None and self._pipeline.messages:
                await self._pipeline.drain()
            outcomes = await (
                self._send(target, messages) if receipts else self._send_without_receipts(target, messages)
            )
        return _merged(outcomes, refused)

    async def _send(
        self, target: PublishTarget, messages: Sequence[OutboundMessage]
    ) -> Sequence[Receipt | BrokerError]:
        """Send with receipts."""
        return cast("Sequence[Receipt | BrokerError]", await self._call(target.publish, messages))

    async def _send_without_receipts(
        self, target: PublishTarget, messages: Sequence[OutboundMessage]
    ) -> Sequence[Receipt | BrokerError | None]:
        """Send without receipts."""
        return await self._call(partial(target.publish, receipts=False), messages)

    async def _call(
        self, publish: _Publish, messages: Sequence[OutboundMessage]
    ) -> Sequence[Receipt | BrokerError | None]:
        self._calls += 1
        try:
            if self._hooks.hears_publishes:
                outcomes = await self._call_observed(publish, messages)
            else:
                outcomes = await publish(messages)
        finally:
            self._calls -= 1
            if self._idle is not None:
                self._report_idle(self._idle)
        if len(outcomes) != len(messages):
            raise _wrong_number(outcomes, len(messages))
        if self._able.reports_duplicates and not self._duplicates_logged:
            self._log_duplicates(outcomes)
        return outcomes

    def _log_duplicates(self, outcomes: Sequence[Receipt | BrokerError | None]) -> None:
        """Log the first messages of the topic that the broker dropped as duplicates; receipts and metrics have all."""
        number = count_duplicates(outcomes)
        if number and not self._duplicates_logged:
            self._duplicates_logged = True
            logger.warning(
                "The broker dropped %d of %d messages published to topic %r, because it already had their ids. "
                "Publish a copy that it must keep without the id: message.replace(id=None). This is logged once",
                number,
                len(outcomes),
                self.name,
            )

    async def _call_observed(
        self, publish: _Publish, messages: Sequence[OutboundMessage]
    ) -> Sequence[Receipt | BrokerError | None]:
        started = perf_counter()
        outcomes: Sequence[Receipt | BaseException | None] = ()
        try:
            answers = outcomes = await publish(messages)
        except BaseException as error:
            outcomes = [error] * len(messages)
            raise
        finally:
            self._hooks.emit(Published(topic=self.name, outcomes=outcomes, seconds=perf_counter() - started))
        return answers

    def _report_idle(self, idle: asyncio.Future[None]) -> None:
        if not self._calls and not idle.done():
            idle.set_result(None)

    async def _wait_idle(self, timeout: float) -> None:
        """Wait for running calls, at most `timeout` seconds."""
        if self._calls:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._idle,), timeout=timeout)


def _merged(
    outcomes: Sequence[Receipt | BrokerError | None], refused: Mapping[int, BrokerError]
) -> Sequence[Receipt | BrokerError | None]:
    """The outcomes of what was sent, and by index the errors of the others."""
    if not refused:
        return outcomes
    rest = iter(outcomes)
    return [refused[index] if index in refused else next(rest) for index in range(len(outcomes) + len(refused))]


def _wrong_number(outcomes: Sequence[object], wanted: int) -> BackendError:
    return BackendError(f"The backend returned {len(outcomes)} outcomes for {wanted} messages")


def _encoded(encode: Callable[[Any], bytes | None], payload: object) -> bytes | None:
    try:
        return encode(payload)
    except BrokerError:
        raise
    except Exception as error:
        raise InvalidMessage(
            f"The codec cannot encode a payload of type {type(payload).__name__}: {error}",
            native=error,
            advice="Publish a payload of the codec's type",
        ) from error
