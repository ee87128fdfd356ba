"""The flights through pipelines on Spark: `python -m examples.flights_pipeline`, or `make demo`.

| module, in reading order | job |
|---|---|
| `corruption`, `publishing` | the input |
| `schemas` | how it is decoded |
| `tables`, `transforms`, `aircraft` | how it is transformed |
| `pipelines` | sources, sinks and checkpoints |
| `spark_process`, `lives` | the Spark process, and how it is killed |
| `story` | the demo from start to end |
| `results` | reads the output |
| `plain` | the same computation without broker and Spark |
| `comparison` | compares the two |
"""
