"""Certificates of the tests of TLS."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.servers.certificates import Authority, Issued


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
