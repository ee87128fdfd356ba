"""The administration endpoint of the double: Atom XML over HTTP, as ServiceBusAdministrationClient requests it.

Unknown elements are kept and returned unchanged. `/$double/` is not part of
Service Bus: tests set faults there. One thread per request, each under the namespace's lock.
"""

from __future__ import annotations

import json
import re
import ssl
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from tests.servers.servicebus.entities import DEAD_LETTERS, Entity, Refused
from tests.servers.servicebus.faults import Faults
from tests.servers.servicebus.limits import SHORTEST_LOCK, check_properties, check_subscription_name, whole
from tests.servers.servicebus.management import check_token
from tests.servers.servicebus.namespace import Namespace

__all__ = ["AdminServer"]

ATOM: Final = "http://www.w3.org/2005/Atom"
SB: Final = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
XSI: Final = "http://www.w3.org/2001/XMLSchema-instance"
COUNTS: Final = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
_KINDS: Final = {"queue": "QueueDescription", "topic": "TopicDescription", "subscription": "SubscriptionDescription"}
_SECONDS: Final = frozenset(
    {"lock_duration", "default_message_time_to_live", "duplicate_detection_history_time_window", "auto_delete_on_idle"}
)
_NUMBERS: Final = frozenset({"max_delivery_count", "max_message_size_in_kilobytes", "max_size_in_megabytes"})
_FLAGS: Final = frozenset({"requires_session", "requires_duplicate_detection", "dead_lettering_on_message_expiration"})
_SYSTEM: Final = {
    "CorrelationId": "correlationid",
    "MessageId": "messageid",
    "To": "to",
    "ReplyTo": "replyto",
    "Label": "label",
    "SessionId": "sessionid",
    "ReplyToSessionId": "replytosessionid",
    "ContentType": "contenttype",
}
_ENDLESS: Final = 10_000 * 86_400.0

for prefix, uri in (("", ATOM), ("i", XSI)):
    ET.register_namespace(prefix, uri)


