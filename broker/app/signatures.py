"""What a handler takes and returns, read from its annotations when it is registered. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from broker.app.context import BlockingContext, Context
from broker.checks import is_async, name_of
from broker.codecs import Json, Protobuf, Text, is_protobuf
from broker.errors import ConfigurationError
from broker.outbound import OutboundMessage, OutboundPayload
from broker.protocols import AnyCodec

__all__ = ["Signature", "read_signature"]

_EMPTY = inspect.Parameter.empty
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """How to call a handler.

    :ivar codec: of its payload, an `AnyCodec`; None is bytes.
    :ivar context: the parameter that gets the context; None if there is none.
    :ivar is_async: False if the handler runs in a thread.
    :ivar returns: whether what it returns is published.
    :ivar result_codec: of that; None is bytes.
    """

    codec: Any
    context: str | None
    is_async: bool
    returns: bool
    result_codec: Any


def read_signature(
    function: Callable[..., Any], codec: AnyCodec[Any] | None, into: str | None, into_codec: AnyCodec[Any] | None
) -> Signature:
    """Read it.

    :param codec: decides about the payload in place of the annotation.
    :param into: the topic of results.
    :param into_codec: decides about results in place of the annotation.
    :raises ConfigurationError: the function cannot be a handler; says which parameter is wrong, and what to write.
    """
    name = name_of(function)
    if not callable(function):
        raise ConfigurationError(f"The handler is {function!r}", advice="It takes a function: app.handle(topic, bill)")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"Handler {name} yields", advice="Return one value, or publish with the context")
    hints = _hints(function, name)
    payload, context = _parameters(function, name, hints)
    awaited = is_async(function)
    if context is not None:
        wanted = Context if awaited else BlockingContext
        if (get_origin(hints[context]) or hints[context]) is not wanted:
            how = "is `async def`" if awaited else "runs in a thread"
            raise ConfigurationError(f"Handler {name} {how}", advice=f"Annotate {context}: {wanted.__name__}[State]")
    if codec is None:
        if payload not in hints:
            raise ConfigurationError(
                f"Parameter {payload} of handler {name} has no type", advice=f"Annotate it: {payload}: Order, or bytes"
            )
        codec = _codec_of(hints[payload], f"Parameter {payload} of handler {name}")
    returned = _returned(hints.get("return", _EMPTY))
    if into is None:
        if returned is not None:
            raise ConfigurationError(
                f"Handler {name} returns {_shown(returned)}, which goes nowhere",
                advice="Give into= a topic, or annotate it with -> None",
            )
        return Signature(codec, context, awaited, False, None)
    if into_codec is None:
        if returned is None:
            raise ConfigurationError(
                f"Handler {name} has into={into!r}, and returns nothing by its annotation",
                advice="Annotate what it returns: -> Invoice | None",
            )
        into_codec = _codec_of(returned, f"The result of handler {name}")
    return Signature(codec, context, awaited, True, into_codec)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target)
    except Exception as error:
        raise ConfigurationError(
            f"The annotations of handler {name} cannot be read: {error}",
            native=error,
            advice="Import the types at run time, not under TYPE_CHECKING",
        ) from error


def _parameters(function: Callable[..., Any], name: str, hints: dict[str, Any]) -> tuple[str, str | None]:
    """The names of the parameters for payload and context."""
    payload: str | None = None
    context: str | None = None
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name)
        if (get_origin(hint) or hint) in (Context, BlockingContext):
            if context is not None:
                raise ConfigurationError(f"Handler {name} has two contexts", advice="Leave one out")
            if parameter.kind not in _BY_KEYWORD:
                raise ConfigurationError(
                    f"Parameter {parameter.name} of handler {name} cannot be given by name", advice="Remove the /"
                )
            context = parameter.name
        elif payload is None and parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            payload = parameter.name
        elif parameter.default is _EMPTY and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            raise ConfigurationError(
                f"Parameter {parameter.name} of handler {name} gets no value",
                advice="A handler takes a payload and, if it wants, a Context; put the rest into the state",
            )
    if payload is None:
        raise ConfigurationError(
            f"Handler {name} takes no payload", advice="Write it as async def bill(order: Order) -> None"
        )
    return payload, context


def _codec_of(hint: Any, what: str) -> AnyCodec[Any] | None:
    """The codec of a type: None for bytes, text, Protobuf, else JSON."""
    if hint in (bytes, bytes | None):
        return None
    if hint is str:
        return Text()
    if is_protobuf(hint):
        return Protobuf(hint)
    try:
        return Json(hint)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{what} is {_shown(hint)}: {error.message}",
            native=error,
            advice="Give a codec for it: codec= or into_codec=",
        ) from error


def _returned(hint: Any) -> Any:
    """What is published of the returned type; None if nothing is."""
    if hint in (_EMPTY, None, NoneType):
        return None
    if get_origin(hint) in (Union, UnionType):
        rest = [each for each in get_args(hint) if each is not NoneType]
        if len(rest) < len(get_args(hint)):
            hint = Union[tuple(rest)]  # noqa: UP007 - of a computed list
    if get_origin(hint) is OutboundPayload:
        return get_args(hint)[0]
    return bytes if hint is OutboundMessage else hint


def _shown(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint)
