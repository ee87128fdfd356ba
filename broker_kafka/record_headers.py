"""The headers of records as the client tells them, and of those that it cannot read none.

A header's name is bytes in Kafka and text in confluent-kafka. Where it is not UTF-8 the client fails at the first look
and leaves a list behind that ends the process once it is used. So that nobody meets it, such a record is given no
headers, which also is what `native.headers()` tells from then on, and that is logged, once for each topic. Everything
here that wants headers of records asks these functions. *Concurrency.* From any thread; of one record from one at a
time, before it was asked for first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Final, cast

from confluent_kafka import Message as NativeRecord

from broker.hooks import logger

__all__ = ["Headers", "headers_of", "headers_of_each"]

Headers = Sequence[tuple[str, bytes | None]]

# A call that the interpreter has specialised does not look for the exception that the client leaves; one from C does.
_ask: Final = cast("Callable[[Any], Headers | None]", methodcaller("headers"))
_headers: Final = cast("Callable[[Any], Headers | None]", NativeRecord.headers)
_told: Final[set[str]] = set()
_MOST_TOLD: Final = 1000


def headers_of(raw: Any) -> Headers | None:
    """Those of one record; None if it has none."""
    try:
        return _ask(raw)
    except SystemError as error:
        return _unreadable(raw, error)


def headers_of_each(raws: Sequence[Any]) -> list[Headers | None]:
    """Those of many records."""
    found: list[Headers | None] = []
    rest = iter(raws)
    while True:
        try:
            found.extend(map(_headers, rest))
            return found
        except SystemError as error:
            # It is behind those that were found, and must not be asked a second time.
            found.append(_unreadable(raws[len(found)], error))


def _unreadable(raw: Any, error: SystemError) -> Headers:
    if not isinstance(error.__cause__, UnicodeDecodeError):
        raise error
    raw.set_headers([])
    topic = raw.topic()
    if topic not in _told and len(_told) < _MOST_TOLD:
        _told.add(topic)
        logger.warning(
            "A header of record %s[%d]@%d has a name that is not UTF-8. The client cannot read its headers, and it is "
            "handed over without any, as all such records are",
            topic,
            raw.partition(),
            raw.offset(),
        )
    return ()
