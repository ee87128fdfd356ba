"""Standard streams never block the loop, count exactly what was written, and can be interrupted."""

from __future__ import annotations

import asyncio
import io
import os
import sys

import pytest

from broker.cli.streams import Sink, Source


@pytest.fixture
def pipe():
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as reader, os.fdopen(write, "wb", buffering=0) as writer:
        yield reader, writer


async def test_a_full_pipe_suspends_the_writer_only_and_is_counted_exactly(pipe):
    reader, writer = pipe
    sink = Sink(writer)
    data = os.urandom(300_000)
    task = asyncio.create_task(sink.write(data))
    ticks = 0
    received = b""
    while not task.done():
        # The loop runs while the pipe is full.
        await asyncio.sleep(0)
        ticks += 1
        if ticks % 10 == 0 and len(received) < len(data):
            received += await asyncio.to_thread(os.read, reader.fileno(), 20_000)
    await task
    while len(received) < len(data):
        received += os.read(reader.fileno(), 65536)
    assert received == data
    assert sink.written == len(data)


async def test_a_blocked_write_can_be_cancelled_and_counts_the_written_bytes(pipe):
    reader, writer = pipe
    sink = Sink(writer)
    task = asyncio.create_task(sink.write(b"x" * 1_000_000))
    await asyncio.sleep(0)
    assert sink.written
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    os.set_blocking(reader.fileno(), False)
    received = 0
    while part := reader.read(65536):
        received += len(part)
    assert received == sink.written < 1_000_000


async def test_a_closed_pipe(pipe):
    reader, writer = pipe
    sink = Sink(writer)
    assert not sink.broken()
    reader.close()
    assert sink.broken()
    with pytest.raises(BrokenPipeError):
        await sink.write(b"x")
    assert sink.written == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other pipes do not tell their writer")
async def test_what_the_reader_of_a_pipe_has_read_is_known(pipe):
    reader, writer = pipe
    sink = Sink(writer)
    await sink.write(b"one\ntwo\n")
    assert (sink.written, sink.taken) == (8, 0)
    first = asyncio.create_task(sink.wait_taken(4))
    await asyncio.sleep(0)
    assert not first.done()
    assert reader.read(5) == b"one\nt"
    await first
    assert sink.taken == 5
    last = asyncio.create_task(sink.wait_taken(8))
    await asyncio.sleep(0)
    reader.close()
    with pytest.raises(BrokenPipeError):
        await last
    assert (sink.written, sink.taken) == (8, 5)


async def test_an_idle_writer_suspends_the_reader_only(pipe):
    reader, writer = pipe
    source = Source(reader)
    lines = source.lines()
    first = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)
    assert not first.done()
    writer.write(b"one\ntw")
    assert await first == b"one"
    writer.write(b"o\nend")
    assert await anext(lines) == b"two"
    writer.close()
    assert [line async for line in lines] == [b"end"]


async def test_streams_in_memory_and_files(tmp_path):
    buffer = io.BytesIO()
    sink = Sink(buffer)
    await sink.write(b"abc")
    assert (buffer.getvalue(), sink.written, sink.taken, sink.broken()) == (b"abc", 3, 3, False)
    path = tmp_path / "data"
    with path.open("wb") as file:
        sink = Sink(file)
        await sink.write(b"abc")
        assert (sink.written, sink.taken) == (3, 3)
    path.write_bytes(b"\n".join([b"x" * 100_000, b"", b"y"]))
    with path.open("rb") as file:
        assert [len(line) async for line in Source(file).lines()] == [100_000, 0, 1]
    with path.open("rb") as file:
        assert await Source(file).read_all() == path.read_bytes()
