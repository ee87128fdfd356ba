"""Portable names as names of Service Bus entities, one to one, and the paths of entities. Pure functions.

Names of Service Bus are case-insensitive and end in a letter or digit. A topic that is lower case and ends so keeps its
name; any other becomes `<name>/_<hex>`: the hexadecimal digits are a bit mask of its upper-case letters. No portable
name has a slash. A subscription's name has at most 50 characters: a longer one, one with upper case or with another end
becomes `anybroker-` and a digest, and the user metadata of the subscription stores the name.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple

from broker import InvalidName
from broker.driver import NativeName, check_name

__all__ = [
    "QUEUE",
    "EntityPath",
    "entity_name",
    "needs_metadata",
    "split_path",
    "subscription_name",
    "topic_of",
]

QUEUE: Final = "queue"
"""The name of a queue's only subscription."""
_DEAD_LETTERS: Final = "/$deadletterqueue"
_SUBSCRIPTIONS: Final = "/subscriptions/"

_SUFFIX: Final = re.compile(r"/_[0-9a-f]+$")
_DIGEST: Final = "anybroker-"
_LONGEST_SUBSCRIPTION: Final = 50
_NATIVE_SUBSCRIPTION: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,48}[A-Za-z0-9])?")


class EntityPath(NamedTuple):
    """What a receiver reads from.

    :ivar entity: the queue or topic.
    :ivar subscription: the topic's subscription by its name on the server; None for a queue.
    :ivar dead: whether it is the dead-letter queue.
    """

    entity: str
    subscription: str | None
    dead: bool


def entity_name(topic: str) -> str:
    """The entity of a topic.

    :raises InvalidName: the name is neither portable nor native, or a path with dots.
    """
    check_name(topic, "topic")
    if isinstance(topic, NativeName) and not {".", ".."}.isdisjoint(topic.split("/")):
        raise InvalidName(
            f"native topic name {str(topic)!r} has a part that is '.' or '..'",
            advice="The administration endpoint would take it for another path; write the path of the entity",
        )
    if isinstance(topic, NativeName) or (topic[-1].isalnum() and topic.islower()):
        return str(topic)
    upper = sum(1 << index for index, letter in enumerate(topic) if letter.isupper())
    return f"{topic}/_{upper:x}"


def topic_of(entity: str) -> str:
    """The topic of an entity."""
    return _SUFFIX.sub("", entity)


def subscription_name(subscription: str) -> str:
    """The name of a subscription on the server.

    :raises InvalidName: the name is neither portable nor native.
    """
    check_name(subscription, "subscription")
    if isinstance(subscription, NativeName):
        if _NATIVE_SUBSCRIPTION.fullmatch(subscription) is None:
            raise InvalidName(
                f"native subscription name {str(subscription)!r} is not valid in Service Bus",
                advice="Use 1 to 50 letters, digits and ._-, without ._- at the ends",
            )
        return str(subscription)
    if not needs_metadata(subscription):
        return str(subscription)
    return _DIGEST + hashlib.blake2s(subscription.encode(), digest_size=20).hexdigest()


def needs_metadata(subscription: str) -> bool:
    """Whether a subscription's name is too long, so its metadata stores it."""
    return (
        not isinstance(subscription, NativeName)
        and (len(subscription) > _LONGEST_SUBSCRIPTION or not subscription[-1].isalnum() or not subscription.islower())
    ) or subscription.startswith(_DIGEST)


def split_path(topic: str) -> EntityPath:
    """The parts of a native path such as `orders/Subscriptions/billing/$DeadLetterQueue`."""
    path = entity_name(topic)
    dead = path.lower().endswith(_DEAD_LETTERS)
    if dead:
        path = path[: -len(_DEAD_LETTERS)]
    at = path.lower().find(_SUBSCRIPTIONS)
    if at < 0:
        return EntityPath(path, None, dead)
    return EntityPath(path[:at], path[at + len(_SUBSCRIPTIONS) :], dead)
