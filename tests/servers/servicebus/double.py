"""The double as a small object: start, stop, kill, restart, pause, resume. Loopback only.

Blocking, for fixtures and threads; every call returns when it is done. Ports and messages stay the same over restarts.
The double ends with this process, however that ends. Where python-qpid-proton could not be built there is no double,
and `missing` says so.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from tests.servers.server_process import ServerProcess
from tests.servers.shared import Shared

__all__ = ["ServiceBusDouble", "missing", "shared_double"]

START_SECONDS = 180.0
_ROOT = Path(__file__).parents[3]


def missing() -> str | None:
    """Why the double cannot run on this machine; None if it can."""
    if find_spec("proton") is not None and find_spec("cproton") is not None:
        return None
    return "python-qpid-proton is not built here: it needs a C compiler, make setup says more"


class ServiceBusDouble(ServerProcess):
    """Consecutive runs of the double over one directory.

    :param shortest_lock: seconds; the service's minimum of 5 would be too long for tests.
    """

    def __init__(self, key: str = "double", *, shortest_lock: float = 0.2) -> None:
        super().__init__("servicebus")
        self.key = key
        self.shortest_lock = shortest_lock
        ports = self._hold_ports("amqp", "http")
        self.port, self.admin_port = ports["amqp"], ports["http"]

    @property
    def url(self) -> str:
        return self.url_at(self.port)

    def url_at(self, port: int, key: str | None = None) -> str:
        """The URL for a client that reaches AMQP at another port, such as a proxy's."""
        return (
            f"servicebus://RootManageSharedAccessKey:{key or self.key}@127.0.0.1:{port}"
            f"?emulator=true&admin_endpoint=http://127.0.0.1:{self.admin_port}"
        )

    @property
    def connection_string(self) -> str:
        """The connection string for the raw client."""
        return (
            f"Endpoint=sb://127.0.0.1:{self.port};SharedAccessKeyName=RootManageSharedAccessKey;"
            f"SharedAccessKey={self.key};UseDevelopmentEmulator=true;"
        )

    def start(self) -> Self:
        """Start it, and wait until clients are served."""
        command = [sys.executable, str(_ROOT / "tests" / "servers" / "servicebus" / "run.py")]
        command += ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        command += ["--directory", str(self.directory), "--key", self.key]
        command += ["--shortest-lock", str(self.shortest_lock)]
        child = self._launch(command)
        deadline = time.monotonic() + START_SECONDS
        for port in (self.admin_port, self.port):
            while True:
                if child.return_code is not None:
                    raise RuntimeError(f"the double ended with {child.return_code}: {self.log[-2000:]}")
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the double does not start: {self.log[-2000:]}")
                time.sleep(0.005)
        return self

    def fault(self, **fault: Any) -> dict[str, int]:
        """Inject a fault, see `Faults.add`; without arguments remove all. Returns the number of requests by kind."""
        connection = HTTPConnection("127.0.0.1", self.admin_port)
        with contextlib.closing(connection):
            connection.request("POST", "/$double/faults", json.dumps(fault))
            return json.loads(connection.getresponse().read())

    def requests(self) -> dict[str, int]:
        """The number of requests by kind since the faults were removed."""
        connection = HTTPConnection("127.0.0.1", self.admin_port)
        with contextlib.closing(connection):
            connection.request("POST", "/$double/requests")
            return json.loads(connection.getresponse().read())


@Shared
def shared_double() -> ServiceBusDouble:
    """The double of this test process."""
    return ServiceBusDouble()
