"""The emulator behind TLS and token authentication, as the service is, and a server that issues tokens."""

from __future__ import annotations

import json
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.servers.certificates import Authority

__all__ = ["SecuredServer", "TokenServer", "account_file", "login_file"]

TOKEN = "good"


class TokenServer:
    """Issues tokens that expire at once, or refuses. With an authority it is also an HTTPS proxy that answers for every
    host.

    :ivar answer: status and body of the next answers.
    :ivar requests: path, authorization and body of each request.
    """

    def __init__(self, authority: Authority | None = None) -> None:
        self.answer: tuple[int, Any] = (200, {"access_token": TOKEN, "expires_in": 1, "token_type": "Bearer"})
        self.requests: list[tuple[str, str | None, str]] = []
        self._authority = authority
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.url = f"{self.address}/oauth2"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def _encrypt(self, host: str) -> ssl.SSLContext:
        assert self._authority is not None
        issued = self._authority.certificate(host)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(issued.file, issued.key)
        return tls

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        token_server = self

        class Handler(BaseHTTPRequestHandler):
            def do_CONNECT(self) -> None:
                tls = token_server._encrypt(self.path.partition(":")[0])
                self.send_response(200)
                self.end_headers()
                self.connection = tls.wrap_socket(self.connection, server_side=True)
                self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb")
                self.handle_one_request()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                token_server.requests.append((self.path, self.headers["authorization"], body))
                self._answer()

            def do_GET(self) -> None:
                token_server.requests.append((self.path, self.headers["authorization"], ""))
                self._answer()

            def _answer(self) -> None:
                status, answer = token_server.answer
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                self.wfile.flush()

            def finish(self) -> None:
                super().finish()
                self.connection.close()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class SecuredServer(grpc.GenericRpcHandler):
    """Forwards unary calls to the emulator.

    :ivar errors: status and text to answer calls with, by the name of the call.
    :ivar calls: number of calls by name.
    """

    def __init__(self, emulator: str, authority: Authority) -> None:
        self.errors: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.token = TOKEN
        self.calls: Counter[str] = Counter()
        self._channel: Any = grpc.aio.insecure_channel(emulator)
        self._server: Any = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        issued = authority.certificate("localhost")
        keys = grpc.ssl_server_credentials([(issued.key.read_bytes(), issued.file.read_bytes())])
        self.port: int = self._server.add_secure_port("localhost:0", keys)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path: Any = handler_call_details.method
        return grpc.unary_unary_rpc_method_handler(self._answering(str(path)))

    def _answering(self, path: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        name = path.rpartition("/")[2]

        async def answer(request: bytes, context: Any) -> bytes:
            self.calls[name] += 1
            if ("authorization", f"Bearer {self.token}") not in context.invocation_metadata():
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "Request had invalid authentication credentials.")
            if name in self.errors:
                await context.abort(*self.errors[name])
            try:
                response: bytes = await self._channel.unary_unary(path)(request, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
                raise
            return response

        return answer


def account_file(directory: Path, token_server: TokenServer) -> Path:
    """The credentials file of a service account, whose tokens the server issues."""
    key = generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file = directory / "account.json"
    account = {
        "type": "service_account",
        "project_id": "anybroker-tests",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "app@anybroker-tests.iam.gserviceaccount.com",
        "token_uri": f"{token_server.url}/token",
    }
    file.write_text(json.dumps(account), encoding="utf-8")
    return file


def login_file(directory: Path) -> Path:
    """The credentials file of a gcloud login, whose tokens come from oauth2.googleapis.com."""
    file = directory / "login.json"
    login = {
        "type": "authorized_user",
        "client_id": "gcloud",
        "client_secret": "no-secret",
        "refresh_token": "refreshing",
    }
    file.write_text(json.dumps(login), encoding="utf-8")
    return file
