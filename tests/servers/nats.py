"""A real nats-server as a small object: start, stop, kill, restart, pause, resume. Loopback only.

Blocking, for fixtures and threads; every call returns when it is done. The port and the store stay the same over
restarts. The server ends with this process, however that ends. A machine without nats-server fails here: nothing is
skipped.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import nkeys
import trustme

from broker_jetstream.server import server_binary
from tests.servers.server_process import ServerProcess
from tests.servers.shared import Shared

__all__ = ["Certificates", "Jwt", "NatsServer", "make_nkey", "shared_server"]

START_SECONDS = 180.0


class NatsServer(ServerProcess):
    """One server with JetStream; `config` is appended to its configuration file."""

    def __init__(
        self, config: str = "", *, scheme: str = "nats", jetstream: bool = True, max_payload: str = "1MB"
    ) -> None:
        super().__init__("nats")
        self.port = self._hold_ports("nats")["nats"]
        self.scheme = scheme
        self._extra = config
        self._jetstream = jetstream
        self._max_payload = max_payload

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def monitoring(self, what: str) -> dict[str, Any]:
        """A page of the monitoring API, such as `varz`; needs `http: "127.0.0.1:-1"` in its configuration."""
        ports = json.loads((self.directory / f"nats-server_{self.process_id}.ports").read_text())
        connection = HTTPConnection(urlsplit(ports["monitoring"][0]).netloc)
        with contextlib.closing(connection):
            connection.request("GET", f"/{what}")
            return json.loads(connection.getresponse().read())

    def start(self) -> Self:
        """Start, and wait until clients are served."""
        for old in self.directory.glob("*.ports"):
            old.unlink()
        config = self.directory / "server.conf"
        store = f'jetstream {{ store_dir: "{self.directory}/store" }}' if self._jetstream else ""
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nports_file_dir: "{self.directory}"\n'
            f'log_file: "{self.directory}/log"\n'
            f"max_payload: {self._max_payload}\n{store}\n{self._extra}\n"
        )
        child = self._launch([server_binary(), "-c", str(config)], "said")
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if child.return_code is not None:
                raise RuntimeError(f"nats-server ended with {child.return_code}: {self.log[-2000:]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            time.sleep(0.005)
        raise RuntimeError(f"nats-server does not start: {self.log[-2000:]}")

    # Authentication that it may require.

    @classmethod
    def with_token(cls, token: str) -> Self:
        return cls(f"authorization {{ token: {json.dumps(token)} }}")

    @classmethod
    def with_user(cls, user: str, password: str, permissions: str = "") -> Self:
        account = f"{{ user: {json.dumps(user)}, password: {json.dumps(password)}\n{permissions} }}"
        return cls(f"authorization {{ users: [ {account} ] }}")

    @classmethod
    def with_nkey(cls, public: str) -> Self:
        return cls(f"authorization {{ users: [ {{ nkey: {public} }} ] }}")

    @classmethod
    def with_jwt(cls, jwt: Jwt) -> Self:
        return cls(
            f"operator: {jwt.operator}\nresolver: MEMORY\nsystem_account: {jwt.system_id}\n"
            f"resolver_preload {{ {jwt.account_id}: {jwt.account}, {jwt.system_id}: {jwt.system} }}"
        )

    @classmethod
    def with_tls(cls, certificates: Certificates, *, verify: bool = False, first: bool = False) -> Self:
        verify_lines = "verify: true" if verify else ""
        first_lines = "handshake_first: true" if first else ""
        return cls(
            f'tls {{ cert_file: "{certificates.server}", key_file: "{certificates.server}", '
            f'ca_file: "{certificates.authority}", {verify_lines} {first_lines} }}',
            scheme="tls",
        )


@Shared
def shared_server() -> NatsServer:
    """The plain server of this test process."""
    return NatsServer()


def make_nkey(prefix: int = nkeys.PREFIX_BYTE_USER) -> tuple[str, str]:
    """Seed and public key of a new NKey."""
    seed = bytes(nkeys.encode_seed(os.urandom(32), prefix))
    return seed.decode(), _public(seed.decode())


class Jwt:
    """An operator with one account, and users of that account, as a server in operator mode wants them."""

    def __init__(self) -> None:
        operator_seed, operator_id = make_nkey(nkeys.PREFIX_BYTE_OPERATOR)
        self._account_seed, self.account_id = make_nkey(nkeys.PREFIX_BYTE_ACCOUNT)
        _, self.system_id = make_nkey(nkeys.PREFIX_BYTE_ACCOUNT)
        every = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {
            "wildcards": True
        }
        store = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
        self.operator = _token(
            operator_seed, operator_id, operator_id, {"type": "operator", "system_account": self.system_id}
        )
        self.account = _token(operator_seed, operator_id, self.account_id, {"type": "account", "limits": every | store})
        self.system = _token(operator_seed, operator_id, self.system_id, {"type": "account", "limits": every})

    def credentials(self, *, account_seed: str | None = None) -> str:
        """The text of a credentials file for a new user; with the seed of another account, for an unknown one."""
        user_seed, user_id = make_nkey()
        seed = account_seed or self._account_seed
        issuer = _public(seed)
        limits = {"subs": -1, "data": -1, "payload": -1}
        token = _token(seed, issuer, user_id, {"type": "user", "pub": {}, "sub": {}, **limits})
        return (
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user_seed}\n------END USER NKEY SEED------\n"
        )


def _public(seed: str) -> str:
    key: Any = nkeys.from_seed(bytearray(seed.encode())).public_key
    return key.decode()


def _token(seed: str, issuer: str, subject: str, claims: dict[str, Any]) -> str:
    body = {"jti": os.urandom(8).hex(), "iat": int(time.time()), "iss": issuer, "name": "test", "sub": subject}
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, {**body, "nats": {"version": 2, **claims}}]
    text = ".".join(_base64(json.dumps(part).encode()) for part in parts)
    return f"{text}.{_base64(nkeys.from_seed(bytearray(seed.encode())).sign(text.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Certificates:
    """An authority, a server's certificate and a client's, as PEM files in a directory."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.authority = directory / "authority.pem"
        self.server = directory / "server.pem"
        self.client = directory / "client.pem"
        self.client_key = directory / "client-key.pem"
        self.stranger_authority = directory / "stranger-authority.pem"
        self.stranger = directory / "stranger.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(str(self.server))
        client = authority.issue_cert("client@example.org")
        client.cert_chain_pems[0].write_to_path(str(self.client))
        client.private_key_pem.write_to_path(str(self.client_key))
        other = trustme.CA()
        other.cert_pem.write_to_path(str(self.stranger_authority))
        other.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(str(self.stranger))
