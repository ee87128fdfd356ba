"""The cost of Spark over the brokers: `python -m benchmarks.spark`, or `make bench-spark`.

| module | job |
|---|---|
| `stage` | the brokers, a Spark session, and filled topics |
| `timing` | runs of blocking work in turn; CPU and memory of Spark's processes |
| `raw_clients` | the same work without Spark, in the fastest forms that we found |
| `rowwise` | sources and sinks of Spark as most people write them: a row at a time |
| `reading` | batch and streaming reads |
| `writing` | writes |
| `pipelines` | read, decode, transform, write; memory of a query |
| `micro_batches` | the cost of an almost empty micro-batch; queues through the spool |
| `scaling` | more tasks, more cores |
| `decoding` | JSON by a class, next to Spark's own `from_json` |
| `other_brokers` | Spark over Pulsar and Pub/Sub |
| `state` | state of a key: `transformWithState` next to an aggregate |
| `crossover` | the number of rows from which Spark is faster than a plain consumer |

Brokers, Spark and Python share the machine, so only ratios count.
"""
