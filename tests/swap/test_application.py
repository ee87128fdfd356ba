"""One application runs unchanged on every backend; only the URL differs."""

from __future__ import annotations

from uuid import uuid4

import pytest

import broker
from tests.swap.application import EARLY_SECONDS, SUBSCRIPTION, Books, Order, bill_all, prepare, publish
from tests.swap.brokers import URLS

CUSTOMERS = tuple(f"customer-{number}" for number in range(6))
EACH = 10
BROKEN = {("customer-1", 3), ("customer-4", 7)}
EARLY = {("customer-2", 5)}
ORDERS = [
    Order(customer, number, broken=(customer, number) in BROKEN, early=(customer, number) in EARLY)
    for number in range(EACH)
    for customer in CUSTOMERS
]


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=[pytest.mark.xdist_group("pulsar")] if name == "pulsar" else []) for name in URLS],
)
async def test_an_application_runs_on_every_broker(backend: str) -> None:
    topic = f"swap.{uuid4().hex[:12]}"
    books = Books()
    async with broker.connect(URLS[backend]()) as bus:
        await prepare(bus, topic)
        await publish(bus, topic, ORDERS)

        fine = len(ORDERS) - len(BROKEN)
        await bill_all(bus, topic, books, lambda: books.count == fine, fixed=False)
        wanted = {name: [n for n in range(EACH) if (name, n) not in BROKEN] for name in CUSTOMERS}
        assert books.billed == wanted
        assert set(books.waited) == EARLY
        assert min(books.waited.values()) >= EARLY_SECONDS

        letters = await bus.admin.list_dead(f"{topic}.dead")
        assert {letter.reason for letter in letters} == {"no such article"}
        assert len(letters) == len(BROKEN)
        assert (await bus.admin.lag(topic, SUBSCRIPTION)).waiting == 0

        redriven = await bus.admin.redrive(f"{topic}.dead", to=[topic])
        assert redriven.moved == len(BROKEN)
        await bill_all(bus, topic, books, lambda: books.count == len(ORDERS), fixed=True)
        for customer, number in BROKEN:
            wanted[customer].append(number)
        assert books.billed == wanted
        assert (await bus.admin.lag(topic, SUBSCRIPTION)).waiting == 0
