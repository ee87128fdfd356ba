"""`Lifeline`: gives a client its bootstrap servers again once it knows of no broker at all.

A broker that starts or stops may answer for a moment that there are no brokers. librdkafka (2.10 to 2.16) then drops
the ones it has and schedules a look at its bootstrap servers, which the end of the same answer may cancel, for good:
`rd_kafka_rebootstrap_tmr_stop` leaves `rk_rebootstrap_in_progress` set. Such a client is lost, and says nothing. Its
controller's id tells: it is -1. `rd_kafka_brokers_add` mends it, but confluent-kafka passes neither on, so
both are called by their C names. What they take is the first field of every client object of confluent-kafka 2.

*Concurrency.* `hold` and `let_go` are called by the thread that owns the client, before it closes it; the event loop
looks. *Failure.* Where the C names are not to be had, nothing is mended, and a line of the log says so.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

import confluent_kafka

from broker.driver import logger

__all__ = ["Lifeline"]

_LOOK: Final = 1.0
_LONGEST_PAUSE: Final = 32
_UNKNOWN: Final = -1


class Lifeline:
    """For one client after the other. Make it on the event loop, which looks once a second while a client is held.

    :param config: of the clients.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._servers = str(config.get("bootstrap.servers", "")).encode()
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        """Held while the client is used, so that it is not closed meanwhile."""
        self._handle: ctypes.c_void_p | None = None
        self._blank = 0
        self._patience = 1
        self._ticking = False

    def hold(self, client: object) -> None:
        """Look after this client from now on."""
        if _LIBRARY is None:
            return
        with self._lock:
            self._handle = _handle_of(client)
            self._blank, self._patience = 0, 1
            begin, self._ticking = not self._ticking, True
        if begin:
            try:
                self._loop.call_soon_threadsafe(self._tick)
            except RuntimeError:
                logger.debug("Nobody runs the loop any more")

    def let_go(self) -> None:
        """Touch the client no more; may be called twice."""
        with self._lock:
            self._handle = None

    def _tick(self) -> None:
        with self._lock:
            if self._handle is None:
                self._ticking = False
                return
            self._look(self._handle)
        self._loop.call_later(_LOOK, self._tick)

    def _look(self, handle: ctypes.c_void_p) -> None:
        """Mend the client if it knew no broker at the last looks either."""
        if _LIBRARY.rd_kafka_controllerid(handle, 0) != _UNKNOWN:
            self._blank, self._patience = 0, 1
            return
        self._blank += 1
        if self._blank > self._patience:
            self._blank, self._patience = 0, min(2 * self._patience, _LONGEST_PAUSE)
            _LIBRARY.rd_kafka_brokers_add(handle, self._servers)
            logger.info("A client knew of no broker any more, and was given its bootstrap servers again")


def _handle_of(client: object) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.c_void_p.from_address(id(client) + object.__basicsize__).value)


def _library() -> Any:
    """The librdkafka that confluent-kafka has loaded; None if it is not to be had."""
    try:
        # Names are looked up in what this module was linked with, so the library is found wherever it lies.
        library = ctypes.CDLL(confluent_kafka.cimpl.__file__)
        library.rd_kafka_controllerid.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.rd_kafka_controllerid.restype = ctypes.c_int32
        library.rd_kafka_brokers_add.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        library.rd_kafka_brokers_add.restype = ctypes.c_int
    except (AttributeError, OSError) as error:
        logger.info("Clients that lose all brokers cannot be mended here: %s", error)
        return None
    return library


_LIBRARY: Final = _library()
