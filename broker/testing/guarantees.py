"""Writes the page of guarantees: every promise of the kit and the test that holds it.

    python -m broker.testing.guarantees docs/guarantees.md

Pure but for the file it writes. A test compares the page with what this module makes of the kit today.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import getsourcefile
from pathlib import Path

from broker.testing.conformance import AREAS
from broker.testing.promises import promises_of

__all__ = ["page"]

_HEAD = """\
# Guarantees

What `anybroker` promises on every backend that has the capability, in a sentence each, and the test that holds it.
This page is written by `make conformance` from the kit itself; [the matrix](conformance.md) says which backend
keeps what.

In short:

- **At least once.** What has a receipt is delivered until it is settled. A message comes again after a failure, a lost
  lease, a crash, or an ack whose answer was lost; handlers are idempotent, or ask `message.id`.
- **Nothing is dropped silently.** Not by an error, a cancellation, a close, a `break`, a poison message, or a
  dead-letter topic that cannot be written. Dropping takes the word `DROP`, or a `ttl`.
- **In order where it is said.** Records within a partition; messages of a key with `ordered_by_key=True`, in one
  process, and across processes where the broker has `key_affinity`.
- **Bounded.** Never more unsettled than `max_outstanding`; a close waits for handlers until its deadline,
  and then a second or two at most for a broker that does not answer.
- **Exactly once** is promised of transactions only, and of publishing an id twice within the broker's window of
  deduplication.
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join([_HEAD, *_sections()]) + "\n"


def _sections() -> Iterator[str]:
    for area in AREAS:
        doc = (area.__doc__ or area.__name__).strip().splitlines()[0]
        source = Path(getsourcefile(area) or "").name
        yield f"## {area.__name__}\n"
        yield f"{doc} (`broker/testing/areas/{source}`)\n"
        yield "| promise | what it says | test |"
        yield "|---|---|---|"
        for test, promise in promises_of(area):
            yield f"| `{promise.name}` | {promise.text} | `{test}` |"
        yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
