"""Options of a subscription, without Spark or a broker."""

from __future__ import annotations

import pytest

from broker.errors import BrokerError, ConfigurationError
from broker_spark.common.options import SourceOptions

URL = "nats://127.0.0.1:4222"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"spool": ""}, "each process of Spark would look for in its own"),
        ({"spool": "spools/orders"}, "It takes an absolute path, or a URI such as s3://"),
        ({"spool": "nowhere://x"}, "Unrecognized filesystem type"),
        ({"start": '{"0": 1}'}, "Option start is 'offsets'"),
        ({"minRows": "10", "aheadRows": "9"}, "Option aheadRows is 9. It takes no fewer than minRows, which is 10"),
        ({"tasksPerPartition": "2"}, "Option tasksPerPartition is for a log only"),
        ({"group": "lag"}, "Option group is for a log only"),
        ({"end": "latest"}, "Option end is for a batch read only"),
        ({"tasks": "0"}, "Option tasks is '0'"),
        (
            {"subscription": "a b"},
            "subscription name 'a b' is not portable. Use a letter, then letters, digits, '.', '_' or",
        ),
        ({"spool": "s3://"}, "Option spool is 's3://', which names no directory"),
    ],
)
def test_wrong_options(options: dict[str, str], expected: str) -> None:
    given = {"url": URL, "topic": "orders", "subscription": "spark", "spool": "/spool", **options}
    with pytest.raises(BrokerError) as caught:
        SourceOptions.parse(given).for_stream()
    assert expected in str(caught.value)
    assert "native_name" not in str(caught.value), "no option can hold one"


def test_options_that_need_each_other() -> None:
    with pytest.raises(ConfigurationError, match=r"Option spool is not given. Give a directory of this query"):
        SourceOptions.parse({"url": URL, "topic": "orders", "subscription": "spark"})
    with pytest.raises(ConfigurationError, match="Option spool is for a subscription only"):
        SourceOptions.parse({"url": URL, "topic": "orders", "spool": "/spool"})
    with pytest.raises(ConfigurationError, match="subscription is for a stream only"):
        SourceOptions.parse({"url": URL, "topic": "orders", "subscription": "spark", "spool": "/spool"}).for_batch()
