"""`run` without `await`: the main function of a consuming process, with signals.

SIGTERM and SIGINT stop the consumers: running handlers have `close_timeout` seconds to end, other messages are
released, and `run` returns. A second signal ends the process as usual.
"""

from __future__ import annotations

import signal
import threading
from typing import Any, Final

from broker.blocking.consumer import Service
from broker.consuming.runner import check_services

__all__ = ["run"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_GLANCE: Final = 0.5


def run(*services: Service) -> None:
    """Run services until a signal arrives, all are idle or stopped, or one fails; then stop all of them.

    `broker.blocking.run(bus.messages(...).handled_by(handle, concurrency=8))`, in the main thread.

    :raises ConfigurationError: `services` is empty, or this is not the main thread.
    :raises BrokerError: the error of the first service that failed, after the others were closed.
    """
    check_services(services, Service)
    failures: list[BaseException] = []
    before: dict[int, Any] = {}

    def stop(*_: object) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        for service in services:
            service.consumer.stop()

    def serve(service: Service) -> None:
        try:
            service.serve()
        except BaseException as error:
            failures.append(error)
            for other in services:
                other.consumer.stop()

    before.update((number, signal.signal(number, stop)) for number in _SIGNALS)
    try:
        threads = [threading.Thread(target=serve, args=(service,), daemon=True) for service in services]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_GLANCE)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]
