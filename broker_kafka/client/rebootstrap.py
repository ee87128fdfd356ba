"""`Rebootstrapper`: re-adds the bootstrap servers to a client that has lost every broker.

A broker that starts or stops may answer for a moment that the cluster has no brokers. librdkafka 2.16.0 then drops the
brokers that it knows and schedules a connection to its bootstrap servers, which the end of the same answer may cancel
for good: `rd_kafka_rebootstrap_tmr_stop` leaves `rk_rebootstrap_in_progress` set. The client never connects again and
reports nothing; its controller id stays -1. `rd_kafka_brokers_add` recovers it. confluent-kafka exposes neither
function, so both are called by ctypes on the handle that is the first field of a client object.

librdkafka has had the race since 2.12.0. The bug and the layout of the object were checked with the versions in
`AFFECTED`; with any other version this module does nothing. `tests/unit/broker_kafka/client/test_rebootstrap.py` fails
when the pinned version leaves that list, and says how to find out whether this module can be deleted.

*Concurrency.* `watch` and `unwatch` are called by the thread that owns the client, `unwatch` before the client is
closed. The event loop checks the client once a second.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

import confluent_kafka

from broker.driver import logger

__all__ = ["AFFECTED", "Rebootstrapper"]

AFFECTED: Final = frozenset({"2.16.0"})
"""The librdkafka versions that need this module."""
_CHECK_SECONDS: Final = 1.0
_MOST_PATIENCE: Final = 32
_NO_CONTROLLER: Final = -1


class Rebootstrapper:
    """Watches one client at a time. Make it on the event loop.

    :param config: of the clients.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._servers = str(config.get("bootstrap.servers", "")).encode()
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        """Held while the client is used, so that its thread does not close it meanwhile."""
        self._handle: ctypes.c_void_p | None = None
        self._misses = 0
        """Checks in a row that found no broker."""
        self._patience = 1
        """Misses to let pass before the servers are added; doubled with each addition."""
        self._checking = False

    def watch(self, client: object) -> None:
        """Check this client from now on."""
        if _LIBRARY is None:
            return
        with self._lock:
            self._handle = _handle_of(client)
            self._misses, self._patience = 0, 1
            start, self._checking = not self._checking, True
        if start:
            try:
                self._loop.call_soon_threadsafe(self._tick)
            except RuntimeError:
                logger.debug("The event loop is closed; the client's brokers are not checked")

    def unwatch(self) -> None:
        """Stop using the client. May be called twice."""
        with self._lock:
            self._handle = None

    def _tick(self) -> None:
        with self._lock:
            if self._handle is None:
                self._checking = False
                return
            self._check(self._handle)
        self._loop.call_later(_CHECK_SECONDS, self._tick)

    def _check(self, handle: ctypes.c_void_p) -> None:
        if _LIBRARY.rd_kafka_controllerid(handle, 0) != _NO_CONTROLLER:
            self._misses, self._patience = 0, 1
            return
        self._misses += 1
        if self._misses > self._patience:
            self._misses, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)
            _LIBRARY.rd_kafka_brokers_add(handle, self._servers)
            logger.info("A Kafka client knew of no broker; added its bootstrap servers again")


def _handle_of(client: object) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.c_void_p.from_address(id(client) + object.__basicsize__).value)


def _library() -> Any:
    """The librdkafka that confluent-kafka has loaded; None if it has another version, or its functions are missing."""
    version = confluent_kafka.libversion()[0]
    if version not in AFFECTED:
        logger.debug("librdkafka %s is not known to lose its bootstrap servers; clients are not watched", version)
        return None
    try:
        # A name is looked up in what this extension was linked with, wherever librdkafka is installed.
        library = ctypes.CDLL(confluent_kafka.cimpl.__file__)
        library.rd_kafka_controllerid.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.rd_kafka_controllerid.restype = ctypes.c_int32
        library.rd_kafka_brokers_add.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        library.rd_kafka_brokers_add.restype = ctypes.c_int
    except (AttributeError, OSError) as error:
        logger.info("A Kafka client that loses every broker cannot be recovered here: %s", error)
        return None
    return library


_LIBRARY: Final = _library()
