"""Subscriptions as a streaming source: messages are received, written durably as Arrow files, and only then acked.

| module | its job | runs in |
|---|---|---|
| `lease` | one query owns a spool; a dead owner is replaced | planner |
| `metadata` | the file `spool.json`: id and contents of a spool | planner |
| `segments` | numbered Arrow files: names, writing, reading | everywhere |
| `columns` | messages as an Arrow table, with an identity per message | planner |
| `spool` | the segments of a spool: adds, records acks, trims, recognizes redeliveries | planner |
| `drain_goal` | how much to receive for `Trigger.AvailableNow` | planner |
| `receiver` | a thread that receives, writes and acks | planner |
| `positions` | the position in Spark's checkpoint | planner |
| `shutdown` | releases the spool at SIGTERM | planner |
| `source` | Spark's stream reader | planner, executor |

Layout of a spool: `spool.json` is its metadata; `owners/` has a file per owner; `segments/` has the rows, in files
named by number, owner, rows and bytes; `doubts/` has identities of written messages that may be redelivered.

*Failure.* The process may end at any point. Messages that are written and not acked are redelivered and recognized.
"""

__all__: list[str] = []
