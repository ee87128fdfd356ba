"""SIGTERM and SIGINT as a wish to stop, for as long as a block lasts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["stopped_by_signals"]


@contextmanager
def stopped_by_signals(stop: Callable[[], object]) -> Generator[None]:
    """Have each of them call `stop` within the block; nothing but in the main thread, which alone may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def called(number: int, frame: object) -> None:
        del number, frame
        stop()

    before = {number: signal.signal(number, called) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
