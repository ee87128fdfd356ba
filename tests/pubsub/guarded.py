"""The emulator behind TLS and tokens, as the service is: a front that demands them, and who gives them.

The front answers a call as it was told to, by the call's name, and passes all others on.
"""

from __future__ import annotations

import json
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

__all__ = ["Front", "TokenGiver", "account_file"]

TOKEN = "good"


class TokenGiver:
    """Gives tokens that are to be renewed for each call, or refuses.

    :ivar answer: status and body of what is said.
    """

    def __init__(self) -> None:
        self.answer: tuple[int, Any] = (200, {"access_token": TOKEN, "expires_in": 1, "token_type": "Bearer"})
        giver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._say()

            def do_GET(self) -> None:
                self._say()

            def _say(self) -> None:
                status, answer = giver.answer
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/oauth2"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Front(grpc.GenericRpcHandler):
    """Single calls only.

    :ivar says: status and text that a call is answered with, by its name.
    :ivar calls: how many came, by name.
    """

    def __init__(self, emulator: str, authority: Authority) -> None:
        self.says: dict[str, tuple[grpc.StatusCode, str]] = {}
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
            if name in self.says:
                await context.abort(*self.says[name])
            try:
                response: bytes = await self._channel.unary_unary(path)(request, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
                raise
            return response

        return answer


def account_file(directory: Path, giver: TokenGiver) -> Path:
    """A service account's file of credentials, whose tokens the giver gives."""
    key = generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file = directory / "account.json"
    account = {
        "type": "service_account",
        "project_id": "anybroker-tests",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "app@anybroker-tests.iam.gserviceaccount.com",
        "token_uri": f"{giver.url}/token",
    }
    file.write_text(json.dumps(account), encoding="utf-8")
    return file
