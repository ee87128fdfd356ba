"""Requests to `$cbs` and `<entity>/$management`, as azure-servicebus sends them. Done under the namespace's lock."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import urllib.parse
import uuid
from typing import Any, Final

from proton import UNDESCRIBED, Array, Condition, Data, Message, symbol, timestamp

from tests.servers.servicebus.entities import Entity, Held, Refused, now
from tests.servers.servicebus.faults import Faults
from tests.servers.servicebus.namespace import Namespace

__all__ = ["Management", "said"]

KEY_NAME: Final = "RootManageSharedAccessKey"
_PREFIX: Final = "com.microsoft:"

Answer = tuple[int, str, Any, str | None]


class Management:
    """Answers requests."""

    def __init__(self, namespace: Namespace, faults: Faults, key: str) -> None:
        self._namespace = namespace
        self._faults = faults
        self._key = key
        self._authorized: dict[int, float] = {}

    def check_authorized(self, connection: int) -> None:
        """:raises Refused: the connection has no valid token."""
        if self._authorized.get(connection, 0.0) < now():
            raise Refused("amqp:unauthorized-access", "A valid token is needed: put one on $cbs.", 401)

    def do(self, connection: int, address: str, operation: str, request: Message) -> Answer:
        """Execute a request; returns status, text, body and condition.

        :raises Refused: it cannot be done.
        """
        if address == "$cbs":
            self._faults.check("put-token", address)
            self._authorized[connection] = check_token(str(request.body), self._key)
            return 200, "OK", {}, None
        path = address[: -len("/$management")]
        name = operation.removeprefix(_PREFIX)
        self._faults.check(name, path)
        method = getattr(self, f"_{name.replace('-', '_')}", None)
        if method is None:
            raise Refused("amqp:not-implemented", f"the double has no operation {operation}", 501)
        entity = self._namespace.entity(path)
        if entity is None and path.lower() not in self._namespace.topics:
            raise Refused("amqp:not-found", f"The messaging entity '{path}' could not be found.", 404)
        body = method(entity, request.body, path)
        return (204, "No content", {}, None) if body is None else (200, "OK", body, None)

    # Locks and settling.

    def _renew_lock(self, entity: Entity, body: Any, _: str) -> Any:
        held = [entity.find(_token(each)) for each in body["lock-tokens"]]
        ends = [timestamp(int(entity.renew(each) * 1000)) for each in held]
        return {"expirations": _array(Data.TIMESTAMP, ends)}

    def _update_disposition(self, entity: Entity, body: Any, _: str) -> Any:
        # All or nothing: there is one answer for all.
        held = [entity.find(_token(each)) for each in body["lock-tokens"]]
        status = str(body["disposition-status"])
        for each in held:
            if status == "completed":
                entity.complete(each)
            elif status == "abandoned":
                entity.abandon(each)
            elif status == "defered":
                entity.defer(each)
            elif status == "suspended":
                entity.reject(each, body.get("deadletter-reason"), body.get("deadletter-description"))
            else:
                raise Refused("amqp:not-allowed", f"no disposition {status!r}")
        return {}

    def _receive_by_sequence_number(self, entity: Entity, body: Any, _: str) -> Any:
        found: list[Held] = []
        for number in body["sequence-numbers"]:
            held = entity.items.get(int(number))
            if held is None or held.state != "deferred":
                raise Refused("com.microsoft:message-not-found", f"no deferred message {number}", 404)
            found.append(held)
        messages: list[dict[str, Any]] = []
        for held in found:
            if int(body["receiver-settle-mode"]) == 0:
                messages.append({"message": held.encode()})
                entity.take(held)
            else:
                token = entity.lock(held, None)
                messages.append({"message": held.encode(), "lock-token": uuid.UUID(bytes_le=token.encode())})
        return {"messages": messages}

    # Browsing and scheduling.

    def _peek_message(self, entity: Entity, body: Any, _: str) -> Any:
        session, most = body.get("session-id"), int(body["message-count"])
        messages: list[dict[str, bytes]] = []
        for number in sorted(entity.items):
            held = entity.items[number]
            if number >= int(body["from-sequence-number"]) and session in (None, held.session):
                messages.append({"message": held.encode()})
                if len(messages) >= most:
                    break
        return {"messages": messages} if messages else None

    def _schedule_message(self, _entity: Entity | None, body: Any, path: str) -> Any:
        numbers = [self._namespace.send(path, bytes(each["message"])) for each in body["messages"]]
        return {"sequence-numbers": _array(Data.LONG, numbers)}

    def _cancel_scheduled_message(self, _entity: Entity | None, body: Any, path: str) -> Any:
        for number in body["sequence-numbers"]:
            self._namespace.cancel(path, int(number))
        return {}

    # Sessions.

    def _get_session_state(self, entity: Entity, body: Any, _: str) -> Any:
        session = entity.sessions.get(body["session-id"])
        return {"session-state": None if session is None else session.state}

    def _set_session_state(self, entity: Entity, body: Any, _: str) -> Any:
        state = body["session-state"]
        entity.set_session_state(body["session-id"], None if state is None else bytes(state))
        return {}

    def _renew_session_lock(self, entity: Entity, body: Any, _: str) -> Any:
        return {"expiration": timestamp(int(entity.renew_session(body["session-id"]) * 1000))}


def check_token(token: str, key: str) -> float:
    """The time at which a token expires.

    :raises Refused: it was not issued for this key, or has expired.
    """
    found = dict(re.findall(r"(sr|sig|se|skn)=([^&]*)", token))
    if set(found) != {"sr", "sig", "se", "skn"}:
        raise Refused("amqp:unauthorized-access", "The token is no shared access signature.", 401)
    wanted = hmac.new(key.encode(), f"{found['sr']}\n{found['se']}".encode(), hashlib.sha256).digest()
    if base64.b64decode(urllib.parse.unquote(found["sig"])) != wanted:
        raise Refused("amqp:unauthorized-access", "InvalidSignature: The token has an invalid signature.", 401)
    if float(found["se"]) < now():
        raise Refused("amqp:unauthorized-access", "ExpiredToken: The token is expired.", 401)
    return float(found["se"])


def said(refused: Refused) -> Condition:
    """An error as clients expect it; without further information pyamqp waits for ever."""
    return Condition(refused.condition, str(refused), {symbol("info"): "double"})


def _array(kind: int, values: list[Any]) -> Any:
    undescribed: Any = UNDESCRIBED
    return Array(undescribed, kind, *values)


def _token(value: Any) -> str:
    try:
        return value.bytes_le.decode() if isinstance(value, uuid.UUID) else str(value)
    except UnicodeDecodeError:
        raise Refused("com.microsoft:message-lock-lost", "The lock supplied is invalid.", 410) from None
