"""Names of topics, subscriptions and groups. Pure functions, safe from any thread."""

from __future__ import annotations

import re
from typing import Final

from broker.errors import InvalidName

__all__ = [
    "EPHEMERAL",
    "REDRIVE_SUBSCRIPTION",
    "Ephemeral",
    "NativeName",
    "check_name",
    "ephemeral",
    "known_name",
    "native_name",
]

REDRIVE_SUBSCRIPTION: Final = "anybroker-redrive"
"""The subscription that redrives use on a dead-letter topic."""

_PORTABLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{2,199}")

_UNSENDABLE: Final = re.compile(r"[\0\ud800-\udfff]")
"""A client written in C would use the part of the name before the NUL."""


class NativeName(str):
    """A name in the broker's own form, sent to the server unchanged."""

    __slots__ = ()


class Ephemeral:
    """A subscription or group of one consumer, which the broker deletes after the close; see `ephemeral()`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ephemeral()"


EPHEMERAL: Final = Ephemeral()


def ephemeral() -> Ephemeral:
    """Request a subscription or group for this consumer only, deleted after the close.

    As every new subscription it begins at `start`, by default with the earliest message of the topic.
    """
    return EPHEMERAL


def native_name(name: str) -> NativeName:
    """Mark a name as the broker's own; it need not be portable.

    :raises InvalidName: the name is not a str, is empty, or contains a NUL or a lone surrogate.
    """
    _check_type(name, "native")
    if not name:
        raise InvalidName("The native name is empty", advice="Pass the broker's own name")
    if _UNSENDABLE.search(name):
        raise InvalidName(
            f"The native name {name!r} contains a NUL or a lone surrogate", advice="Pass the broker's own name"
        )
    return NativeName(name)


def known_name(name: str) -> str:
    """A name of something that exists: a name that is not portable becomes a native name.

    :raises InvalidName: the name is invalid even as a native name.
    """
    return name if isinstance(name, NativeName) or _PORTABLE.fullmatch(name) else native_name(name)


def check_name(name: str, what: str) -> str:
    """Return the name if it is portable or native.

    :param what: the kind of name, for the error: 'topic', 'subscription' or 'group'.
    :raises InvalidName: the name is neither portable nor native, or not a str.
    """
    _check_type(name, what)
    if isinstance(name, NativeName) or _PORTABLE.fullmatch(name):
        return name
    raise InvalidName(f"{what} name {name!r} is not portable")


def _check_type(name: object, what: str) -> None:
    if not isinstance(name, str):
        raise InvalidName(f"{what} name is {name!r} of type {type(name).__name__}", advice="It takes a str")
