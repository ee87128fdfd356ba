"""An HTTP server on loopback that answers what a test says, byte for byte, and keeps what it was sent."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

from tests.servers.certificates import Issued

__all__ = ["HttpDouble", "Request", "answer"]


class Request(NamedTuple):
    """What a client sent; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


def answer(body: object = b"", status: int = 200, **headers: str) -> bytes:
    """An HTTP answer; a body that is not bytes becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Any", f"Content-Length: {len(data)}", *(f"{n}: {v}" for n, v in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


class HttpDouble:
    """:param answers: called in a thread for each request.
    :param certificate: serves over TLS.
    """

    def __init__(self, answers: Callable[[Request], bytes], certificate: Issued | None = None) -> None:
        self.requests: list[Request] = []
        double = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.close_connection = True
                try:
                    self.raw_requestline = self.rfile.readline(65537)
                    if not self.raw_requestline or not self.parse_request():
                        return
                    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                    names = {name.lower(): value for name, value in self.headers.items()}
                    request = Request(self.command, self.path, names, body)
                    double.requests.append(request)
                    self.wfile.write(answers(request))
                except OSError:
                    return

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.file, certificate.key)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_address[1]
        self._scheme = "http" if certificate is None else "https"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return self.at("127.0.0.1")

    def at(self, host: str) -> str:
        """Its address by another name of the loopback."""
        return f"{self._scheme}://{host}:{self.port}"

    @property
    def tokens(self) -> list[str | None]:
        """What it was sent as Authorization."""
        return [request.headers.get("authorization") for request in self.requests]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
