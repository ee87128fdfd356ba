"""A year of flights through a message broker: `python -m examples.flights`, or `make demo`.

`app` tells the story; the modules it uses can be read in this order: `data` (the flights), `topics` (where they
go), `publisher`, `consumer` (the message consumer that is killed), `reading` (everything that is on a topic),
`auditor` (who counts it), `fold` (what is computed), and `lives` (how a consumer is started and killed).
"""
