"""The options of a record consumer."""

from __future__ import annotations

from typing import Literal, TypedDict

from broker.reading.group_member import OnRevoking
from broker.spi import Start

__all__ = ["RecordOptions"]


class RecordOptions(TypedDict, total=False):
    """The keyword options of `Bus.records`, which documents each."""

    start: Start
    isolation: Literal["read_committed", "read_uncommitted"]
    on_decode_error: str
    on_revoking: OnRevoking | None
    max_buffered: int
    stop_when_idle: float | None
    close_timeout: float
