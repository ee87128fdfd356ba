"""A child process that ends with this one, and that can be stopped, frozen and thawed. Blocking; for any thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

__all__ = ["ChildProcess"]

_ASK_AND_RUN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)  # the owner died before the kernel was asked
os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """One run of a program whose output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        # The kernel ends a child with the thread that started it, so that thread must keep running.
        self._process = _starter().submit(_spawn, list(command), log).result()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def return_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self, how: signal.Signals, seconds: float) -> None:
        """Send the signal and wait; after `seconds` it is killed.

        :raises RuntimeError: it had to be killed.
        """
        if self._process.poll() is not None:
            return
        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"Process {self.pid} did not end within {seconds} s of {how.name}") from None

    def pause(self) -> None:
        """Freeze it, and wait until no thread of it runs."""
        os.kill(self.pid, signal.SIGSTOP)
        while self._runs():
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _runs(self) -> bool:
        states: list[str] = []
        for path in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            try:
                states.append(path.read_text().rpartition(")")[2].split()[0])
            except OSError:
                continue  # that thread has ended
        return any(state not in "TtZX" for state in states)


@cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="test-child-starter")


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    if sys.platform.startswith("linux"):
        command = [sys.executable, "-I", "-S", "-c", _ASK_AND_RUN, str(os.getpid()), *command]
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for this process
        )
