"""An OAuth authority on loopback: tokens for clients that know their secret, and the keys to check them by.

Serves in threads over HTTP, and over HTTPS if it has a certificate; it is ready when the constructor
returns. What it hands out is changed by setting its attributes, at any time and from any thread.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Any, Self
from urllib.parse import parse_qs
from uuid import uuid4

from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

__all__ = ["TokenServer"]

ISSUER = "https://tokens.example.org"
AUDIENCE = "kafka"


class TokenServer:
    """`clients` are the secrets by client id.

    :ivar lifetime: lifetime of new tokens in seconds.
    :ivar status: the status of every request for a token; 200 issues one to known clients.
    :ivar requests: number of token requests.
    """

    def __init__(self, clients: dict[str, str], certificate: Path | None = None) -> None:
        self.clients = clients
        self.lifetime = 300
        self.status = 200
        self.requests = 0
        self._key = _Key()
        self._servers = {"http": self._listen(None)}
        if certificate is not None:
            self._servers["https"] = self._listen(certificate)

    def url(self, scheme: str = "http") -> str:
        """The token endpoint."""
        return f"{scheme}://127.0.0.1:{self._servers[scheme].server_address[1]}/token"

    @property
    def keys_url(self) -> str:
        """The endpoint of the public keys."""
        return self.url().replace("/token", "/keys")

    def make_token(self, subject: str, lifetime: float | None = None, *, forged: bool = False, **claims: Any) -> str:
        """A token as the server issues it; `forged` is signed by an unknown key."""
        now = int(time.time())
        body: dict[str, Any] = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": subject,
            "scope": "all",
            "iat": now,
            "exp": int(now + (self.lifetime if lifetime is None else lifetime)),
            "jti": uuid4().hex,
            **claims,
        }
        return (_Key(self._key.id) if forged else self._key).sign(body)

    def close(self) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, certificate: Path | None) -> ThreadingHTTPServer:
        owner = self

        class Handler(_Handler):
            tokens = owner

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        if certificate is not None:
            context = SSLContext(PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # The handshake belongs to the connection's thread, so that a silent client delays no other.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.05,), name="test-tokens", daemon=True).start()
        return server

    def answer_token(self, authorization: str, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """Status and body for a request."""
        self.requests += 1
        if self.status != 200:
            return self.status, {"error": "not_now", "error_description": f"told to answer {self.status}"}
        client, secret = _basic(authorization) or (form.get("client_id", [""])[0], form.get("client_secret", [""])[0])
        if client not in self.clients or self.clients[client] != secret:
            return 401, {"error": "invalid_client", "error_description": "unknown client or wrong secret"}
        if form.get("grant_type") != ["client_credentials"]:
            return 400, {"error": "unsupported_grant_type"}
        token = self.make_token(client, scope=form.get("scope", ["all"])[0])
        return 200, {"access_token": token, "token_type": "Bearer", "expires_in": self.lifetime}

    def answer_keys(self) -> dict[str, Any]:
        return {"keys": [self._key.public()]}


class _Handler(BaseHTTPRequestHandler):
    tokens: TokenServer
    timeout = 10

    def do_GET(self) -> None:
        if self.path == "/keys":
            self._answer(200, self.tokens.answer_keys())
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        if self.path == "/token":
            self._answer(*self.tokens.answer_token(self.headers.get("Authorization", ""), parse_qs(body)))
        else:
            self._answer(404, {})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Key:
    """An RSA key, its public half as a JSON Web Key, and tokens signed by it."""

    def __init__(self, key_id: str | None = None) -> None:
        self.id = key_id or uuid4().hex
        self._key = rsa.generate_private_key(65537, 2048)

    def public(self) -> dict[str, str]:
        numbers = self._key.public_key().public_numbers()
        return {
            "kty": "RSA",
            "use": "sig",
            "alg": "RS256",
            "kid": self.id,
            "n": _base64(numbers.n.to_bytes(256, "big")),
            "e": _base64(numbers.e.to_bytes(3, "big")),
        }

    def sign(self, body: dict[str, Any]) -> str:
        head = {"typ": "JWT", "alg": "RS256", "kid": self.id}
        text = ".".join(_base64(json.dumps(part).encode()) for part in (head, body))
        return f"{text}.{_base64(self._key.sign(text.encode(), padding.PKCS1v15(), SHA256()))}"


def _basic(authorization: str) -> tuple[str, str] | None:
    kind, _, value = authorization.partition(" ")
    if kind.lower() != "basic":
        return None
    client, _, secret = base64.b64decode(value).decode().partition(":")
    return client, secret


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
