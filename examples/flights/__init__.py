"""A year of flights through a message broker: `python -m examples.flights`, or `make demo-sdk`.

| module, in reading order | job |
|---|---|
| `data` | the flights |
| `topics` | the topics |
| `publisher` | publishes the flights |
| `consumer` | computes delays; is killed |
| `reading` | reads whole topics |
| `auditor` | checks all results |
| `fold` | the computation |
| `lives` | starts and kills a consumer |
| `story` | the demo from start to end |
"""
