"""A consumer in another process: `python -m broker.testing.worker URL TOPIC SUBSCRIPTION HANDLE`.

Acks the first HANDLE messages and prints the hexadecimal body of each on a line; keeps the others unsettled and prints
`holding` for each. Ends when it is killed, or when its standard input is closed.
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
    """Controls the process.

    :ivar handled: bodies that the process has acked, as far as its output was read.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.handled: list[bytes] = []

    @classmethod
    async def start(cls, url: str, topic: str, subscription: str, handle: int) -> Self:
        """Start the process."""
        arguments = ("-m", "broker.testing.worker", url, topic, subscription, str(handle))
        return cls(await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE))

    async def until_holding(self, patience: float) -> None:
        """Wait until the process has acked its messages and holds one more."""
        async with asyncio.timeout(patience):
            while (line := await self._line()) != "holding":
                assert line, f"The worker ended early, with status {await self._process.wait()}"

    def freeze(self) -> None:
        """Stop the process (SIGSTOP) until `thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process (SIGCONT)."""
        self._process.send_signal(signal.SIGCONT)

    async def until_acked(self, count: int, patience: float) -> None:
        """Wait until the process has acked `count` messages."""
        async with asyncio.timeout(patience):
            while len(self.handled) < count:
                assert await self._line(), f"The worker ended early, with status {await self._process.wait()}"

    async def kill(self) -> None:
        """Kill the process (SIGKILL); may be called twice."""
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
                _write_line((message.data or b"").hex())
            else:
                held.append(message)
                _write_line("holding")


def _write_line(line: str) -> None:
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
