"""Certificates of the tests of TLS, and files of another user."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.servers.certificates import Authority, Issued

STRANGER = 65_534
"""The id of another user."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def wrong(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Issued]:
    """Certificates that a client must refuse."""
    return {
        "unknown authority": Authority(tmp_path_factory.mktemp("other")).certificate("127.0.0.1"),
        "wrong host": authority.certificate("other.example"),
    }


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """A function that gives a path, or a link itself, to another user; only root really can, so others pretend."""
    given: set[tuple[int, int]] = set()
    stat = Path.stat

    def seen(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        status = stat(path, follow_symlinks=follow_symlinks)
        if (status.st_dev, status.st_ino) not in given:
            return status
        return os.stat_result((*status[:4], STRANGER, *status[5:]))

    def pretend(path: Path) -> None:
        status = stat(path, follow_symlinks=False)
        given.add((status.st_dev, status.st_ino))

    def give(path: Path) -> None:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)

    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return give
    monkeypatch.setattr(Path, "stat", seen)
    return pretend