class AdminServer(ThreadingHTTPServer):
    """One listener on loopback."""

    daemon_threads = True

    def __init__(
        self,
        namespace: Namespace,
        faults: Faults,
        port: int,
        key: str,
        tls: ssl.SSLContext | None = None,
        shortest_lock: float = SHORTEST_LOCK,
    ) -> None:
        super().__init__(("127.0.0.1", port), _Requests)
        self.namespace = namespace
        self.faults = faults
        self.key = key
        self.shortest_lock = shortest_lock
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: AdminServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(self._get)

    def do_PUT(self) -> None:
        self._serve(self._put)

    def do_DELETE(self) -> None:
        self._serve(self._delete)

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/$double/faults":
            fault = json.loads(body)
            self.server.faults.clear() if not fault else self.server.faults.add(fault)
        self._send(200, json.dumps(self.server.faults.requests).encode())

    def _serve(self, method: Any) -> None:
        body = self._body()
        split = urlsplit(self.path)
        parts = [unquote(part) for part in split.path.strip("/").split("/")]
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        try:
            check_token(self.headers.get("Authorization", ""), self.server.key)
            with self.server.namespace.lock:
                self.server.faults.check("admin", split.path)
                code, answer = method(parts, query, body)
        except Refused as refused:
            text = ET.Element("Error")
            ET.SubElement(text, "Code").text = str(refused.code)
            ET.SubElement(text, "Detail").text = str(refused)
            code, answer = refused.code, text
        self._send(code, ET.tostring(answer, encoding="utf-8"))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/atom+xml;type=entry;charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    # Reads.

    def _get(self, parts: list[str], query: dict[str, str], _: bytes) -> tuple[int, ET.Element]:
        namespace = self.server.namespace
        if parts[0].lower() == "$namespaceinfo":
            return 200, _entry("double", _namespace_info())
        if parts[0].lower() == "$resources":
            kind = "queue" if parts[1].lower() == "queues" else "topic"
            names = [q.path for q in namespace.queues.values()] if kind == "queue" else [
                t.name for t in namespace.topics.values()
            ]  # fmt: skip
            return 200, _feed([self._described(kind, name) for name in sorted(names)], query)
        place = _place(parts)
        if place.rest == ["subscriptions"]:
            topic = namespace.topics.get(place.name.lower())
            found = [] if topic is None else [e.path.rpartition("/")[2] for e in topic.subscriptions.values()]
            return 200, _feed([self._described("subscription", place.name, each) for each in sorted(found)], query)
        if len(place.rest) == 3 and place.rest[2].lower() == "rules":
            rules = namespace.topics[place.name.lower()].rules[place.rest[1].lower()]
            return 200, _feed([_entry(name, _rule(name, filter_)) for name, filter_ in sorted(rules.items())], query)
        try:
            if len(place.rest) == 4:
                filter_ = namespace.topics[place.name.lower()].rules[place.rest[1].lower()][place.rest[3]]
                return 200, _entry(place.rest[3], _rule(place.rest[3], filter_))
            if place.rest:
                return 200, self._described("subscription", place.name, place.rest[1])
            kind = "queue" if place.name.lower() in namespace.queues else "topic"
            return 200, self._described(kind, place.name)
        except KeyError:
            # A missing entity is an empty feed, not an error.
            return 200, ET.Element(f"{{{ATOM}}}feed")

    def _described(self, kind: str, name: str, subscription: str = "") -> ET.Element:
        namespace = self.server.namespace
        if kind == "topic":
            topic = namespace.topics[name.lower()]
            return _entry(
                topic.name, _description(kind, topic.properties, None, subscriptions=len(topic.subscriptions))
            )
        path = f"{name}/Subscriptions/{subscription}" if subscription else name
        entity = namespace.entities[path.lower()]
        letters = namespace.entities[path.lower() + DEAD_LETTERS]
        return _entry(entity.path.rpartition("/")[2] if subscription else entity.path, _description(
            kind, entity.properties, (entity, letters)
        ))  # fmt: skip

    # Changes.

    def _put(self, parts: list[str], _: dict[str, str], body: bytes) -> tuple[int, ET.Element]:
        namespace = self.server.namespace
        place = _place(parts)
        content = ET.fromstring(body).find(f"{{{ATOM}}}content")  # noqa: S314 - the tests' own
        assert content is not None
        described = content[0]
        kind = described.tag.rpartition("}")[2]
        exists = self.headers.get("If-Match") is not None
        if kind == "RuleDescription":
            topic, subscription, rule = place.name, place.rest[1], place.rest[3]
            known = namespace.topics[topic.lower()].rules[subscription.lower()]
            if rule in known and not exists:
                raise Refused("entity-already-exists", f"rule {rule} exists", 409)
            namespace.set_rule(topic, subscription, rule, _read_rule(described))
            return 201, _entry(rule, _rule(rule, known[rule]))
        properties = _read(described)
        check_properties(properties, self.server.shortest_lock)
        if kind == "SubscriptionDescription":
            name = place.rest[1]
            if exists:
                entity = namespace.entities[f"{place.name}/Subscriptions/{name}".lower()]
                namespace.update(entity.properties, properties, place.name, name)
            else:
                check_subscription_name(name)
                self._check_forward(properties)
                namespace.create_subscription(place.name, name, properties)
            return 201, self._described("subscription", place.name, name)
        if exists:
            queue, topic_ = namespace.queues.get(place.name.lower()), namespace.topics.get(place.name.lower())
            target = queue.properties if queue is not None else topic_.properties if topic_ is not None else {}
            namespace.update(target, properties, place.name)
        elif kind == "QueueDescription":
            self._check_forward(properties)
            namespace.create_queue(place.name, properties)
        else:
            namespace.create_topic(place.name, properties)
        return 201, self._described("queue" if kind == "QueueDescription" else "topic", place.name)

    def _check_forward(self, properties: dict[str, Any]) -> None:
        namespace = self.server.namespace
        for name in ("forward_to", "forward_dead_lettered_messages_to"):
            target = properties.get(name)
            if target and target.lower() not in {*namespace.queues, *namespace.topics}:
                raise Refused("bad-request", f"{name} names {target}, which does not exist", 400)

    def _delete(self, parts: list[str], _: dict[str, str], __: bytes) -> tuple[int, ET.Element]:
        namespace = self.server.namespace
        place = _place(parts)
        if len(place.rest) == 4:
            done = namespace.drop_rule(place.name, place.rest[1], place.rest[3])
        elif place.rest:
            done = namespace.drop_subscription(place.name, place.rest[1])
        else:
            done = namespace.drop(place.name)
        if not done:
            raise Refused("entity-not-found", f"{'/'.join(parts)} does not exist", 404)
        return 200, ET.Element("done")


