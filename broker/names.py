"""Portable names of topics, subscriptions and groups; pure functions, safe from any thread."""

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
"""The subscription of a dead-letter topic that redrives read."""

_PORTABLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{2,199}")

_UNSENDABLE: Final = re.compile(r"[\0\ud800-\udfff]")
"""A client in C would take a name for one that ends before the NUL, and act on that."""


class NativeName(str):
    """A name in the broker's own form, passed to the server as it is."""

    __slots__ = ()


class Ephemeral:
    """The subscription that each consumer gets for itself; it is deleted by the broker after its close."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ephemeral()"


EPHEMERAL: Final = Ephemeral()


def ephemeral() -> Ephemeral:
    """Ask for a subscription or group of this consumer's own, which goes with it.

    It begins where `start` says, like any new one: with all that the topic has, unless told otherwise.
    """
    return EPHEMERAL


def native_name(name: str) -> NativeName:
    """Mark a name as the broker's own, so that no portable rule is applied to it.

    :raises InvalidName: the name is empty or no str, or no broker can have it.
    """
    _check_type(name, "native")
    if not name:
        raise InvalidName("A native name is empty", advice="Give the name the broker uses")
    if _UNSENDABLE.search(name):
        raise InvalidName(
            f"The native name {name!r} has a NUL or a lone surrogate", advice="Give the name the broker uses"
        )
    return NativeName(name)


def known_name(name: str) -> str:
    """The name of something that exists already: one that is not portable is the broker's own.

    :raises InvalidName: no broker can have it.
    """
    return name if isinstance(name, NativeName) or _PORTABLE.fullmatch(name) else native_name(name)


def check_name(name: str, what: str) -> str:
    """Return the name if it is portable or native.

    :param what: what the name is of, for the error: 'topic', 'subscription', 'group'.
    :raises InvalidName: it is neither, or no str.
    """
    _check_type(name, what)
    if isinstance(name, NativeName) or _PORTABLE.fullmatch(name):
        return name
    raise InvalidName(f"{what} name {name!r} is not portable")


def _check_type(name: object, what: str) -> None:
    if not isinstance(name, str):
        raise InvalidName(f"{what} name is {name!r} of type {type(name).__name__}", advice="It takes a str")
