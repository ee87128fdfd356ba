"""Subscriptions as a streaming source: messages are received, written durably as Arrow files, and only then acked.

| module | its job | runs in |
|---|---|---|
| `lease` | one query owns a spool; a dead owner is replaced | planner |
| `segments` | numbered Arrow files: names, writing, reading | everywhere |
| `columns` | messages as an Arrow table, with an identity per message | planner |
| `spool` | metadata and segments: adds, records acks, trims, recognizes redeliveries | planner |
| `receiver` | a thread that receives, writes and acks; for `Trigger.AvailableNow`, how much | planner |
| `positions` | the position in Spark's checkpoint | planner |
| `source` | Spark's stream reader; releases the spool at SIGTERM | planner, executor |

Layout of a spool: `spool.json` is its metadata; `owners/` has a file per owner; `segments/` has the rows, in files
named by number, owner, rows and bytes; `doubts/` has identities of written messages that may be redelivered.

*Failure.* The process may end at any point. Messages that are written and not acked are redelivered and recognized.
"""

__all__: list[str] = []
