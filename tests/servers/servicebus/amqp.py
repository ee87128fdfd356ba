"""The AMQP side of the double: links, deliveries and settlements, driven by proton's reactor in one thread.

Every event takes the namespace's lock, since the administration endpoint changes it from other threads. What clients
may be sent is pumped after each event, to the links of an entity in turn.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict, deque
from typing import Any, Final

from proton import Condition, Connection, Delivery, Endpoint, Link, Message, int32, symbol
from proton._handler import Handler
from proton.reactor import Container

from tests.servers.servicebus.entities import Entity, Refused, now
from tests.servers.servicebus.faults import Faults
from tests.servers.servicebus.links import (
    SESSION_FILTER,
    Consumer,
    accept_seconds,
    address_in,
    check_session,
    drop,
    number_of,
    rejection_info,
    wanted_session,
)
from tests.servers.servicebus.management import Management, said
from tests.servers.servicebus.namespace import MAX_MESSAGE, Namespace
from tests.servers.servicebus.sections import is_batch

__all__ = ["Amqp"]

logger = logging.getLogger("servicebus-double")

TICK: Final = 0.02
IDLE_TICK: Final = 0.2
"""Without clients: each test process has a double, and few of its tests use it."""
CREDIT: Final = 500
_TICKS_OF_1970: Final = 621_355_968_000_000_000


class Amqp(Handler):
    """One listener."""

    def __init__(self, namespace: Namespace, faults: Faults, port: int, key: str) -> None:
        super().__init__()
        self._namespace = namespace
        self._faults = faults
        self._port = port
        self._management = Management(namespace, faults, key)
        self._addresses: dict[tuple[int, str, bool], str] = {}
        self._answers: dict[tuple[int, str], Link] = {}
        self._consumers: dict[str, deque[Consumer]] = defaultdict(deque)
        self._by_link: dict[tuple[int, str], Consumer] = {}
        self._waiting: list[tuple[Link, Entity, float]] = []
        self._links: dict[tuple[int, str, bool], tuple[Link, str]] = {}
        self._connections: dict[int, Connection] = {}

    def on_reactor_init(self, event: Any) -> None:
        self._reactor: Container = event.reactor
        self._reactor.acceptor("127.0.0.1", str(self._port), self)
        self._timer = self._reactor.schedule(IDLE_TICK, self)

    # Time and faults.

    def on_timer_task(self, event: Any) -> None:
        self._do_what_is_due()
        self._timer = self._reactor.schedule(TICK if self._connections else IDLE_TICK, self)

    def _do_what_is_due(self) -> None:
        with self._namespace.lock:
            for entity in list(self._namespace.entities.values()):
                for session in list(entity.tick()):
                    self._end_session(entity, session)
            self._faults.apply_drops(self._drop_clients)
            self._end_deleted()
            self._accept_waiting()
            self._pump()

    def _drop_clients(self, kind: str, address: str) -> None:
        if kind in ("connections", "closed"):
            for connection in list(self._connections.values()):
                drop(connection, politely=kind == "closed")
                # For the service the link has ended, although the client has not answered: nothing is delivered.
                self._gone(connection)
        else:
            for link, where in list(self._links.values()):
                if where.lower() == address.lower() and link.state & Endpoint.LOCAL_ACTIVE:
                    self._end(link, "amqp:link:detach-forced", "The link is forced to detach.")

    def _end_deleted(self) -> None:
        for entity in [entity for entity in self._namespace.dirty if entity.deleted]:
            self._namespace.dirty.discard(entity)
            for consumer in list(self._consumers.pop(entity.path.lower(), ())):
                self._end(consumer.link, "amqp:not-found", f"The messaging entity '{entity.path}' was deleted.")
            for link, where in list(self._links.values()):
                if where.lower() == entity.path.lower() and link.state & Endpoint.LOCAL_ACTIVE:
                    self._end(link, "amqp:not-found", f"The messaging entity '{entity.path}' was deleted.")

    def _end_session(self, entity: Entity, session: str) -> None:
        for consumer in list(self._consumers[entity.path.lower()]):
            if consumer.session == session:
                self._drop(consumer)
                self._end(consumer.link, "com.microsoft:session-lock-lost", "The session lock has expired.")
                return
        entity.release_session(session)

    def _end(self, link: Link, condition: str, text: str) -> None:
        self._forget(link)
        link.condition = Condition(condition, text, {symbol("info"): "double"})
        link.close()

    # Connections and links.

    def on_connection_bound(self, event: Any) -> None:
        event.transport.sasl().allowed_mechs("ANONYMOUS")
        event.transport.idle_timeout = 0
        if not self._connections:
            # Timers that were due before this client connected must not affect it.
            self._do_what_is_due()
            self._timer.cancel()
            self._timer = self._reactor.schedule(TICK, self)
        self._connections[number_of(event.connection)] = event.connection

    def on_connection_remote_open(self, event: Any) -> None:
        event.connection.open()

    def on_session_remote_open(self, event: Any) -> None:
        event.session.open()

    def on_session_remote_close(self, event: Any) -> None:
        event.session.close()

    def on_connection_remote_close(self, event: Any) -> None:
        self._gone(event.connection)
        event.connection.close()

    def on_transport_closed(self, event: Any) -> None:
        if event.connection is not None:
            self._gone(event.connection)

    def _gone(self, connection: Connection) -> None:
        with self._namespace.lock:
            number = number_of(connection)
            self._connections.pop(number, None)
            for consumer in [found for key, found in self._by_link.items() if key[0] == number]:
                self._drop(consumer)
            self._addresses = {key: each for key, each in self._addresses.items() if key[0] != number}
            self._answers = {key: each for key, each in self._answers.items() if key[0] != number}
            self._links = {key: each for key, each in self._links.items() if key[0] != number}
            self._waiting = [each for each in self._waiting if number_of(each[0].connection) != number]
            self._pump()

    def on_link_remote_open(self, event: Any) -> None:
        link = event.link
        with self._namespace.lock:
            link.source.copy(link.remote_source)
            link.target.copy(link.remote_target)
            address = address_in(link.remote_target.address if link.is_receiver else link.remote_source.address)
            try:
                self._open(link, address)
            except Refused as refused:
                self._refuse(link, refused)
            self._pump()

    def _open(self, link: Link, address: str) -> None:
        number = number_of(link.connection)
        internal = address == "$cbs" or address.lower().endswith("$management")
        if not internal:
            self._management.check_authorized(number)
            self._faults.check("open", address)
        if link.is_receiver:
            known = address.lower() in self._namespace.queues or address.lower() in self._namespace.topics
            if not internal and not known:
                raise Refused("amqp:not-found", f"The messaging entity '{address}' could not be found.", 404)
            self._addresses[number, link.name, True] = address
            self._links[number, link.name, True] = (link, address)
            link.max_message_size = MAX_MESSAGE
            link.open()
            link.flow(CREDIT)
            return
        link.snd_settle_mode = link.remote_snd_settle_mode
        link.rcv_settle_mode = link.remote_rcv_settle_mode
        if internal:
            self._answers[number, address.lower()] = link
            link.open()
            return
        entity = self._namespace.entity(address)
        if entity is None:
            raise Refused("amqp:not-found", f"The messaging entity '{address}' could not be found.", 404)
        self._links[number, link.name, False] = (link, address)
        wanted = wanted_session(link)
        check_session(entity.with_sessions, wanted)
        if not entity.with_sessions:
            self._begin(link, entity, None)
            return
        session = entity.accept(wanted, link)
        if session is None:
            seconds = accept_seconds(link)
            self._waiting.append((link, entity, now() + seconds))
        else:
            self._begin(link, entity, session)

    def _refuse(self, link: Link, refused: Refused) -> None:
        link.condition = Condition(refused.condition, str(refused), {symbol("info"): "double"})
        link.open()
        link.close()

    def _begin(self, link: Link, entity: Entity, session: str | None) -> None:
        if session is not None:
            until = entity.sessions[session].until
            link.source.filter.clear()
            link.source.filter.put_dict({SESSION_FILTER: session})
            link.properties = {
                symbol("com.microsoft:locked-until-utc"): int(until * 10_000_000) + _TICKS_OF_1970,
            }
        link.open()
        consumer = Consumer(link, entity, session)
        self._consumers[entity.path.lower()].append(consumer)
        self._by_link[number_of(link.connection), link.name] = consumer
        self._namespace.dirty.add(entity)

    def _accept_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for link, entity, until in waiting:
            session = entity.accept(None, link)
            if session is not None:
                self._begin(link, entity, session)
            elif now() >= until:
                self._refuse(link, Refused("com.microsoft:timeout", "No session was free in time."))
            else:
                self._waiting.append((link, entity, until))

    def on_link_remote_close(self, event: Any) -> None:
        with self._namespace.lock:
            self._forget(event.link)
            event.link.close()
            self._pump()

    on_link_remote_detach = on_link_remote_close

    def _forget(self, link: Link) -> None:
        number = number_of(link.connection)
        consumer = self._by_link.get((number, link.name))
        if consumer is not None and not link.is_receiver:
            self._drop(consumer)
        self._links.pop((number, link.name, link.is_receiver), None)
        self._waiting = [each for each in self._waiting if each[0] != link]

    def _drop(self, consumer: Consumer) -> None:
        self._by_link = {key: found for key, found in self._by_link.items() if found is not consumer}
        links = self._consumers.get(consumer.entity.path.lower())
        if links is not None and consumer in links:
            links.remove(consumer)
        if consumer.session is not None:
            consumer.entity.release_session(consumer.session)

    # Messages to clients.

    def on_link_flow(self, event: Any) -> None:
        link = event.link
        if not link.is_sender:
            return
        with self._namespace.lock:
            consumer = self._by_link.get((number_of(link.connection), link.name))
            if consumer is not None:
                self._namespace.dirty.add(consumer.entity)
            self._pump()
            if link.drain_mode:
                link.drained()

    def _pump(self) -> None:
        while self._namespace.dirty:
            entity = self._namespace.dirty.pop()
            if entity.deleted:
                self._namespace.dirty.add(entity)
                return
            links = self._consumers.get(entity.path.lower())
            if links:
                self._serve(entity, links)

    def _serve(self, entity: Entity, links: deque[Consumer]) -> None:
        idle = 0
        while links and idle < len(links):
            consumer = links[0]
            links.rotate(-1)
            link = consumer.link
            held = None
            if link.credit > 0 and link.state & Endpoint.LOCAL_ACTIVE:
                held = entity.next_ready(consumer.session)
            if held is None:
                idle += 1
                continue
            idle = 0
            if consumer.settled:
                delivery = link.delivery(secrets.token_hex(8))
                held.count += 1
                link.send(held.encode())
                link.advance()
                delivery.settle()
                held.count -= 1
                entity.take(held)
            else:
                holder = link if consumer.session is not None else None
                link.delivery(entity.lock(held, holder))
                link.send(held.encode())
                link.advance()

    # Messages and settlements from clients.

    def on_delivery(self, event: Any) -> None:
        delivery, link = event.delivery, event.link
        with self._namespace.lock:
            if link.is_receiver:
                if delivery.readable and not delivery.partial:
                    self._received(link, delivery)
            elif delivery.updated and delivery.remote_state:
                self._settle(link, delivery)
            elif delivery.updated and delivery.settled:
                delivery.settle()
            self._pump()

    def _received(self, link: Link, delivery: Delivery) -> None:
        raw = bytes(link.recv(delivery.pending))
        link.advance()
        if not link.state & Endpoint.LOCAL_ACTIVE:
            # The client sent it before it read our detach: AMQP accepts no input of an ended link.
            return
        number = number_of(link.connection)
        address = self._addresses.get((number, link.name, True), "")
        if address == "$cbs" or address.lower().endswith("$management"):
            delivery.update(Delivery.ACCEPTED)
            self._answer(link, number, address, raw)
        else:
            try:
                self._faults.check("send", address)
                for each in is_batch(raw) or [raw]:
                    self._namespace.send(address, each)
                delivery.update(Delivery.ACCEPTED)
            except Refused as refused:
                delivery.local.condition = said(refused)
                delivery.update(Delivery.REJECTED)
            except Exception as error:
                # Raised any further, it would end the reactor, and with it every client's connection.
                logger.exception("A message to %s", address)
                delivery.local.condition = said(Refused("amqp:internal-error", repr(error), 500))
                delivery.update(Delivery.REJECTED)
        delivery.settle()
        if link.credit < CREDIT // 2:
            link.flow(CREDIT - link.credit)

    def _answer(self, link: Link, number: int, address: str, raw: bytes) -> None:
        request = Message()
        request.decode(raw)
        operation = str((request.properties or {}).get("operation"))
        try:
            code, text, body, condition = self._management.do(number, address, operation, request)
        except Refused as refused:
            code, text, body, condition = refused.code, str(refused), {}, refused.condition
        except Exception as error:
            logger.exception("%s of %s", operation, address)
            code, text, body, condition = 500, repr(error), {}, "amqp:internal-error"
        properties: dict[str, Any] = {
            "statusCode": int32(code),
            "status-code": int32(code),
            "statusDescription": text,
            "status-description": text,
        }
        if condition is not None:
            properties["errorCondition"] = symbol(condition)
        answers = self._answers.get((number, address.lower()))
        if answers is None or self._faults.swallows(operation):
            return
        answer = Message(body=body, properties=properties, correlation_id=request.id)
        sent = answers.delivery(secrets.token_hex(4))
        answers.send(answer.encode())
        answers.advance()
        sent.settle()

    def _settle(self, link: Link, delivery: Delivery) -> None:
        consumer = self._by_link.get((number_of(link.connection), link.name))
        state = delivery.remote_state
        try:
            if consumer is None:
                raise Refused("com.microsoft:message-lock-lost", "The link is gone.", 410)
            self._faults.check("settle", consumer.entity.path)
            entity = consumer.entity
            held = entity.find(delivery.tag)
            if state == Delivery.ACCEPTED:
                entity.complete(held)
            elif state == Delivery.REJECTED:
                info = {str(name): value for name, value in (rejection_info(delivery) or {}).items()}
                entity.reject(held, info.get("DeadLetterReason"), info.get("DeadLetterErrorDescription"))
            elif state == Delivery.MODIFIED and delivery.remote.undeliverable:
                entity.defer(held)
                delivery.local.undeliverable = True
            elif state == Delivery.MODIFIED:
                entity.abandon(held)
                delivery.local.failed = True
            elif state == Delivery.RELEASED:
                entity.abandon(held, counted=False)
            delivery.update(state)
        except Refused as refused:
            delivery.local.condition = said(refused)
            delivery.update(Delivery.REJECTED)
        delivery.settle()
