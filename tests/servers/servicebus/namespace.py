"""All entities of the double: creation, routing, duplicate detection and restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from proton import Message, symbol

from tests.servers.servicebus.entities import DEAD_LETTERS, Entity, Held, Refused, now
from tests.servers.servicebus.filters import Matches, Subject
from tests.servers.servicebus.journal import Journal
from tests.servers.servicebus.rules import always, compile_rule, subject_of
from tests.servers.servicebus.sections import head

__all__ = ["Namespace", "Topic"]

QUEUE: Final[dict[str, Any]] = {
    "lock_duration": 60.0,
    "max_delivery_count": 10,
    "requires_session": False,
    "requires_duplicate_detection": False,
    "duplicate_detection_history_time_window": 600.0,
    "default_message_time_to_live": None,
    "dead_lettering_on_message_expiration": False,
    "dead_lettering_on_filter_evaluation_exceptions": True,
    "forward_to": None,
    "forward_dead_lettered_messages_to": None,
    "user_metadata": None,
    "auto_delete_on_idle": None,
    "status": "Active",
    "max_size_in_megabytes": 1024,
}
MAX_MESSAGE: Final = 256 * 1024
MAX_HOPS: Final = 4


class Topic:
    """A topic, or the sending side of a queue."""

    def __init__(self, name: str, properties: dict[str, Any]) -> None:
        self.name = name
        self.properties = properties
        self.subscriptions: dict[str, Entity] = {}
        self.rules: dict[str, dict[str, dict[str, Any]]] = {}
        self.compiled: dict[str, list[Matches]] = {}

    def compile(self, subscription: str) -> None:
        """Call it after the rules have changed."""
        key = subscription.lower()
        self.compiled[key] = [compile_rule(each) for each in self.rules[key].values()]


class Namespace:
    """The double's state; hold `lock` to use it."""

    def __init__(self, directory: Path) -> None:
        self.lock = threading.RLock()
        self.queues: dict[str, Entity] = {}
        self.topics: dict[str, Topic] = {}
        self.entities: dict[str, Entity] = {}
        """All entities to receive from, by path in lower case."""
        self.dirty: set[Entity] = set()
        self._sequence = 0
        self._seen: dict[str, dict[str, float]] = {}
        self._journal = Journal(directory / "journal")
        self._load()

    # Entities.

    def create_queue(self, name: str, properties: dict[str, Any], *, journal: bool = True) -> Entity:
        self._check_new(name)
        entity = self._make(name, {**QUEUE, **properties})
        self.queues[name.lower()] = entity
        if journal:
            self._journal.add("queue", name, entity.properties)
        return entity

    def create_topic(self, name: str, properties: dict[str, Any], *, journal: bool = True) -> Topic:
        self._check_new(name)
        topic = self.topics[name.lower()] = Topic(name, {**QUEUE, **properties})
        if journal:
            self._journal.add("topic", name, topic.properties)
        return topic

    def create_subscription(self, topic: str, name: str, properties: dict[str, Any], *, journal: bool = True) -> Entity:
        parent = self.topics.get(topic.lower())
        if parent is None:
            raise Refused("amqp:not-found", f"topic {topic} not found", 404)
        if name.lower() in parent.subscriptions:
            raise Refused("entity-already-exists", f"subscription {name} exists", 409)
        entity = self._make(f"{parent.name}/Subscriptions/{name}", {**QUEUE, **properties})
        parent.subscriptions[name.lower()] = entity
        parent.rules[name.lower()] = {}
        if journal:
            self._journal.add("subscription", topic, name, entity.properties)
            self.set_rule(topic, name, "$Default", {"kind": "true"})
        return entity

    def set_rule(self, topic: str, subscription: str, rule: str, filter_: dict[str, Any]) -> None:
        """Create or replace a rule.

        :raises Refused: the double does not know the filter.
        """
        parent = self.topics[topic.lower()]
        compile_rule(filter_)
        parent.rules[subscription.lower()][rule] = filter_
        parent.compiled[subscription.lower()] = [
            compile_rule(each) for each in parent.rules[subscription.lower()].values()
        ]
        self._journal.add("rule", topic, subscription, rule, filter_)

    def drop_rule(self, topic: str, subscription: str, rule: str) -> bool:
        parent = self.topics[topic.lower()]
        found = parent.rules[subscription.lower()].pop(rule, None)
        parent.compiled[subscription.lower()] = [
            compile_rule(each) for each in parent.rules[subscription.lower()].values()
        ]
        self._journal.add("no rule", topic, subscription, rule)
        return found is not None

    def update(self, properties: dict[str, Any], changes: dict[str, Any], *names: str) -> None:
        properties.update(changes)
        self._journal.add("update", names, properties)

    def drop(self, name: str) -> bool:
        """Delete a queue or a topic with its subscriptions."""
        queue = self.queues.pop(name.lower(), None)
        topic = self.topics.pop(name.lower(), None)
        if queue is not None:
            self._forget(queue)
        if topic is not None:
            for entity in topic.subscriptions.values():
                self._forget(entity)
        self._seen.pop(name.lower(), None)
        self._journal.add("drop", name)
        return queue is not None or topic is not None

    def drop_subscription(self, topic: str, name: str) -> bool:
        parent = self.topics.get(topic.lower())
        entity = None if parent is None else parent.subscriptions.pop(name.lower(), None)
        if parent is None or entity is None:
            return False
        self._forget(entity)
        parent.rules.pop(name.lower(), None)
        parent.compiled.pop(name.lower(), None)
        self._journal.add("drop subscription", topic, name)
        return True

    # Messages.

    def send(self, address: str, raw: bytes, hops: int = 0) -> int:
        """Route a message; returns its sequence number.

        :raises Refused: the entity does not exist, or does not accept the message.
        """
        queue, topic = self.queues.get(address.lower()), self.topics.get(address.lower())
        if queue is None and topic is None:
            raise Refused("amqp:not-found", f"The messaging entity '{address}' could not be found.", 404)
        if len(raw) > MAX_MESSAGE:
            raise Refused("amqp:link:message-size-exceeded", f"The message is larger than {MAX_MESSAGE} bytes.", 413)
        properties = queue.properties if queue is not None else topic.properties if topic is not None else {}
        if properties["status"] != "Active":
            raise Refused("com.microsoft:entity-disabled", f"The entity '{address}' is disabled.", 403)
        message = Message()
        try:
            message.decode(head(raw))
        except Exception as error:
            raise Refused("amqp:decode-error", f"The message cannot be decoded: {error!r}") from error
        message_id = None if message.id is None else str(message.id)
        if properties["requires_duplicate_detection"] and message_id and self._is_duplicate(address, message_id):
            return 0
        targets = [queue] if queue is not None else self._targets(topic, message)
        # All copies have one number, so that a scheduled message of a topic can be cancelled by it.
        self._sequence += 1
        sequence = self._sequence
        for entity in targets:
            self._put(entity, sequence, raw, message, message_id, properties, hops)
        return sequence

    def cancel(self, address: str, sequence: int) -> None:
        """Cancel a scheduled message.

        :raises Refused: the message does not exist.
        """
        topic = self.topics.get(address.lower())
        entities = [*topic.subscriptions.values()] if topic is not None else [self.queues[address.lower()]]
        found = [entity for entity in entities if sequence in entity.items]
        if not found:
            raise Refused("com.microsoft:message-not-found", f"message {sequence} not found", 404)
        for entity in found:
            if entity.items[sequence].state == "scheduled":
                entity.remove(entity.items[sequence])

    def _put(
        self,
        entity: Entity,
        sequence: int,
        raw: bytes,
        message: Message,
        message_id: str | None,
        sent: dict[str, Any],
        hops: int,
    ) -> None:
        forward = entity.properties["forward_to"]
        if forward and hops < MAX_HOPS:
            self.send(forward, raw, hops + 1)
            return
        session = message.group_id
        if entity.with_sessions and session is None:
            raise Refused("amqp:not-allowed", "The SessionId of a message is needed by an entity with sessions.")
        held = Held(sequence, raw, message_id=message_id, session=session)
        annotations = message.annotations or {}
        due = annotations.get(symbol("x-opt-scheduled-enqueue-time"))
        if due and due / 1000 > now():
            held.due, held.state = due / 1000, "scheduled"
        lives = [
            each
            for each in (
                message.ttl or None,
                sent["default_message_time_to_live"],
                entity.properties["default_message_time_to_live"],
            )
            if each
        ]
        if lives:
            held.expires = max(now(), held.due) + min(lives)
        entity.put(held)

    def _targets(self, topic: Topic | None, message: Message) -> list[Entity]:
        assert topic is not None
        subject: Subject | None = None
        found: list[Entity] = []
        for name, entity in topic.subscriptions.items():
            rules = topic.compiled[name]
            if rules == [always]:
                found.append(entity)
                continue
            subject = subject or subject_of(message)
            if any(matches(subject) for matches in rules):
                found.append(entity)
        return found

    def _is_duplicate(self, address: str, message_id: str) -> bool:
        entity = self.queues.get(address.lower()) or self.topics[address.lower()]
        seen = self._seen.setdefault(address.lower(), {})
        window = float(entity.properties["duplicate_detection_history_time_window"])
        moment = now()
        if moment - seen.get(message_id, 0.0) < window:
            return True
        seen[message_id] = moment
        self._journal.add("seen", address.lower(), message_id, moment)
        return False

    def entity(self, address: str) -> Entity | None:
        """The entity to receive from at this address."""
        return self.entities.get(address.strip("/").lower())

    def _make(self, path: str, properties: dict[str, Any]) -> Entity:
        letters = {**QUEUE, "lock_duration": properties["lock_duration"], "max_delivery_count": 1 << 30}
        for each, kept in ((path + "/$DeadLetterQueue", letters), (path, properties)):
            self.entities[each.lower()] = Entity(each, kept, self._journal, self._dead_letter, self.dirty.add)
        return self.entities[path.lower()]

    def _dead_letter(self, entity: Entity, held: Held) -> None:
        forward = entity.properties["forward_dead_lettered_messages_to"]
        target = self.queues.get(forward.lower()) if forward else None
        (target or self.entities[entity.path.lower() + DEAD_LETTERS]).put(held)

    def _forget(self, entity: Entity) -> None:
        for path in (entity.path.lower(), entity.path.lower() + DEAD_LETTERS):
            gone = self.entities.pop(path, None)
            if gone is not None:
                gone.deleted = True
                self.dirty.add(gone)

    def _check_new(self, name: str) -> None:
        if name.lower() in self.queues or name.lower() in self.topics:
            raise Refused("entity-already-exists", f"entity {name} exists", 409)

    # Restarts.

    def _load(self) -> None:
        changes = list(self._journal.changes())
        for kind, *rest in changes:
            getattr(self, f"_replay_{kind.replace(' ', '_')}")(*rest)
        self._journal.begin(list(self._everything()))

    def _everything(self) -> Iterator[tuple[Any, ...]]:
        for queue in self.queues.values():
            yield ("queue", queue.path, queue.properties)
        for topic in self.topics.values():
            yield ("topic", topic.name, topic.properties)
            for key, entity in topic.subscriptions.items():
                name = entity.path.rpartition("/")[2]
                yield ("subscription", topic.name, name, entity.properties)
                for rule, filter_ in topic.rules[key].items():
                    yield ("rule", topic.name, name, rule, filter_)
        for entity in self.entities.values():
            for held in entity.items.values():
                yield ("put", entity.path, held.snapshot())
            for name, session in entity.sessions.items():
                if session.state is not None:
                    yield ("session", entity.path, name, session.state)
        for address, seen in self._seen.items():
            for message_id, moment in seen.items():
                yield ("seen", address, message_id, moment)
        yield ("sequence", self._sequence)

    def _replay_queue(self, name: str, properties: dict[str, Any]) -> None:
        self.create_queue(name, properties, journal=False)

    def _replay_topic(self, name: str, properties: dict[str, Any]) -> None:
        self.create_topic(name, properties, journal=False)

    def _replay_subscription(self, topic: str, name: str, properties: dict[str, Any]) -> None:
        self.create_subscription(topic, name, properties, journal=False)

    def _replay_rule(self, topic: str, subscription: str, rule: str, filter_: dict[str, Any]) -> None:
        self.set_rule(topic, subscription, rule, filter_)

    def _replay_no_rule(self, topic: str, subscription: str, rule: str) -> None:
        self.drop_rule(topic, subscription, rule)

    def _replay_update(self, names: tuple[str, ...], properties: dict[str, Any]) -> None:
        found = self.topics.get(names[0].lower()) if len(names) == 1 else None
        path = "/Subscriptions/".join(names).lower()
        (found or self.entities[path]).properties.update(properties)

    def _replay_drop(self, name: str) -> None:
        self.drop(name)

    def _replay_drop_subscription(self, topic: str, name: str) -> None:
        self.drop_subscription(topic, name)

    def _replay_put(self, path: str, kept: tuple[Any, ...]) -> None:
        held = Held.restore(kept)
        self._sequence = max(self._sequence, held.sequence)
        entity = self.entity(path)
        if entity is not None:
            entity.put(held, journal=False)

    def _replay_gone(self, path: str, sequence: int) -> None:
        entity = self.entity(path)
        if entity is not None:
            entity.items.pop(sequence, None)

    def _replay_count(self, path: str, sequence: int, count: int) -> None:
        entity = self.entity(path)
        if entity is not None and sequence in entity.items:
            entity.items[sequence].count = count

    def _replay_state(self, path: str, sequence: int, state: str) -> None:
        entity = self.entity(path)
        if entity is not None and sequence in entity.items:
            entity.items[sequence].state = state

    def _replay_session(self, path: str, name: str, state: bytes | None) -> None:
        entity = self.entity(path)
        if entity is not None:
            entity.set_session_state(name, state)

    def _replay_seen(self, address: str, message_id: str, moment: float) -> None:
        self._seen.setdefault(address, {})[message_id] = moment

    def _replay_sequence(self, sequence: int) -> None:
        self._sequence = max(self._sequence, sequence)
