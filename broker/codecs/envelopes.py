"""How publishers and consumers call a codec: a `Codec` with the body, an `EnvelopeCodec` with the whole message."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, overload

from broker.codecs.errors import not_encodable
from broker.errors import BrokerError, InvalidMessage
from broker.outbound import OutboundMessage
from broker.protocols import AnyCodec, EnvelopeCodec, PreparesBatches

__all__ = ["Decoder", "Preparation", "decoder_of", "pack", "preparation_of"]

Decoder = Callable[[Any], Any]
Preparation = Callable[[Sequence[Any]], Coroutine[Any, Any, None]]


def pack(codec: EnvelopeCodec[Any], payload: Any, fields: OutboundMessage, topic: str) -> OutboundMessage:
    """The message of a payload.

    :param fields: those that the caller gave, without a body.
    :raises InvalidMessage: the codec failed.
    """
    try:
        message = codec.pack(payload, fields, topic)
    except BrokerError:
        raise
    except Exception as error:
        raise not_encodable(repr(codec), payload, error) from error
    if type(message) is not OutboundMessage:
        raise InvalidMessage(
            f"{codec!r}.pack returned an object of type {type(message).__name__}",
            advice="It returns message.replace(data=..., attributes=...)",
        )
    return message


@overload
def decoder_of(codec: AnyCodec[Any]) -> tuple[Decoder, bool]: ...
@overload
def decoder_of(codec: AnyCodec[Any] | None) -> tuple[Decoder | None, bool]: ...
def decoder_of(codec: AnyCodec[Any] | None) -> tuple[Decoder | None, bool]:
    """The function that makes payloads, and whether it takes messages; else it takes their bodies."""
    if isinstance(codec, EnvelopeCodec):
        return codec.unpack, True
    return (None if codec is None else codec.decode), False


def preparation_of(codec: object) -> Preparation | None:
    """`prepare` of the codec, if it has one."""
    return codec.prepare if isinstance(codec, EnvelopeCodec) and isinstance(codec, PreparesBatches) else None