class _Place:
    """The parts of a path: the name of a queue or topic, which may have slashes, and the rest."""

    def __init__(self, parts: list[str]) -> None:
        lower = [part.lower() for part in parts]
        at = lower.index("subscriptions") if "subscriptions" in lower[1:] else len(parts)
        self.name = "/".join(parts[:at])
        self.rest = parts[at:]
        if len(self.rest) == 1:
            self.rest = ["subscriptions"]


def _place(parts: list[str]) -> _Place:
    return _Place(parts)


# Reading and writing descriptions.


def _read(described: ET.Element) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for element in described:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", element.tag.rpartition("}")[2]).lower()
        text = element.text
        if name in _SECONDS:
            found[name] = _seconds(text)
        elif name in _NUMBERS:
            found[name] = whole(name, text)
        elif name in _FLAGS:
            found[name] = text == "true"
        elif name in ("forward_to", "forward_dead_lettered_messages_to"):
            found[name] = re.sub(r"^\w+://[^/]+/", "", text) if text else None
        elif name == "default_rule_description":
            continue
        else:
            found[name] = text
    return found


def _description(
    kind: str, properties: dict[str, Any], entities: tuple[Entity, Entity] | None, subscriptions: int = 0
) -> ET.Element:
    described = ET.Element(f"{{{SB}}}{_KINDS[kind]}")

    def add(name: str, value: object) -> None:
        ET.SubElement(described, f"{{{SB}}}{name}").text = str(value)

    skipped = {"requires_session", "lock_duration", "max_delivery_count"} if kind == "topic" else set[str]()
    for name, value in properties.items():
        if value is None or name in skipped or not re.fullmatch(r"[a-z_]+", name):
            continue
        text = _duration(value) if name in _SECONDS else str(value).lower() if isinstance(value, bool) else value
        add("".join(part.title() for part in name.split("_")).replace("UserMetadata", "UserMetadata"), text)
    moment = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    for name in ("CreatedAt", "UpdatedAt", "AccessedAt"):
        add(name, moment)
    if kind == "topic":
        add("SubscriptionCount", subscriptions)
        add("SizeInBytes", 0)
    if entities is not None:
        entity, letters = entities
        counts = entity.counts()
        add("MessageCount", len(entity.items) + len(letters.items))
        add("SizeInBytes", sum(len(held.raw) for held in entity.items.values()))
        details = ET.SubElement(described, f"{{{SB}}}CountDetails")
        numbers = {
            "ActiveMessageCount": counts["active"] + counts["locked"],
            "DeadLetterMessageCount": len(letters.items),
            "ScheduledMessageCount": counts["scheduled"],
            "TransferMessageCount": 0,
            "TransferDeadLetterMessageCount": 0,
        }
        for name, number in numbers.items():
            ET.SubElement(details, f"{{{COUNTS}}}{name}").text = str(number)
    return described


def _read_rule(described: ET.Element) -> dict[str, Any]:
    filter_ = described.find(f"{{{SB}}}Filter")
    action = described.find(f"{{{SB}}}Action")
    if action is not None and action.attrib.get(f"{{{XSI}}}type", "").endswith("SqlRuleAction"):
        raise Refused("amqp:not-implemented", "the double has no actions of rules", 400)
    kind = "TrueFilter" if filter_ is None else filter_.attrib.get(f"{{{XSI}}}type", "").rpartition(":")[2]
    if filter_ is None or kind == "TrueFilter":
        return {"kind": "true"}
    if kind == "FalseFilter":
        return {"kind": "false"}
    if kind == "SqlFilter":
        return {"kind": "sql", "expression": filter_.findtext(f"{{{SB}}}SqlExpression") or ""}
    system = {name: text for tag, name in _SYSTEM.items() if (text := filter_.findtext(f"{{{SB}}}{tag}")) is not None}
    user = {
        pair.findtext(f"{{{SB}}}Key") or "": pair.findtext(f"{{{SB}}}Value") or ""
        for pair in filter_.iter(f"{{{SB}}}KeyValueOfstringanyType")
    }
    return {"kind": "correlation", "system": system, "user": user}


