"""The double as a program: `python tests/servers/servicebus/run.py --port 5672 --admin-port 5300 --directory DIR`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from proton.reactor import Container

from tests.servers.servicebus.admin_http import AdminServer
from tests.servers.servicebus.amqp import Amqp
from tests.servers.servicebus.faults import Faults
from tests.servers.servicebus.limits import SHORTEST_LOCK
from tests.servers.servicebus.namespace import Namespace


def main() -> None:
    parser = argparse.ArgumentParser(prog="servicebus-double", description="A test double of Azure Service Bus")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--admin-port", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--key", default="double")
    parser.add_argument("--shortest-lock", type=float, default=SHORTEST_LOCK, help="seconds; the service's own is 5")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    namespace, faults = Namespace(arguments.directory), Faults()
    admin = AdminServer(namespace, faults, arguments.admin_port, arguments.key, shortest_lock=arguments.shortest_lock)
    container = Container(Amqp(namespace, faults, arguments.port, arguments.key))
    signal.signal(signal.SIGTERM, lambda *_: container.stop())
    threading.Thread(target=admin.serve_forever, name="admin", daemon=True).start()
    container.run()


if __name__ == "__main__":
    main()
