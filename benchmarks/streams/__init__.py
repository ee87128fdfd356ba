"""What stream processing costs: `python -m benchmarks.streams`, or `make bench-streams`.

| module | job |
|---|---|
| `works` | the groups that are measured, and their messages |
| `stage` | the brokers, and filled topics |
| `engine` | the engine with each store, without a broker |
| `stores` | a row in each store |
| `processing` | a processor on Kafka and JetStream, beside the same records and publishes made by hand |
| `recovery` | recovery of a table; reads of a view |
| `latency` | from the input to the committed output |
| `rebalance` | how long partitions that stay are paused |
| `memory` | growth of memory over millions of messages |
| `beside` | Quix Streams and Faust on the same Kafka and one core |
| `child`, `child_quix`, `child_faust` | the same two works in each, as programs of their own |
"""
