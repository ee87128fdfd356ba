"""A TCP proxy that can cut or freeze connections. Runs in a thread; every call returns at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Self

__all__ = ["Proxy"]


class Proxy:
    """Forwards a local port to a server; `cut` breaks all connections, at once or after some bytes."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._budget: int | None = None
        self._open = asyncio.Event()
        self._refusing = False
        self._last = False
        self.cuts = 0
        self.refusals = 0
        """How many connections were not taken."""
        self.passed = 0
        """How many bytes have come from the server."""
        self.held = False
        """Whether anything was said since nothing is let through."""
        self.answered = False
        """Whether the server said it; a client may have pinged it only."""

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def cut(self, after_bytes: int = 0, *, for_good: bool = False) -> None:
        """Break all connections after `after_bytes` more bytes from the server.

        :param for_good: also refuse new ones from then on.
        """

        async def set_budget() -> None:
            self._budget = after_bytes
            self._last = for_good
            if not after_bytes:
                self._break()

        self._run(set_budget())

    def refuse(self, refusing: bool = True) -> None:
        """Break all connections and refuse new ones, or accept them again."""

        async def change() -> None:
            self._refusing = refusing
            if refusing:
                self._break()

        self._run(change())

    def hold(self, holding: bool = True) -> None:
        """Stop forwarding without closing, or continue."""

        async def change() -> None:
            self.held = self.answered = False
            self._open.clear() if holding else self._open.set()

        self._run(change())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        self._open.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        # A connection just accepted becomes a task after three turns of the loop, and only then can be ended.
        for _ in range(3):
            await asyncio.sleep(0)
        self._break()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _break(self) -> None:
        self._budget = None
        self._refusing, self._last = self._refusing or self._last, False
        self.cuts += bool(self._writers)
        for writer in tuple(self._writers):
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self.refusals += 1
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        pair = {writer, server_writer}
        self._writers |= pair
        try:
            await asyncio.gather(
                self._pump(reader, server_writer, counted=False), self._pump(server_reader, writer, counted=True)
            )
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not self._open.is_set():
                    self.held = True
                    self.answered |= counted
                    await self._open.wait()
                if counted and self._budget is not None:
                    part, self._budget = data[: self._budget], self._budget - len(data)
                    if self._budget <= 0:
                        writer.write(part)
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.2):
                                await writer.drain()
                        # Written bytes must be sent before the connection is broken.
                        await asyncio.sleep(0.01)
                        self._break()
                        return
                self.passed += len(data) if counted else 0
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
