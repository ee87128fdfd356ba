"""The server of probes: slow, large and many requests neither stop the server nor keep its connections."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter

import pytest

from broker import ConfigurationError, probes
from broker.probes import ProbeServer, probe
from broker.testing.waiting import eventually

ASK = b"GET /health HTTP/1.1\r\n\r\n"


def server(trouble: str = "") -> ProbeServer:
    return ProbeServer("127.0.0.1", 0, {"/health": probe(lambda: trouble)})


async def opened(server: ProbeServer) -> tuple[StreamReader, StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))


async def answer(server: ProbeServer) -> bytes:
    reader, writer = await opened(server)
    writer.write(ASK)
    try:
        return await reader.read()
    finally:
        writer.close()


async def dropped(reader: StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_a_name_that_cannot_be_looked_up_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"The address a\.\.b:80 cannot be used"):
        await ProbeServer("a..b", 80, {}).__aenter__()


async def test_a_large_request_is_dropped() -> None:
    async with server() as listening:
        reader, writer = await opened(listening)
        writer.write(b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000)
        assert await dropped(reader)
        writer.close()
        assert (await answer(listening)).endswith(b"\r\n\r\nok\n")


async def test_a_slow_request_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_PATIENCE", 0.05)
    async with server() as listening:
        reader, writer = await opened(listening)
        writer.write(ASK[:-2])
        assert await dropped(reader)
        writer.close()
        assert (await answer(listening)).endswith(b"\r\n\r\nok\n")


async def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_PATIENCE", 0.05)
    async with server("x" * 50_000_000) as listening:
        _, writer = await opened(listening)
        writer.write(ASK)
        await eventually(lambda: listening._requests == 1, 30)
        await eventually(lambda: listening._requests == 0, 30)
        writer.close()
        assert (await answer(listening)).startswith(b"HTTP/1.1 503 ")


async def test_many_requests_at_a_time_are_dropped() -> None:
    async with server() as listening:
        held = [await opened(listening) for _ in range(probes._MOST)]
        await eventually(lambda: listening._requests == probes._MOST, 30)
        reader, writer = await opened(listening)
        assert await dropped(reader)
        writer.close()
        for reader, writer in held:
            writer.write(ASK)
            assert (await reader.read()).endswith(b"ok\n")
            writer.close()
        await eventually(lambda: listening._requests == 0, 30)
        assert (await answer(listening)).endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize("line", [b"\r\n\r\n", b"\x00\xff\x1b[2J\r\n\r\n", b"GET  /../../etc/passwd HTTP/9\r\n\r\n"])
async def test_garbage_is_answered_with_a_refusal(line: bytes) -> None:
    async with server() as listening:
        reader, writer = await opened(listening)
        writer.write(line)
        assert (await reader.readline()).startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 405 "))
        writer.close()
