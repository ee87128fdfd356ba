"""Pytest fixtures for tests of applications, found by pytest once this package is installed.

Each test gets a private in-memory broker on its own event loop. Its clock is the system's, unless the test requests
`manual_clock`, whose time only the test advances. The order between keys is random per broker; a failing
test shows the seed, and `--broker-seed` reproduces it. A failed assertion in a handler fails the test; in production
the retry policy settles it. Every run of pytest imports this module, so only the fixtures import the broker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Final, cast

import pytest

import broker_inmem

if TYPE_CHECKING:
    from pytest_asyncio import fixture as async_fixture

    from broker import Bus
else:
    try:
        from pytest_asyncio import fixture as async_fixture
    except ImportError:
        # Another plugin, such as anyio, runs coroutine fixtures.
        async_fixture = pytest.fixture

__all__ = ["broker_bus", "inmem_broker", "manual_clock"]

_FAILED: Final = pytest.StashKey[list[Exception]]()
_MARKER: Final = "retries_assertions"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--broker-seed`."""
    parser.getgroup("anybroker").addoption(
        "--broker-seed",
        type=int,
        default=None,
        help="seed of the in-memory broker's order between keys; a failing test prints its seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}: a failed assertion in a handler of a consumer on `inmem_broker` is retried, as in production, "
        "instead of failing the test",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail the test if an assertion failed in a handler of a consumer on its `inmem_broker`."""
    broker = _broker_of(item)
    if broker is None or item.get_closest_marker(_MARKER) is not None:
        return (yield)
    failed = item.stash[_FAILED] = []

    def raises(error: Exception) -> bool:
        found = _is_assertion(error)
        if found:
            failed.append(error)
        return found

    broker.handler_raises = raises
    # If the test fails by itself, that error is raised here.
    result = yield
    if failed:
        raise failed[0]
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """The same for handlers that end while the fixtures close."""
    broker = _broker_of(item)
    failed = item.stash.get(_FAILED, list[Exception]())
    before = len(failed)
    try:
        result = yield
    finally:
        if broker is not None:
            broker.handler_raises = None
    if len(failed) > before:
        raise failed[before]
    return result


def _broker_of(item: pytest.Item) -> broker_inmem.Broker | None:
    """The broker of a test; None without the fixture, or where an application gives the name to something else."""
    found: broker_inmem.Broker | None = getattr(item, "funcargs", {}).get("inmem_broker")
    return found if hasattr(found, "handler_raises") else None


def _is_assertion(error: Exception) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).subgroup(AssertionError) is not None
    return isinstance(error, AssertionError)


@pytest.fixture
def manual_clock() -> broker_inmem.ManualClock:
    """The clock of `inmem_broker` in this test: `manual_clock.advance(seconds)` ends leases and delays at once."""
    return broker_inmem.ManualClock()


@pytest.fixture
def inmem_broker(request: pytest.FixtureRequest) -> Iterator[broker_inmem.Broker]:
    """A private in-memory broker: `faults`, `clock`, and `url` for code that connects by itself."""
    clock: broker_inmem.ManualClock | None = None
    if "manual_clock" in request.fixturenames:
        clock = request.getfixturevalue("manual_clock")
    options = broker_inmem.BrokerOptions(seed=request.config.getoption("--broker-seed"))
    broker = broker_inmem.Broker(options, clock=clock)
    # Pytest shows this output if the test fails.
    print(f"The in-memory broker's order between keys: --broker-seed={broker.seed}")  # noqa: T201
    yield broker
    # Faults of the test must not affect the cleanup.
    broker.faults.clear()


@async_fixture
async def broker_bus(inmem_broker: broker_inmem.Broker) -> AsyncIterator[Bus]:
    """A connected `Bus` on `inmem_broker`, closed after the test."""
    from broker import connect

    async with connect(inmem_broker.url) as bus:
        yield bus
        inmem_broker.faults.clear()
        inmem_broker.faults.start()
