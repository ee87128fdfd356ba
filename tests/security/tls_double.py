"""A server on loopback that serves TLS with one certificate after the other, and keeps what it is sent over it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import Self

from tests.servers.certificates import Issued

__all__ = ["TlsDouble"]


class TlsDouble:
    """Answers nothing.

    :param certificates: of the first, the second connection, and so on; the last one is that of all further ones.
    :ivar received: by connection, the first bytes that came over TLS; empty if the client ended the handshake.
    """

    def __init__(self, *certificates: Issued) -> None:
        self._contexts = [_context_of(each) for each in certificates]
        self.received: list[bytes] = []
        self.done = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._clients: list[socket.socket] = []
        self._serving: list[threading.Thread] = []

    def wait_for(self, connections: int) -> list[bytes]:
        """What so many connections sent, or the first that did."""
        with self.done:
            assert self.done.wait_for(lambda: len(self.received) >= connections, 30)
            return list(self.received)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.settimeout(30)
                context = self._contexts[min(len(self._serving), len(self._contexts) - 1)]
                thread = threading.Thread(target=self._serve, args=(client, context))
                self._clients.append(client)
                self._serving.append(thread)
                thread.start()

    def _serve(self, client: socket.socket, context: ssl.SSLContext) -> None:
        found = b""
        with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as secured:
            found = secured.recv(4096)
        client.close()
        with self.done:
            self.received.append(found)
            self.done.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A close alone does not end a blocked accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for thread in self._serving:
            thread.join()


def _context_of(certificate: Issued) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file, certificate.key)
    return context
