"""TLS and WebSockets, as a namespace has them, in front of the double, which speaks plain AMQP and HTTP.

Loopback only; runs on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

from aiohttp import WSMsgType, web

__all__ = ["tls_in_front_of", "websocket_in_front_of"]

_CHUNK: Final = 65_536


@asynccontextmanager
async def tls_in_front_of(port: int, tls: ssl.SSLContext) -> AsyncGenerator[int]:
    """A TLS port that forwards to `port`."""
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            handlers.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for handler in list(handlers):
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


@asynccontextmanager
async def websocket_in_front_of(port: int, tls: ssl.SSLContext) -> AsyncGenerator[int]:
    """A port for WebSockets over TLS that forwards to `port`."""

    async def serve(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=("AMQPWSB10",))
        await socket.prepare(request)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        back = asyncio.ensure_future(_answer(reader, socket))
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                writer.write(message.data)
                await writer.drain()
        writer.close()
        back.cancel()
        return socket

    application = web.Application()
    application.router.add_get("/{path:.*}", serve)
    runner = web.AppRunner(application, shutdown_timeout=1)
    async with AsyncExitStack() as stack:
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        yield runner.addresses[0][1]


async def _answer(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    while data := await reader.read(_CHUNK):
        await socket.send_bytes(data)
    await socket.close()
