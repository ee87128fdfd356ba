"""Queues as a source: messages are received, written durably as Arrow files, and only then acked.

| module | its one job | runs in |
|---|---|---|
| `lease` | the one query that owns a spool, and who takes over when it is dead | planner |
| `segments` | Arrow files by number; what they are called, how they are written and read | everywhere |
| `columns` | messages as an Arrow table, with what tells a message from all others | planner |
| `recent` | what was written of late, for what comes again although it was acked | planner |
| `spool` | which segments there are; adds, acks on record, trims | planner |
| `receiver` | receives in a thread of its own while Spark works on what came before | planner |
| `positions` | what a source writes into Spark's checkpoint | planner |
| `looking` | what a spool holds, for who does not own it | driver |
| `source` | the reader of Spark | planner, executor |

Layout of a spool: `spool.json` says what it is of; `owners/` has a file of who owns it; `segments/` the rows, each file
named by number, owner, rows and bytes; `doubts/` what may come again although it was written.

*Failure.* The process may end at any point. What was written and not acked comes again, and is known by its identity.
"""

__all__: list[str] = []
