"""Cost and throughput of the library: `python -m benchmarks`, or `make bench`.

`measure` runs variants in turn; `facade_cost`, `jetstream_speed`, `faststream_beside` and `steadiness` are what is
measured; `raw_nats` is what a user would write without the library; `report` writes `docs/performance.md`.
"""
