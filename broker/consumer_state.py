"""`ConsumerState`: what a consumer does now, as probes ask for it. Kept by events; no read asks a broker."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["ConsumerState"]


class ConsumerState(StrEnum):
    """The state of a consumer of messages or records."""

    NEW = "new"
    """Not open yet."""
    RUNNING = "running"
    RETRYING = "retrying"
    """The last fetch failed, and is repeated after a pause."""
    PAUSED = "paused"
    """By `pause()`; a consumer of records pauses partitions, and is not paused itself."""
    STOPPED = "stopped"
    """Stopped, closed, or ended by `stop_when_idle`."""
    FAILED = "failed"
    """Ended by an error."""
