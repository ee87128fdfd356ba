"""`MessageLimits`: refuses messages that the broker cannot carry; and `PipelineSettings`, the bounds of a pipeline.

Messages are checked before they are sent, since emulators and some servers cut them or ignore options silently. Pure
and synchronous; a topic makes its limits once from the capabilities of the backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from broker.capabilities import Capabilities
from broker.envelopes import is_letter
from broker.errors import BrokerError, InvalidMessage, MessageTooLarge, Unsupported
from broker.outbound import OutboundMessage

__all__ = ["MessageLimits", "PipelineSettings", "message_size", "utf8_length"]

_ALWAYS_LARGE: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """The bounds of a publishing pipeline.

    :ivar max_messages: the most messages queued and in flight together.
    :ivar max_bytes: the most bytes of these messages; a larger message is sent alone.
    :ivar max_batch: the most messages of one call to the backend.
    :ivar max_batch_bytes: the most bytes of one call; its last message may exceed it.
    :ivar in_flight: the most calls to the backend at once.
    :ivar retry_for: seconds for which retriable failures are retried; 0 is never.
    """

    max_messages: int = 40_000
    max_bytes: int = 64 * 1024 * 1024
    max_batch: int = 2000
    max_batch_bytes: int = 4 * 1024 * 1024
    in_flight: int = 16
    retry_for: float = 30.0


def utf8_length(text: str) -> int:
    """The bytes of a text in UTF-8; ASCII is not encoded."""
    return len(text) if text.isascii() else len(text.encode())


def message_size(message: OutboundMessage) -> int:
    """Bytes of body, key and attributes together, as `Limits.message` and the pipeline count them."""
    size = len(message.data) if message.data is not None else 0
    if message.key is not None:
        size += len(message.key)
    if message.attributes:
        size += attributes_size(message.attributes)
    return size


def attributes_size(attributes: Mapping[str, str]) -> int:
    """Bytes of all names and values together."""
    size = 0
    for name, value in attributes.items():
        size += len(name) if name.isascii() else len(name.encode())
        size += len(value) if value.isascii() else len(value.encode())
    return size


def _least(*limits: int | None) -> int:
    return min((limit for limit in limits if limit is not None), default=_ALWAYS_LARGE - 1)


class MessageLimits:
    """The limits and capabilities of one backend, arranged for quick checks."""

    __slots__ = (
        "_backend",
        "_body",
        "_checks_attributes",
        "_deliver_at",
        "_few",
        "_id",
        "_key",
        "_limits",
        "_message",
        "_needed",
        "_partitions",
        "_tombstones",
        "_ttl",
        "harmless",
        "harmless_text",
    )

    def __init__(self, capabilities: Capabilities) -> None:
        publish = capabilities.publish
        limits = publish.limits
        self._backend = capabilities.backend
        self._limits = limits
        self._needed = capabilities.settings_needed
        self._body = limits.body
        self._key = limits.key
        self._id = limits.id
        self._message = limits.message
        self._checks_attributes = not (limits.attributes is limits.attribute_key is limits.attribute_value is None)
        self._deliver_at = publish.deliver_at
        self._ttl = publish.ttl
        self._partitions = publish.partitions
        self._tombstones = publish.tombstones
        self.harmless = _least(limits.body, limits.message)
        """Bytes of body, key and attributes together that no limit refuses."""
        self.harmless_text = _least(limits.key, limits.id, limits.attribute_key, limits.attribute_value)
        """Bytes of key, attributes and id together that no limit of one of them refuses."""
        self._few = _least(limits.attributes)

    def refused(self, messages: Sequence[OutboundMessage]) -> dict[int, BrokerError]:
        """The errors of messages that the broker cannot carry, by index."""
        refused: dict[int, BrokerError] = {}
        harmless, harmless_text, check = self.harmless, self.harmless_text, self.check
        for index, message in enumerate(messages):
            if message.plain:
                # Nearly every message leaves here.
                data, key = message.data, message.key
                length = 0 if key is None else len(key)
                if data is not None and length <= harmless_text and len(data) + length <= harmless:
                    continue
            try:
                check(message)
            except BrokerError as error:
                refused[index] = error
        return refused

    def check(self, message: OutboundMessage) -> int:
        """Return the message's size if the broker can carry the message.

        Dead letters and messages for retry topics are not checked.

        :raises MessageTooLarge: the body, key, id, an attribute or the whole is too large.
        :raises InvalidMessage: the message has too many attributes.
        :raises Unsupported: the backend does not support deliver_at, ttl, partition or a tombstone.
        """
        data, key, identity, attributes = message.data, message.key, message.id, message.attributes
        if data is not None and message.deliver_at is message.ttl is message.partition is None:
            # Nearly every message leaves here: two sums cost less than a check of each limit.
            text = 0 if key is None else len(key)
            for name, value in attributes.items():
                text += len(name) + len(value) if name.isascii() and value.isascii() else _ALWAYS_LARGE
            size = len(data) + text
            if identity is not None:
                text += 4 * len(identity)
            if size <= self.harmless and text <= self.harmless_text and len(attributes) <= self._few:
                return size
        if attributes and is_letter(attributes):
            # The broker accepted the original, maybe from another client: only the broker may refuse its dead letter.
            return message_size(message)
        if data is None:
            size = 0
            if not self._tombstones:
                raise self._lacks("tombstones", "tombstones (data=None)", "Publish b'' or a body that says 'deleted'")
        else:
            size = len(data)
            if self._body is not None and size > self._body:
                raise self._too_large("Body", size, self._body)
        if key is not None:
            length = len(key)
            if self._key is not None and length > self._key:
                raise self._too_large("Key", length, self._key)
            size += length
        if identity is not None and self._id is not None and utf8_length(identity) > self._id:
            raise self._too_large("Id", utf8_length(identity), self._id)
        if attributes:
            size += self._check_attributes(attributes) if self._checks_attributes else attributes_size(attributes)
        if self._message is not None and size > self._message:
            raise self._too_large("Body, key and attributes together", size, self._message)
        if message.deliver_at is not None or message.ttl is not None or message.partition is not None:
            self._check_abilities(message)
        return size

    def _check_abilities(self, message: OutboundMessage) -> None:
        if message.deliver_at is not None and not self._deliver_at:
            raise self._lacks(
                "deliver_at", "scheduled delivery (deliver_at)", "Leave deliver_at out, or publish it when it is due"
            )
        if message.ttl is not None and not self._ttl:
            raise self._lacks("ttl", "time to live per message (ttl)", "Leave ttl out, or set the topic's retention")
        if message.partition is not None and not self._partitions:
            raise self._lacks("partitions", "choosing a partition", "Leave partition out; the key keeps order")

    def _check_attributes(self, attributes: Mapping[str, str]) -> int:
        limits = self._limits
        longest_name, longest_value = limits.attribute_key, limits.attribute_value
        if limits.attributes is not None and len(attributes) > limits.attributes:
            raise InvalidMessage(
                f"The message has {len(attributes)} attributes; {self._backend} takes {limits.attributes}",
                advice="Combine some of them, or move them into the body",
            )
        size = 0
        for name, value in attributes.items():
            length = len(name) if name.isascii() else len(name.encode())
            if longest_name is not None and length > longest_name:
                raise self._too_large(f"Attribute name {name[:40]!r}", length, longest_name)
            size += length
            length = len(value) if value.isascii() else len(value.encode())
            if longest_value is not None and length > longest_value:
                raise self._too_large(f"Attribute {name!r}", length, longest_value)
            size += length
        return size

    def _too_large(self, field: str, actual: int, allowed: int) -> MessageTooLarge:
        verb = "have" if field.endswith("together") else "has"
        return MessageTooLarge(
            f"{field} {verb} {actual} bytes; {self._backend} takes {allowed}",
            advice="Make it smaller, or store it elsewhere and publish a reference",
        )

    def _lacks(self, ability: str, feature: str, advice: str) -> Unsupported:
        needed = self._needed.get(f"publish.{ability}")
        why = f"; it takes {needed}" if needed else ""
        return Unsupported(f"{self._backend} does not support {feature}{why}", advice=advice)
