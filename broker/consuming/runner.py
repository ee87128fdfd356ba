"""`run`: the main function of a consuming process, with signals.

SIGTERM and SIGINT stop the consumers: running handlers have `close_timeout` seconds to end, other messages are
released, and `run` returns. A second signal ends the process as usual.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from broker.checks import refused
from broker.consuming.consumer import Service
from broker.errors import ConfigurationError
from broker.hooks import logger

__all__ = ["check_services", "in_new_loop", "run", "serve", "stopping_on_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LAST_WAIT = 3.0


async def serve(*services: Service) -> None:
    """Run services until a signal arrives, all are idle or stopped, or one fails; then stop all of them.

    Must run on the main thread's loop, where signals arrive.

    :raises ConfigurationError: there is no service, or this is not the main thread.
    :raises BrokerError: the error of the first service that failed, after the others were closed.
    """
    check_services(services, Service)

    def stop() -> None:
        for service in services:
            service.consumer.stop()

    with stopping_on_signals(stop):
        tasks = [asyncio.create_task(service.serve()) for service in services]
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        stop()
        if pending:
            await asyncio.wait(pending)
        for task in tasks:
            task.result()


@contextmanager
def stopping_on_signals(stop: Callable[[], object]) -> Generator[None]:
    """Call `stop` at the first SIGTERM or SIGINT; a second one ends the process as usual.

    :raises ConfigurationError: this is not the main thread.
    """
    _check_main_thread()
    loop = asyncio.get_running_loop()

    def stop_once() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop_once)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def run(*services: Service) -> None:
    """`serve` in a new event loop: `broker.run(bus.messages(...).handled_by(handle, concurrency=8))`.

    The consumers open their buses; `run` closes these at the end. A handler that ignores its cancellation is abandoned
    with a warning a few seconds after `close_timeout`: it does not keep the process alive.

    :raises ConfigurationError: there is no service, a loop runs already, or this is not the main thread.
    :raises BrokerError: the error of the first service that failed, after the others were closed.
    """
    check_services(services, Service)

    async def main() -> None:
        await _run(services)

    in_new_loop(main, "broker.serve(...)")


def in_new_loop(main: Callable[[], Coroutine[Any, Any, None]], instead: str) -> None:
    """Run a coroutine function in a new event loop, whose end is bounded.

    :param instead: what to await where a loop runs.
    :raises ConfigurationError: a loop runs already.
    """
    if asyncio._get_running_loop() is not None:
        raise ConfigurationError(
            "run() starts an event loop, but this thread already runs one",
            advice=f"Write `await {instead}` instead",
        )
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
    finally:
        try:
            _end(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def check_services(services: Sequence[object], kind: type) -> None:
    """:raises ConfigurationError: there is no service, one is not a `kind`, or this is not the main thread."""
    if not services:
        raise ConfigurationError("There is nothing to serve", advice="Give bus.messages(...).handled_by(handle)")
    for service in services:
        if not isinstance(service, kind):
            raise refused("A service", service, "what bus.messages(...).handled_by(handle) returns")
    _check_main_thread()


def _check_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "Services run in the main thread, where signals arrive",
            advice="Call it there; in another thread, open the consumers and call their receive(handle)",
        )


async def _run(services: tuple[Service, ...]) -> None:
    buses = {id(bus): bus for service in services if (bus := service.consumer.bus) is not None}
    try:
        await serve(*services)
    finally:
        for bus in buses.values():
            await bus.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Do what `asyncio.run` does at its end, in bounded time."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        _, stubborn = loop.run_until_complete(asyncio.wait(tasks, timeout=_LAST_WAIT))
        for task in stubborn:
            logger.warning("%s still runs after its cancellation, and is left behind", task.get_name())
    loop.run_until_complete(loop.shutdown_asyncgens())
