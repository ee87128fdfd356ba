"""Files and directories for the own user alone, whatever the umask. Blocking; any thread.

What was made wider, for instance by hand, is narrowed with a log line. What another user made is refused, unless that
is root. Windows has no such modes: there, the access rights of the parent directory hold.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from broker.errors import ConfigurationError
from broker.hooks import logger

__all__ = ["check_owner", "check_unshared", "create_private_file", "make_private_directory", "narrow_mode"]

_FILE: Final = 0o600
_DIRECTORY: Final = 0o700
_OTHERS: Final = 0o077
_OTHERS_WRITE: Final = 0o022
_ROOT: Final = 0


def make_private_directory(path: Path) -> list[Path]:
    """Create a directory and its missing parents; returns the new ones, the outermost first."""
    missing = [path]
    while not missing[-1].parent.is_dir():
        missing.append(missing[-1].parent)
    made: list[Path] = []
    for each in reversed(missing):
        try:
            each.mkdir(_DIRECTORY)
        except FileExistsError:
            # Another process was faster.
            if not each.is_dir():
                raise
            continue
        # The umask may have taken more away.
        each.chmod(_DIRECTORY)
        made.append(each)
    return made


def create_private_file(path: Path) -> BinaryIO:
    """Create a file and open it for writing.

    :raises FileExistsError: something has the name, if only a symbolic link.
    """
    file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, _FILE))  # noqa: SIM115
    if os.name != "nt":
        os.fchmod(file.fileno(), _FILE)
    return file


def narrow_mode(path: Path) -> None:
    """Take the rights of the group and of others from a file or directory of the own user; symbolic links stay.

    A directory that all may use, such as /tmp, stays as it is.
    """
    if os.name == "nt":
        return
    # Some file systems have no modes.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or not found.st_mode & _OTHERS or found.st_mode & stat.S_ISVTX:
                return
            was = stat.S_IMODE(found.st_mode)
            now = was & ~_OTHERS
            os.fchmod(descriptor, now)
        finally:
            os.close(descriptor)
        logger.warning("%s had the mode %03o, which gave other users access; it has %03o now", path, was, now)


def check_owner(path: Path, setting: str) -> None:
    """Refuse a file or directory of another user, also through a symbolic link; a missing one passes.

    :param setting: what chooses the place, for the error.
    :raises ConfigurationError: another user than root owns it, or a link to it.
    """
    if os.name == "nt":
        return
    with suppress(FileNotFoundError):
        for follows in (False, True):
            owner = path.stat(follow_symlinks=follows).st_uid
            if owner not in {_ROOT, os.geteuid()}:
                raise ConfigurationError(
                    f"{str(path)!r} belongs to another user (uid {owner}, and this process has {os.geteuid()}), who "
                    "can change what is read from there",
                    advice=f"Set {setting} to a directory of your own; or remove this one once you know what it holds",
                )


def check_unshared(path: Path, setting: str) -> None:
    """Refuse a file or directory that another user owns or can write to; a missing one passes.

    :param setting: what chooses the place, for the error.
    :raises ConfigurationError: another user than root owns it, or a link to it; or others can write to it.
    """
    check_owner(path, setting)
    if os.name == "nt":
        return
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if mode & _OTHERS_WRITE:
            raise ConfigurationError(
                f"{str(path)!r} is writable for other users (mode {stat.S_IMODE(mode):o})",
                advice=f"Set {setting} to a directory of your own; or look for files that are not yours, then: "
                f"chmod go-w {str(path)!r}",
            )
