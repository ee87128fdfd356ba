"""The flights through pipelines on Spark: `python -m examples.flights_pipeline`, or `make demo`.

`story` tells what happens; the modules it uses can be read in this order: `corruption` and `publishing` (what goes in),
`schemas` (how it is decoded), `tables`, `transforms` and `aircraft` (what is made of it), `pipelines` (where it goes),
`spark_process` (the process that is killed) and `lives` (how), `results` (what came out), `plain` (the same without
broker and Spark) and `comparison`.
"""
