"""Flights as jobs of a queue on Kafka, with workers that are killed: `make demo-queue`.

| module, in reading order | job |
|---|---|
| `fates` | the expected result of each job |
| `topics`, `publishing` | the input |
| `worker` | the process that does the jobs |
| `lives` | starts and kills a worker |
| `watching` | looks at the open leases |
| `auditor`, `accounts` | read and check the results |
| `board`, `shown` | print them |
| `story` | the demo from start to end |
"""
