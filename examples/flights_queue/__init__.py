"""Flights as jobs of a queue on Kafka, with workers that die: `make demo-queue`.

`app` is the command; the modules can be read in this order: `fates` (what becomes of each flight), `topics`,
`publishing`, `worker` (the process that does the jobs), `lives` (how it is started and killed), `watching` (what is
open), `auditor` and `accounts` (what came of it), `board` (what is shown) and `story`.
"""
