"""The one door to pulsar-client, which has no types: its modules as they are, and names for its objects."""

from __future__ import annotations

from typing import Any, TypeAlias

import pulsar as _pulsar  # pyright: ignore[reportMissingTypeStubs]
from pulsar import exceptions as _exceptions  # pyright: ignore[reportMissingTypeStubs]

__all__ = ["Client", "Consumer", "Message", "MessageId", "Producer", "Reader", "exceptions", "pulsar"]

pulsar: Any = _pulsar
exceptions: Any = _exceptions
Client: TypeAlias = Any
Consumer: TypeAlias = Any
Message: TypeAlias = Any
MessageId: TypeAlias = Any
Producer: TypeAlias = Any
Reader: TypeAlias = Any
