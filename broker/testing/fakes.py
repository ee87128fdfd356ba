"""Messages and records without a broker, for unit tests of handlers and for fakes of the protocols.

A message settles itself: `state` and `outcome` show how, and settling it differently raises, as on a broker. It has no
lease, so it never expires; `extend` and `commit` do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final, overload

import msgspec
from typing_extensions import TypeVar

from broker.checks import is_async
from broker.codecs.envelopes import decoder_of, pack
from broker.hooks import Hooks
from broker.messages import Message, MessageBatch
from broker.outbound import OutboundMessage
from broker.protocols import AnyCodec, BatchHandler, EnvelopeCodec, Handler
from broker.records import Record
from broker.threads.plain_handlers import ThreadedHandler
from broker.threads.portal import Portal

__all__ = ["call_handler", "make_message", "make_record"]

T = TypeVar("T")

_numbers: Final = count(1)


class _Received(msgspec.Struct, eq=False):
    """The raw message of the fake broker."""

    outbound: OutboundMessage
    id: str
    time: datetime
    attempt: int | None = None


class _ReceivedView:
    __slots__ = ()

    def id(self, raw: _Received, /) -> str:
        return raw.id

    def given_id(self, raw: _Received, /) -> str | None:
        return raw.outbound.id

    def key(self, raw: _Received, /) -> bytes | None:
        return raw.outbound.key

    def attributes(self, raw: _Received, /) -> Mapping[str, str]:
        return raw.outbound.attributes

    def publish_time(self, raw: _Received, /) -> datetime | None:
        return raw.outbound.publish_time or raw.time

    def broker_time(self, raw: _Received, /) -> datetime | None:
        return raw.time

    def delivery_attempt(self, raw: _Received, /) -> int | None:
        return raw.attempt

    def native(self, raw: _Received, /) -> OutboundMessage:
        return raw.outbound


_VIEW: Final = _ReceivedView()


@overload
def make_message(
    payload: bytes | OutboundMessage | None,
    *,
    key: bytes | str | None = None,
    attributes: Mapping[str, str] | None = None,
    topic: str = "fake-topic",
    delivery_attempt: int = 1,
) -> Message[bytes]: ...
@overload
def make_message(
    payload: T | OutboundMessage,
    *,
    codec: AnyCodec[T],
    key: bytes | str | None = None,
    attributes: Mapping[str, str] | None = None,
    topic: str = "fake-topic",
    delivery_attempt: int = 1,
) -> Message[T]: ...
def make_message(
    payload: Any,
    *,
    codec: AnyCodec[Any] | None = None,
    key: bytes | str | None = None,
    attributes: Mapping[str, str] | None = None,
    topic: str = "fake-topic",
    delivery_attempt: int = 1,
) -> Message[Any]:
    """A message as a consumer delivers it.

    :param payload: the published payload: bytes, an object for the codec, or an `OutboundMessage`.
    :param codec: encodes the payload, and decodes it into `message.payload`.
    :raises InvalidMessage: the message is invalid.
    """
    raw = _received(payload, codec, key, attributes, topic)
    raw.attempt = delivery_attempt
    message: Message[Any] = Message(topic, raw.outbound.data, raw, _VIEW)
    if codec is not None:
        message.decoded = _decoded(codec, message)
    return message


@overload
def make_record(
    payload: bytes | OutboundMessage | None,
    *,
    key: bytes | str | None = None,
    attributes: Mapping[str, str] | None = None,
    topic: str = "fake-topic",
    partition: int = 0,
    offset: int = 0,
) -> Record[bytes]: ...
@overload
def make_record(
    payload: T | OutboundMessage,
    *,
    codec: AnyCodec[T],
    key: bytes | str | None = None,
    attributes: Mapping[str, str] | None = None,
    topic: str = "fake-topic",
    partition: int = 0,
    offset: int = 0,
) -> Record[T]: ...
def make_record(
    payload: Any,
    *,
    codec: AnyCodec[Any] | None = None,
    key: bytes | str | None = None,
    attributes: Mapping[str, str] | None = None,
    topic: str = "fake-topic",
    partition: int = 0,
    offset: int = 0,
) -> Record[Any]:
    """A record as a consumer delivers it. Parameters as for `make_message`.

    :raises InvalidMessage: the record is invalid.
    """
    raw = _received(payload, codec, key, attributes, topic)
    record: Record[Any] = Record(topic, partition, offset, raw.outbound.key, raw.outbound.data, raw, _VIEW)
    if codec is not None:
        record.decoded = _decoded(codec, record)
    return record


def _decoded(codec: AnyCodec[Any], envelope: Message[Any] | Record[Any]) -> Any:
    decode, takes_envelope = decoder_of(codec)
    return decode(envelope if takes_envelope else envelope.data)


def _received(
    payload: Any,
    codec: AnyCodec[Any] | None,
    key: bytes | str | None,
    attributes: Mapping[str, str] | None,
    topic: str,
) -> _Received:
    if isinstance(payload, OutboundMessage):
        pass
    elif isinstance(codec, EnvelopeCodec):
        payload = pack(codec, payload, OutboundMessage(None, key, attributes), topic)
    else:
        payload = OutboundMessage(payload if codec is None else codec.encode(payload), key, attributes)
    return _Received(payload, payload.id or f"fake-{next(_numbers)}", datetime.now(UTC))


@overload
async def call_handler(handler: Handler[T], given: Message[T]) -> None: ...
@overload
async def call_handler(handler: BatchHandler[T], given: MessageBatch[T]) -> Sequence[BaseException | None] | None: ...
async def call_handler(handler: Any, given: Any) -> Any:
    """Call a handler with a message or a batch, as `receive` and `receive_batches` do: a plain one in a thread.

    Settles nothing. For tests of handlers, and for fakes of `Receiver` and `BatchedReceiver`.

    :return: the result of a handler of batches.
    :raises Exception: what the handler raised.
    """
    by_batch: bool = isinstance(given, MessageBatch)
    if is_async(handler):
        result = await handler(given)
    else:
        with closing(ThreadedHandler[Any](handler, Portal.to_running_loop(), Hooks())) as plain:
            handle: Any = plain.handle_batch if by_batch else plain.handle
            result = await handle(given)
    return result if by_batch else None
