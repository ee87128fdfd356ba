"""The text for Prometheus, read by a strict parser."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import broker
from broker.exposition import prometheus_text
from broker.metrics import HELP, Histogram, Metrics, Series
from tests.prometheus_text import Family, read_text


def test_names_labels_and_numbers_round_trip() -> None:
    took = Histogram((0.5, 2.0), [0, 0, 0])
    for seconds in (0.25, 0.5, 60.0):
        took.add(seconds)
    odd = 'a "b" \\ c\nd {e}, f="g"'
    families = read_text(
        prometheus_text(
            {
                Series.of("sent_total", topic=odd): 10_000_001,
                Series.of("took_seconds", topic=odd): took,
                Series("plain"): 0.1,
                Series.of("sent_total", topic="plain", kind=""): 2,
            },
            {"plain": "back\\slash and\nline"},
        )
    )
    labels = frozenset({("topic", odd)})
    assert families["sent_total"].samples == {
        ("sent_total", labels): 10_000_001,
        ("sent_total", frozenset({("topic", "plain"), ("kind", "")})): 2,
    }
    assert families["plain"] == Family("gauge", "back\\\\slash and\\nline", {("plain", frozenset()): 0.1})
    found = families["took_seconds"]
    assert found.samples["took_seconds_sum", labels] == 60.75
    assert [value for (name, _), value in found.samples.items() if name.endswith("_bucket")] == [2, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "# TYPE a gauge\na 1",
        "# TYPE a gauge\n# TYPE a gauge\na 1\n",
        "# TYPE a_total gauge\na_total 1\n",
        "# TYPE a counter\na 1\n",
        "# TYPE a gauge\nb 1\n",
        "# TYPE a gauge\na 1\na 2\n",
        '# TYPE a gauge\na{b="c"d"} 1\n',
        '# TYPE a gauge\na{b="\\t"} 1\n',
        '# TYPE a histogram\na_bucket{le="1"} 2\na_bucket{le="+Inf"} 1\na_sum 1\na_count 1\n',
        '# TYPE a histogram\na_bucket{le="1"} 1\na_bucket{le="+Inf"} 1\na_sum 1\na_count 2\n',
        '# TYPE a histogram\na_bucket{le="1"} 1\na_sum 1\na_count 1\n',
    ],
)
def test_the_parser_is_strict(text: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        read_text(text)


def test_metrics_before_the_first_event() -> None:
    families = read_text(Metrics().text())
    assert set(families) == {f"anybroker_{name}_total" for name in ("disconnects", "reconnects", "warnings")}


async def test_counters_only_grow(broker_bus: broker.Bus) -> None:
    metrics = Metrics(broker_bus)
    await broker_bus.admin.ensure_topic("orders")
    texts = [metrics.text()]
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        for delay in (0.0, None):
            await broker_bus.topic("orders").publish(b"x")
            message = await inbox.next_message()
            assert message is not None
            texts.append(metrics.text())
            await (message.ack() if delay is None else message.nack(delay))
            texts.append(metrics.text())
    async with broker_bus.records("orders", group="audit", stop_when_idle=0.1) as log:
        async for batch in log.batches():
            await batch.commit()
    texts.append(metrics.text())
    read = [read_text(text) for text in texts]
    rising = {
        name
        for earlier, later in pairwise(read)
        for name, family in later.items()
        if family.type != "gauge" and name in earlier
        for key, value in family.samples.items()
        if value > earlier[name].samples.get(key, 0)
    }
    assert {f"anybroker_{what}_messages_total" for what in ("published", "received", "acked", "nacked")} <= rising
    for earlier, later in pairwise(read):
        assert set(earlier) <= set(later)
        for name, family in earlier.items():
            assert set(family.samples) <= set(later[name].samples)
            for key, value in family.samples.items() if family.type != "gauge" else ():
                assert later[name].samples[key] >= value
    assert set(read[-1]) == set(HELP)
    assert all(family.help == HELP[name] for name, family in read[-1].items())


def test_every_metric_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "observing.md").read_text()
    assert not [name for name in HELP if f"`{name.removeprefix('anybroker_')}`" not in page]
