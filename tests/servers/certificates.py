"""Certificates for servers and clients of one test, as PEM files; the keys are PKCS#8, which Java reads."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

__all__ = ["Authority", "Issued"]


class Issued(NamedTuple):
    """A certificate with its chain, and its key."""

    file: Path
    key: Path


class Authority:
    """Signs certificates, and keeps them in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self._issued: dict[str, Issued] = {}
        self.file: Final = directory / "authority.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def certificate(self, name: str) -> Issued:
        """A certificate for this host or role."""
        if name not in self._issued:
            made = self._authority.issue_cert(name, common_name=name)
            issued = Issued(self._directory / f"{name}.pem", self._directory / f"{name}.key")
            issued.file.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
            key = load_pem_private_key(made.private_key_pem.bytes(), None)
            issued.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            issued.key.chmod(0o600)
            self._issued[name] = issued
        return self._issued[name]
