"""Where PySpark looks for data sources by itself: modules named `pyspark_…` with a `DefaultSource`.

So `format("broker")` is known without a call in every session whose Python has this package.
"""

from broker_spark.data_source import BrokerDataSource as DefaultSource

__all__ = ["DefaultSource"]
