"""One of the works of `beside` with Quix Streams, as a program of an environment of its own; see `child`.

Exactly once, with changelogs, on RocksDB, its only store on disk. It imports nothing of this project.
"""

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

quixstreams: Any = import_module("quixstreams")

work, address, job = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
began: tuple[float, float] | None = None
count = 0

app = quixstreams.Application(
    broker_address=address,
    consumer_group=job["group"],
    auto_offset_reset="earliest",
    commit_interval=job["interval"],
    commit_every=job["checkpoint"],
    processing_guarantee="exactly-once",
    state_dir=job["directory"],
    loglevel="WARNING",
    consumer_poll_timeout=0.1,
)


def begin() -> None:
    global began
    if began is None:
        began = time.process_time(), time.perf_counter()


def handled() -> None:
    """Stop after the last message; `run` then commits."""
    global count
    count += 1
    if count >= job["words"]:
        app.stop()


def split(line: str) -> list[str]:
    begin()
    return line.split()


def on_word(word: str, state: Any) -> None:
    state.set("count", state.get("count", 0) + 1)
    handled()


def on_click(click: dict[str, Any], state: Any) -> dict[str, int]:
    begin()
    row = state.get("row", {"clicks": 0, "spent": 0})
    row = {"clicks": row["clicks"] + 1, "spent": row["spent"] + click["price"]}
    state.set("row", row)
    handled()
    return row


if work == "words":
    source = app.topic(job["source"], value_deserializer="str", key_deserializer="str")
    text = dict.fromkeys(("key_serializer", "key_deserializer", "value_serializer", "value_deserializer"), "str")
    words = app.dataframe(source).apply(split, expand=True).group_by(str, name="word", **text)
    words.update(on_word, stateful=True)
else:
    source = app.topic(job["source"], value_deserializer="json", key_deserializer="str")
    target = app.topic(job["target"], value_serializer="json", key_serializer="str")
    app.dataframe(source).apply(on_click, stateful=True).to_topic(target)

app.run()
assert began is not None
cpu, seconds = time.process_time() - began[0], time.perf_counter() - began[1]
print(json.dumps({"cpu": cpu, "seconds": seconds}), flush=True)
os._exit(0)
