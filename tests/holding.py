"""Keeps a connection open in a thread, so that an embedded server stays up between other connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager

from broker.bus import connect

__all__ = ["holding"]


@contextmanager
def holding(url: str) -> Generator[str]:
    """Keep a connection to the URL open until the block ends; yields the URL."""
    ready: Future[None] = Future()
    done = threading.Event()

    async def hold() -> None:
        try:
            async with connect(url):
                ready.set_result(None)
                await asyncio.to_thread(done.wait)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=asyncio.run, args=(hold(),))
    thread.start()
    try:
        ready.result(30)
        yield url
    finally:
        done.set()
        thread.join()
