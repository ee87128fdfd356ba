"""What a receipt shows of itself."""

from __future__ import annotations

from broker.receipts import Receipt


def test_a_receipt_shows_its_time_by_the_name_that_it_is_read_by():
    shown = repr(Receipt("a-1", partition=2, offset=7, timestamp=1_893_456_000_500))
    assert shown == "Receipt(id='a-1', partition=2, offset=7, duplicate=False, time=2030-01-01T00:00:00.500000+00:00)"
    assert repr(Receipt("a-1")) == "Receipt(id='a-1', partition=None, offset=None, duplicate=False, time=None)"
