"""Finds the backend of a URL's scheme and imports it when it is first asked for.

Built-in schemes come from a static table, then come those given to `register`, then the entry points of group
`broker.backends`, which are scanned only for schemes found nowhere else. Importing this module imports no
backend and no client library. The functions may be called from any thread; a failed load leaves nothing
behind and may be tried again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from broker.errors import ConfigurationError, InvalidSetting, MissingClient, UnknownScheme
from broker.urls import scheme_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from broker.driver.contract import Backend
    from broker.driver.settings import BackendSettings
    from broker.hooks import Hooks

__all__ = [
    "ENTRY_POINT_GROUP",
    "BackendType",
    "create_backend",
    "load_backend",
    "missing_client",
    "read_target",
    "register",
    "schemes",
]

ENTRY_POINT_GROUP: Final = "broker.backends"
"""An entry point here has the scheme as its name and `module:Class` as its value."""


class BackendType(Protocol):
    """The class of a backend."""

    @property
    def settings_type(self) -> type[BackendSettings]: ...
    def __call__(self, settings: Any, hooks: Hooks) -> Backend: ...


class _BuiltIn(NamedTuple):
    target: str
    extra: str
    clients: tuple[str, ...] = ()
    """Top-level modules of the client library."""


_INMEM = _BuiltIn("broker_inmem.backend:InmemBackend", "inmem")
_KAFKA = _BuiltIn("broker_kafka.backend:KafkaBackend", "kafka", ("confluent_kafka",))
_NATS = _BuiltIn("broker_jetstream.backend:JetStreamBackend", "nats", ("nats", "nkeys", "nacl"))
_PUBSUB = _BuiltIn("broker_pubsub.backend:PubSubBackend", "pubsub", ("google", "grpc"))
_PULSAR = _BuiltIn("broker_pulsar.backend:PulsarBackend", "pulsar", ("pulsar",))
_SERVICEBUS = _BuiltIn("broker_servicebus.backend:ServiceBusBackend", "servicebus", ("azure",))

_BUILT_IN: Final[Mapping[str, _BuiltIn]] = {
    "inmem": _INMEM,
    "memory": _INMEM,
    "kafka": _KAFKA,
    "nats": _NATS,
    "tls": _NATS,
    "embedded": _NATS._replace(extra="embedded"),
    "pubsub": _PUBSUB,
    "pulsar": _PULSAR,
    "pulsar+ssl": _PULSAR,
    "servicebus": _SERVICEBUS,
}

_registered: dict[str, str | BackendType] = {}


def register(scheme: str, target: str | BackendType) -> Callable[[], None]:
    """Register a backend for a scheme in this process; returns the function that removes it.

    :param target: the backend class, or `module:Class`, which is imported at first use.
    :raises ConfigurationError: the scheme is built in or invalid, or `target` does not name a class.
    """
    if scheme in _BUILT_IN:
        raise ConfigurationError(f"The scheme {scheme!r} is built in", advice="Register another scheme")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise ConfigurationError(
            f"The scheme {scheme!r} is invalid", advice="Use a lower-case letter, then letters, digits, '+', '.' or '-'"
        )
    if isinstance(target, str) and not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise ConfigurationError(f"The target {target!r} does not name a class", advice="Write 'module:Class'")
    _registered[scheme] = target

    def undo() -> None:
        if _registered.get(scheme) is target:
            del _registered[scheme]

    return undo


def schemes() -> list[str]:
    """All schemes: built in, registered, and from entry points."""
    return sorted({*_BUILT_IN, *_registered, *_entry_points()})


def load_backend(scheme: str) -> BackendType:
    """Import the backend class of a scheme.

    :raises UnknownScheme: no backend has the scheme; the advice is the most similar one.
    :raises MissingClient: the client library of the backend is not installed; the advice is the pip command.
    """
    built_in = _BUILT_IN.get(scheme)
    if built_in is not None:
        return _load_built_in(scheme, built_in)
    registered = _registered.get(scheme)
    if registered is not None:
        return _import(scheme, registered) if isinstance(registered, str) else registered
    entry_point = _entry_points().get(scheme)
    if entry_point is not None:
        return _load_entry_point(scheme, entry_point)
    known = schemes()
    near = get_close_matches(scheme, known, 1, 0.5)
    raise UnknownScheme(
        f"No backend has the scheme {scheme!r}",
        advice=f"Did you mean {near[0]!r}?" if near else f"Known schemes: {', '.join(known)}",
    )


def create_backend(target: str | BackendSettings | None, hooks: Hooks) -> Backend:
    """Create the backend of a URL, a settings object, or (None) the URL in BROKER_URL. Does not connect.

    :raises ConfigurationError: BROKER_URL is not set, or the scheme, a setting or the client library is missing.
    """
    backend_type, settings = read_target(target)
    return backend_type(settings, hooks)


def read_target(target: str | BackendSettings | None) -> tuple[BackendType, BackendSettings]:
    """The class and the settings of the backend that `create_backend` creates.

    :raises ConfigurationError: as for `create_backend`.
    """
    if target is None:
        target = os.environ.get("BROKER_URL", "")
        if not target.strip():
            raise InvalidSetting(
                "No broker was named, and BROKER_URL is not set",
                advice="Call connect(url), or set BROKER_URL, for instance to embedded:",
            )
    if isinstance(target, str):
        backend_type = load_backend(scheme_of(target))
        return backend_type, backend_type.settings_type.from_url(target)
    if not hasattr(target, "schemes"):
        raise ConfigurationError(
            f"The target of type {type(target).__name__} names no broker",
            advice="Pass a URL or the settings object of a backend",
        )
    backend_type = load_backend(target.schemes[0])
    if not isinstance(target, backend_type.settings_type):
        raise ConfigurationError(
            f"The backend of {target.schemes[0]!r} does not take settings of type {type(target).__name__}",
            advice=f"Use {backend_type.settings_type.__name__}",
        )
    return backend_type, target


def missing_client(extra: str, module: str, error: BaseException | None = None) -> MissingClient:
    """The error that names the missing client library and the pip command that installs it."""
    return MissingClient(
        f"The Python package that provides {module!r} is not installed",
        native=error,
        advice=f"Run: pip install 'anybroker[{extra}]'",
    )


def _load_built_in(scheme: str, built_in: _BuiltIn) -> BackendType:
    try:
        return _import(scheme, built_in.target)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in built_in.clients:
            raise missing_client(built_in.extra, module, error) from error
        raise


def _load_entry_point(scheme: str, entry_point: EntryPoint) -> BackendType:
    try:
        return _import(scheme, entry_point.value)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module == entry_point.module.partition(".")[0] or entry_point.dist is None:
            raise
        extras = f"[{','.join(entry_point.extras)}]" if entry_point.extras else ""
        line = f"pip install '{entry_point.dist.name}{extras}'" if extras else f"pip install {module}"
        raise MissingClient(
            f"The backend for {scheme!r} needs the Python module {module!r}, which is not installed",
            native=error,
            advice=f"Run: {line}",
        ) from error


def _import(scheme: str, target: str) -> BackendType:
    module_name, _, attribute = target.partition("[")[0].strip().partition(":")
    found: Any = import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not hasattr(found, "settings_type"):
        raise ConfigurationError(
            f"The target {target!r} of scheme {scheme!r} is not a backend class",
            advice="A backend class has `settings_type` and is created as Class(settings, hooks)",
        )
    return found


def _entry_points() -> dict[str, EntryPoint]:
    # Imported late: this takes longer than the rest of `import broker`.
    from importlib.metadata import entry_points

    return {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