def _rule(name: str, filter_: dict[str, Any]) -> ET.Element:
    described = ET.Element(f"{{{SB}}}RuleDescription")
    kinds = {"true": "TrueFilter", "false": "FalseFilter", "sql": "SqlFilter", "correlation": "CorrelationFilter"}
    element = ET.SubElement(described, f"{{{SB}}}Filter", {f"{{{XSI}}}type": kinds[filter_["kind"]]})
    if filter_["kind"] == "correlation":
        for tag, system in _SYSTEM.items():
            if system in filter_["system"]:
                ET.SubElement(element, f"{{{SB}}}{tag}").text = filter_["system"][system]
        if filter_["user"]:
            pairs = ET.SubElement(element, f"{{{SB}}}Properties")
            for key, value in filter_["user"].items():
                pair = ET.SubElement(pairs, f"{{{SB}}}KeyValueOfstringanyType")
                ET.SubElement(pair, f"{{{SB}}}Key").text = key
                ET.SubElement(pair, f"{{{SB}}}Value", {f"{{{XSI}}}type": "d6p1:string"}).text = str(value)
    else:
        expressions = {"true": "1=1", "false": "1=0"}
        ET.SubElement(element, f"{{{SB}}}SqlExpression").text = (
            expressions.get(filter_["kind"]) or filter_["expression"]
        )
    ET.SubElement(described, f"{{{SB}}}Action", {f"{{{XSI}}}type": "EmptyRuleAction"})
    ET.SubElement(described, f"{{{SB}}}Name").text = name
    return described


def _namespace_info() -> ET.Element:
    described = ET.Element(f"{{{SB}}}NamespaceInfo")
    for name, text in {
        "Alias": "",
        "CreatedTime": "2026-01-01T00:00:00Z",
        "MessagingSKU": "Standard",
        "ModifiedTime": "2026-01-01T00:00:00Z",
        "Name": "double",
        "NamespaceType": "Messaging",
    }.items():
        ET.SubElement(described, f"{{{SB}}}{name}").text = text
    return described


def _entry(title: str, described: ET.Element) -> ET.Element:
    entry = ET.Element(f"{{{ATOM}}}entry")
    ET.SubElement(entry, f"{{{ATOM}}}title", {"type": "text"}).text = title
    content = ET.SubElement(entry, f"{{{ATOM}}}content", {"type": "application/xml"})
    content.append(described)
    return entry


def _feed(entries: list[ET.Element], query: dict[str, str]) -> ET.Element:
    skip, top = int(query.get("$skip", 0)), int(query.get("$top", 100))
    feed = ET.Element(f"{{{ATOM}}}feed")
    ET.SubElement(feed, f"{{{ATOM}}}title", {"type": "text"}).text = "entities"
    feed.extend(entries[skip : skip + top])
    if len(entries) > skip + top:
        ET.SubElement(feed, f"{{{ATOM}}}link", {"rel": "next", "href": f"?$skip={skip + top}&$top={top}"})
    return feed


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    match = re.fullmatch(r"P(?=.)(?:([\d.]+)D)?(?:T(?:([\d.]+)H)?(?:([\d.]+)M)?(?:([\d.]+)S)?)?", text)
    if match is None or float(match[1] or 0) > 10_675_199:  # the maximum in .NET
        raise Refused("bad-request", f"{text} is no duration")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = days * 86_400 + hours * 3600 + minutes * 60 + seconds
    return None if total > _ENDLESS else total


def _duration(seconds: float) -> str:
    days, rest = divmod(seconds, 86_400)
    return f"P{int(days)}DT{rest:.3f}S"
