"""Writes the page of guarantees: every promise of the kit and its test.

    python -m broker.testing.guarantees docs/guarantees.md

A test compares the page with the kit.
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

The promises of `anybroker`, and the test of each. A promise holds on every backend that has the capability: see
[the matrix](conformance.md). `make conformance` writes this page; do not edit it.

In short:

- **At least once.** A message with a receipt is delivered until it is settled. It is redelivered after a failure, a
  lost lease, a crash, or an ack whose answer was lost. So make handlers idempotent, or check `message.id`.
- **Nothing is dropped silently.** Not by an error, a cancellation, a close, a `break`, a payload that cannot be
  decoded, or a dead-letter topic that cannot be written. Only `DROP` and `ttl` drop messages.
- **Order.** Records are in order within a partition. With `ordered_by_key=True` messages of a key are in order within a
  process, and across processes if the broker has `key_affinity`.
- **Bounds.** Never more unsettled messages than `max_outstanding`. A close waits for handlers until its deadline, and
  then at most a second or two for a broker that does not answer.
- **Exactly once.** Only in transactions, and for messages with the same id within the broker's deduplication window.
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
        yield "| promise | meaning | test |"
        yield "|---|---|---|"
        for test, promise in promises_of(area):
            yield f"| `{promise.name}` | {promise.text} | `{test}` |"
        yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
