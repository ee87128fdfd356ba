"""Errors of codecs: why a payload does not encode, or bytes do not decode. Pure."""

from __future__ import annotations

from typing import Any, cast

from broker.errors import DecodeError, InvalidMessage

__all__ = ["not_encodable", "present", "reason_of"]


def reason_of(error: BaseException) -> str:
    """Why a value does not decode, in the words of its decoder and with the path of the field, in one line."""
    errors: Any = getattr(error, "errors", None)
    if callable(errors):
        found = cast("list[dict[str, Any]]", errors(include_url=False, include_context=False, include_input=False))
        first, *more = found
        place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
        text = str(first["msg"]) + (f" - at `${place}`" if place else "") + (f", and {len(more)} more" if more else "")
    else:
        text = str(error)
    return " ".join(text.split())


def present(codec: object, data: bytes | None) -> bytes:
    """:param codec: or its name; shown only if the message is a tombstone."""
    if data is None:
        raise DecodeError(
            f"{codec} cannot decode a tombstone (a message without data)",
            advice="Consume without a codec, or with Json(T | None)",
        )
    return data


def not_encodable(codec: str, payload: object, error: BaseException | None = None) -> InvalidMessage:
    detail = f": {reason_of(error)}" if error is not None else ""
    return InvalidMessage(
        f"{codec} cannot encode a payload of type {type(payload).__name__}{detail}",
        native=error,
        advice="Publish a payload of the codec's type, or open the topic with another codec",
    )
