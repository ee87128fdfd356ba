"""Sets up a session on one machine so that Spark's Python processes start fast and talk over Unix sockets. Blocking.

*Start.* Spark starts several Python processes per query and gives each of them ten seconds. It puts an archive with
PySpark's sources first on their path, which Python compiles again in every process. `compiled_home` gives Spark's JVM a
SPARK_HOME of links without this archive, so that the processes load the installed, compiled PySpark.

*Sockets.* Over TCP each task of a Python source takes about 40 ms more. `socket_settings` picks a directory that is
short enough for Spark's Unix sockets. Whoever connects to one may run code, since Spark authenticates over TCP only; so
the directory is for the own user alone.

*Failure.* Where either is impossible, Spark keeps its defaults; a fallback to TCP is logged as a warning. A home that
another user made, whose programs Spark would run, is refused.
"""

from __future__ import annotations

import hashlib
import os
import site
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyspark
from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]

from broker.driver import check_unshared, make_private_directory, narrow_mode
from broker.hooks import logger

__all__ = ["compiled_home", "home_without_archive", "socket_settings"]

_HOME: Final = "SPARK_HOME"
_LINKS: Final = ("bin", "conf", "jars", "sbin")
"""`conf` may be created after the link."""
_CACHES: Final = "XDG_CACHE_HOME"
_SOCKETS: Final = "spark.python.unix.domain.socket.enabled"
_SOCKET_DIR: Final = "spark.python.unix.domain.socket.dir"
_MAX_SOCKET_DIR: Final = 61
"""Characters that Spark accepts in the path of the socket directory."""


@contextmanager
def compiled_home() -> Generator[None]:
    """Start a JVM within the block with a home without the archive, unless SPARK_HOME or another Python is set.

    :raises ConfigurationError: another user made the home, or can change it.
    """
    home = None
    if _HOME not in os.environ and os.environ.get("PYSPARK_PYTHON") == sys.executable:
        home = home_without_archive(Path(_find_spark_home()), _caches())
    if home is None:
        yield
        return
    os.environ[_HOME] = str(home)
    try:
        yield
    finally:
        os.environ.pop(_HOME, None)


def home_without_archive(real: Path, caches: Path) -> Path | None:
    """A SPARK_HOME without the archive of sources, kept and shared by all processes; None where it cannot be made.

    :param real: Spark's own home.
    :param caches: the directory for such homes.
    :raises ConfigurationError: another user made the directory or the home, or can change them.
    """
    # A PySpark that only a changed `sys.path` finds is not found by other processes.
    installed = {Path(each).resolve() for each in (*site.getsitepackages(), site.getusersitepackages())}
    if real.resolve() != Path(pyspark.__file__).resolve().parent or real.resolve().parent not in installed:
        return None
    key = f"{real.resolve()} {pyspark.__version__}"
    home = caches / f"spark-home-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with suppress(OSError):
        make_private_directory(caches)
        check_unshared(caches, _CACHES)
        # The rename is atomic. It fails where another process was faster.
        if not home.is_dir():
            with tempfile.TemporaryDirectory(prefix="spark-home-", dir=caches) as made:
                half = Path(made, "half")
                make_private_directory(half)
                for name in _LINKS:
                    (half / name).symlink_to(real.resolve() / name, target_is_directory=True)
                half.rename(home)
    with suppress(OSError):
        if home.is_dir():
            check_unshared(home, _CACHES)
            if all((home / name).readlink() == real.resolve() / name for name in _LINKS):
                return home
    return None


def _caches() -> Path:
    return Path(os.environ.get(_CACHES) or Path.home() / ".cache", "anybroker")


def socket_settings(configured: Mapping[str, str]) -> dict[str, str]:
    """The settings with which Spark and its Python processes use Unix sockets, or TCP where these are impossible.

    By default Spark uses Java's directory for temporary files, and does not start if its path is too long.

    :param configured: settings of the application, which take precedence.
    """
    if _SOCKETS in configured and configured[_SOCKETS].lower() != "true":
        return {}
    if not hasattr(socket, "AF_UNIX"):
        return {_SOCKETS: "false"}
    own = configured.get(_SOCKET_DIR)
    roots = dict.fromkeys((tempfile.gettempdir(), "/tmp"))  # noqa: S108
    # It stays, as a server of Spark Connect may outlive this process.
    directories = [f"{root}/anybroker-{os.getuid()}" for root in roots] if own is None else [own]
    reasons: list[str] = []
    for directory in directories:
        reason = (_why_not_private(directory) if own is None else None) or _why_no_sockets(directory)
        if reason is None:
            return {_SOCKETS: "true", _SOCKET_DIR: directory}
        reasons.append(f"{directory}: {reason}")
    logger.warning(
        "Spark talks to its Python processes over TCP, which adds about 40 ms to each task: Unix sockets are not "
        "possible in %s. Set %s to a directory with a short path",
        "; ".join(reasons),
        _SOCKET_DIR,
    )
    return {_SOCKETS: "false"}


def _why_no_sockets(directory: str) -> str | None:
    """Why Spark cannot create Unix sockets in a directory; None if it can."""
    if len(directory) > _MAX_SOCKET_DIR:
        return f"its path has {len(directory)} characters, and Spark accepts {_MAX_SOCKET_DIR}"
    # As long as the names that Spark uses.
    path = Path(directory, f".{uuid.uuid4()}.sock")
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _why_not_private(directory: str) -> str | None:
    """Why a directory, which is made if it is missing, is not for the own user alone; None if it is."""
    path = Path(directory)
    try:
        if path.is_symlink() or path.exists():
            narrow_mode(path)
        else:
            make_private_directory(path)
        found = path.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return "others can use it"
    return None
