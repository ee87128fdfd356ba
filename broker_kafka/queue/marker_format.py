"""In which format consumers write their markers, so that others than trackers of this SDK can follow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["FORMATS", "MarkerFormat"]


class MarkerFormat(NamedTuple):
    """:ivar together: of how many messages one record, and one KEEPALIVE or END, may tell.
    :ivar by_key: whether markers lie in the partition of their message's key, where kafka-mq-go's tracker writes the
        END of what it sends again.
    :ivar v1: whether markers are those of kafka-mq-go to the byte, and what V1 has no field for is lost.
    """

    together: int
    by_key: bool
    v1: bool


FORMATS: Final[Mapping[str, MarkerFormat]] = {
    "v2": MarkerFormat(together=200, by_key=False, v1=False),
    "v2-single": MarkerFormat(together=1, by_key=True, v1=False),
    "v1": MarkerFormat(together=1, by_key=True, v1=True),
}
"""By the setting `marker_format`. Who knows V1 alone follows the last two: it skips fields that it does not know."""
