"""Python processes for Spark that start at once, without a second or two of CPU for imports.

Spark starts a process for each plan, source and sink, and each imports PySpark, pyarrow and this package. Here one
process has imported it all and forks for them. Spark's Python is then `spark_python_client`, which hands its arguments,
environment and standard streams over, and starts what forks where there is none. What was forked gets SIGTERM when its
client is killed; the forking process ends after a while without use.
"""

from __future__ import annotations

import atexit
import gc
import marshal
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

from tests.servers import spark_python_client
from tests.servers.spark_python_client import LENGTH, STATUS

__all__ = ["quick_python", "spark_home"]

_IDLE_SECONDS: Final = 10.0
_IMPORTED: Final = (
    "numpy",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.sql",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.worker",
    "broker_jetstream.backend",
    "broker_kafka.backend",
    "broker_spark.data_source",
)


@contextmanager
def quick_python() -> Generator[None]:
    """Spark sessions created in this block, also by child processes, use this Python.

    SPARK_HOME is that of other sessions, which another Python would not find.
    """
    settings = {"PYSPARK_PYTHON": str(_python()), "SPARK_HOME": str(spark_home())}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@cache
def spark_home() -> Path:
    """The default SPARK_HOME, with Spark's jars."""
    # Imported late: the forking process imports this module too, before its first request.
    from pyspark.find_spark_home import _find_spark_home

    from broker_spark.runtime.local import _caches, home_without_archive

    real = Path(_find_spark_home())
    return home_without_archive(real, _caches()) or real


@cache
def _python() -> Path:
    """The command for Python."""
    directory = Path(tempfile.mkdtemp(prefix="anybroker-test-python-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "python"
    path.write_text(
        "#!/bin/sh\n"
        # Calls without `-m` are rare, and run Python itself.
        f'[ "$1" = -m ] && exec "{sys.executable}" -I -S "{spark_python_client.__file__}" "{directory}" "$@"\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    path.chmod(0o755)
    return path


class _Wanted(NamedTuple):
    """A requested process; `streams` are 0, 1 and 2."""

    arguments: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    streams: list[int]


class _Forking:
    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(64)
        self._clients: dict[int, socket.socket] = {}
        self._ended, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        for each in (self._ended, self._listening):
            self._selector.register(each, selectors.EVENT_READ)

    def serve(self) -> _Wanted | None:
        """Accept requests; returns one in a forked process, and None after a while without clients."""
        while events := self._selector.select(None if self._clients else _IDLE_SECONDS):
            for key, _ in events:
                if key.fileobj == self._ended:
                    os.read(self._ended, 512)
                    self._reap()
                elif key.fileobj is not self._listening:
                    self._drop(key.data)
                elif wanted := self._accept():
                    return wanted
        return None

    def _accept(self) -> _Wanted | None:
        client, _ = self._listening.accept()
        with client.makefile("rb") as file:
            length, streams, *_ = socket.recv_fds(client, LENGTH, 3)
            given = file.read(int.from_bytes(length, "big"))
        process = os.fork()
        if process == 0:
            client.close()
            self._close()
            arguments, directory, environment = marshal.loads(given)  # noqa: S302
            return _Wanted(arguments, directory, environment, streams)
        for stream in streams:
            os.close(stream)
        self._clients[process] = client
        self._selector.register(client, selectors.EVENT_READ, process)
        return None

    def _reap(self) -> None:
        """Report the exit of each ended process."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                client = self._clients.pop(ended[0])
                with suppress(KeyError):
                    self._selector.unregister(client)
                with client, suppress(OSError):
                    client.sendall(os.waitstatus_to_exitcode(ended[1]).to_bytes(STATUS, "big", signed=True))

    def _drop(self, process: int) -> None:
        """A client was killed."""
        if client := self._clients.get(process):
            self._selector.unregister(client)
            os.kill(process, signal.SIGTERM)

    def _close(self) -> None:
        """Close everything in a forked process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._listening.close()
        for client in self._clients.values():
            client.close()
        os.close(self._ended)
        os.close(self._wake)


def _become(wanted: _Wanted) -> None:
    """Be `python -m MODULE ARGUMENTS...`."""
    for number, stream in enumerate(wanted.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(wanted.directory)
    os.environ.clear()
    os.environ.update(wanted.environment)
    time.tzset()
    _, module, *rest = wanted.arguments
    given = wanted.environment.get("PYTHONPATH", "")
    sys.path[:1] = [wanted.directory, *filter(None, given.split(os.pathsep))]
    sys.argv = [module, *rest]
    # It is run, not imported.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(path: str) -> None:
    for name in _IMPORTED:
        import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would not be there after a fork"
    gc.collect()
    gc.freeze()
    forking = _Forking(Path(path))
    sys.stdout.write("ready\n")
    # Its parent ends soon.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    wanted = forking.serve()
    if wanted is not None:
        _become(wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
