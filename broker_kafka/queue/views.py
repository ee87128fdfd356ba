"""How a record that is handed over as a message of a queue is shown. Pure, safe from any thread."""

from __future__ import annotations

from typing import Any, Final

from broker.envelopes import Place
from broker_kafka.headers import RecordView
from broker_kafka.queue.redelivery import attempts_of, origin_of
from broker_kafka.record_headers import headers_of

__all__ = ["QUEUE_VIEW", "UNCOUNTED_VIEW"]


class _UncountedView(RecordView):
    """As any record, and it tells where the message lay before a tracker sent it again."""

    __slots__ = ()

    def place(self, raw: Any, /) -> Place | None:
        origin = origin_of(headers_of(raw) or ())
        return super().place(raw) if origin is None else Place(origin.partition, origin.offset)


class _QueueView(_UncountedView):
    """It also tells which delivery this is."""

    __slots__ = ()

    def delivery_attempt(self, raw: Any, /) -> int | None:
        headers = headers_of(raw)
        return attempts_of(headers) + 1 if headers else 1


QUEUE_VIEW: Final = _QueueView()
"""The one view of all messages of queues."""
UNCOUNTED_VIEW: Final = _UncountedView()
"""That of messages whose markers are V1: those keep no count."""
