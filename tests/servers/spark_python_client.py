"""Spark's Python command: has `spark_python` fork a process, and exits like that process.

`spark_python_client DIRECTORY ARGUMENTS...`; it is started without `site`, and imports little.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import signal
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket

LENGTH = 8
STATUS = 2


def main(directory: str, *arguments: str) -> None:
    # One per POSIX session, so that it is found and killed with the other processes of the session.
    connection = connected(f"{directory}/{os.getsid(0)}")
    # Without pathlib, whose import takes longer than everything else.
    given = marshal.dumps((arguments, os.getcwd(), dict(os.environ)))  # noqa: PTH109
    streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in (0, 1, 2))
    connection.sendmsg([len(given).to_bytes(LENGTH, "big")], [(SOL_SOCKET, SCM_RIGHTS, streams)])
    connection.sendall(given)
    # Only the other process has these now, so readers see its end.
    for stream in (0, 1, 2):
        os.close(stream)
    received = connection.recv(STATUS)
    status = int.from_bytes(received, "big", signed=True) if received else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def connected(path: str) -> socket:
    """Connect to the forking process, which is started if missing."""
    if connection := connect(path):
        return connection
    with open(f"{path}.lock", "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)
        if connection := connect(path):
            return connection
        start(path)
    connection = connect(path)
    assert connection, "it has just started"
    return connection


def connect(path: str) -> socket | None:
    connection = socket(AF_UNIX, SOCK_STREAM)
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    return connection


def start(path: str) -> None:
    import subprocess

    root = __file__.rpartition("/tests/")[0]
    # Spark's own puts PySpark before what is installed, as a zip.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_TESTING")}
    # Threads that imports start would not survive a fork; Spark sets this hash seed for its Python too.
    environment |= {
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    with open(f"{path}.log", "ab") as log:  # noqa: PTH123
        forking = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.servers.spark_python", path],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            # Ctrl-C is for other processes.
            process_group=0,
        )
    assert forking.stdout is not None
    if not forking.stdout.readline():
        with open(f"{path}.log") as log:  # noqa: PTH123
            sys.exit(f"What forks Python for Spark did not start: {log.read()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
