"""A consumer in another process, to be killed: `python -m broker.testing.worker URL TOPIC SUBSCRIPTION HANDLE`.

It prints the hexadecimal body of each message it acked, one per line, and `holding` for each it got beyond HANDLE
and keeps unsettled. It ends when it is killed, or when its standard input is closed by the end of its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Self

__all__ = ["Worker"]


class Worker:
    """The parent's side. `handled` grows as lines are read by `until_holding` and `kill`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.handled: list[bytes] = []

    @classmethod
    async def start(cls, url: str, topic: str, subscription: str, handle: int) -> Self:
        """Start the process; it connects by itself."""
        arguments = ("-m", "broker.testing.worker", url, topic, subscription, str(handle))
        return cls(await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE))

    async def until_holding(self, patience: float) -> None:
        """Wait until the process has acked all it should and holds one more message."""
        async with asyncio.timeout(patience):
            while (line := await self._line()) != "holding":
                assert line, f"The worker ended early, with status {await self._process.wait()}"

    def freeze(self) -> None:
        """SIGSTOP: it stands still until `thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    async def until_acked(self, count: int, patience: float) -> None:
        """Wait until so many messages were acked in all."""
        async with asyncio.timeout(patience):
            while len(self.handled) < count:
                assert await self._line(), f"The worker ended early, with status {await self._process.wait()}"

    async def kill(self) -> None:
        """SIGKILL; harmless when it is dead."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        while await self._line():
            pass
        await self._process.wait()

    async def _line(self) -> str:
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode().strip()
        if line and line != "holding":
            self.handled.append(bytes.fromhex(line))
        return line


async def _work(url: str, topic: str, subscription: str, handle: int) -> None:
    from broker.bus import connect

    async with connect(url) as bus, bus.messages(topic, subscription=subscription) as inbox:
        held: list[object] = []
        async for message in inbox:
            if handle > 0:
                await message.ack()
                handle -= 1
                _tell((message.data or b"").hex())
            else:
                held.append(message)
                _tell("holding")


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _main(arguments: list[str]) -> None:
    url, topic, subscription, handle = arguments
    work = asyncio.create_task(_work(url, topic, subscription, int(handle)))
    orphaned = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait((work, orphaned), return_when=asyncio.FIRST_COMPLETED)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
