"""What Spark costs over the brokers: `python -m benchmarks.spark`, or `make bench-spark`.

| module | its one job |
|---|---|
| `stage` | the brokers, a session of Spark on them, and topics that are filled |
| `timing` | runs of blocking work in turn; CPU and memory of Spark's processes |
| `raw_clients` | the same work without Spark, in the quickest forms that were found |
| `rowwise` | sources and sinks of Spark as most people write them: a row at a time |
| `reading` | batch and streaming reads |
| `writing` | writes |
| `pipelines` | read, decode, transform, write; memory of a query |
| `micro_batches` | what a micro-batch costs that has nothing to do; queues through the spool |
| `scaling` | more tasks, more cores |
| `decoding` | JSON by a class beside Spark's own `from_json` |
| `crossover` | how many rows it takes until Spark is quicker than a plain consumer |

Brokers, Spark and Python share the machine, so ratios are what counts. Nothing here is part of the library.
"""
