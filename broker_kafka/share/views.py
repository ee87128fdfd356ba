"""How a record of a share group is shown: as any other, with the number of its deliveries. Safe from any thread."""

from __future__ import annotations

from typing import Any, Final

from broker_kafka.codec.headers import RecordView

__all__ = ["SHARE_VIEW"]


class _ShareView(RecordView):
    __slots__ = ()

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return raw.delivery_count()


SHARE_VIEW: Final = _ShareView()
"""The one view of them all."""
