"""The flights through stream processors: `python -m examples.flights_streams`, or `make demo-streams`.

| module, in reading order | job |
|---|---|
| `topics` | the topics and their payloads |
| `groups` | the two graphs: figures of aircraft, and hours of carriers |
| `publishing` | the input |
| `member` | a process that runs both groups |
| `viewer` | a process that follows the table |
| `lives` | starts, kills and stops these processes |
| `results` | reads the output |
| `story` | the demo from start to end |
| `expected` | the same computation without a broker, and the comparison |
| `board`, `picture`, `shown` | what is seen |
"""
