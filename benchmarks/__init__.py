"""Cost and throughput of the library: `python -m benchmarks`, or `make bench`.

| module | job |
|---|---|
| `sections` | the benchmarks by name |
| `facade_cost`, `receiving`, `null_backend` | the cost of the facade |
| `jetstream_speed`, `kafka_*`, `pubsub_speed`, `pulsar_speed`, `servicebus_speed` | a backend next to the raw clients |
| `six_backends` | the same program on all backends |
| `raw_*`, `faststream_beside` | what a user would write without the library |
| `latency`, `steadiness` | latency at a fixed rate; idle CPU, memory, close |
| `stages`, `kafka_stage`, `subscribed` | brokers and topics for a benchmark |
| `measure` | runs variants in turn |
| `report`, `plot` | write `docs/performance.md` |
"""
