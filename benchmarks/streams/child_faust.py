"""One of the works of `beside` with Faust, as a program of an environment of its own; see `child`.

Exactly once, with changelogs, tables in memory, its fastest. It imports nothing of this project.
"""

import asyncio
import json
import os
import sys
import time
from importlib import import_module
from typing import Any

faust: Any = import_module("faust")

work, address, job = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
began: tuple[float, float] | None = None
count = 0

app = faust.App(
    job["group"],
    broker=f"kafka://{address}",
    store="memory://",
    datadir=job["directory"],
    processing_guarantee=job["guarantee"],
    broker_commit_interval=job["interval"],
    broker_commit_every=job["checkpoint"],
    topic_partitions=job["partitions"],
    topic_replication_factor=1,
    consumer_auto_offset_reset="earliest",
    web_enabled=False,
    stream_wait_empty=False,
)


def begin() -> None:
    global began
    if began is None:
        began = time.process_time(), time.perf_counter()


def handled() -> None:
    global count
    count += 1
    if count == job["words"]:
        asyncio.get_running_loop().create_task(end())


async def end() -> None:
    """Commit, and end: a stop of the worker takes seconds."""
    await asyncio.sleep(0)
    await app.consumer.commit()
    assert began is not None
    cpu, seconds = time.process_time() - began[0], time.perf_counter() - began[1]
    # Faust logs what is printed.
    print(json.dumps({"cpu": cpu, "seconds": seconds}), file=sys.__stdout__, flush=True)
    os._exit(0)


if work == "words":
    source = app.topic(job["source"], key_type=str, value_type=str, value_serializer="raw")
    words = app.topic(
        f"{job['group']}-words", key_type=str, value_type=int, internal=True, partitions=job["partitions"]
    )
    counts = app.Table("counts", default=int)

    @app.agent(source)
    async def on_line(lines: Any) -> None:
        async for line in lines:
            begin()
            for word in (line.decode() if isinstance(line, bytes) else line).split():
                await words.send(key=word, value=1)

    @app.agent(words)
    async def on_word(numbers: Any) -> None:
        async for word, number in numbers.items():
            counts[word] += number
            handled()
else:
    clicks = app.topic(job["source"], key_type=str)
    target = app.topic(job["target"], key_type=str)
    rows = app.Table("rows", default=lambda: {"clicks": 0, "spent": 0})

    @app.agent(clicks)
    async def on_click(stream: Any) -> None:
        async for user, click in stream.items():
            begin()
            row = rows[user]
            row = rows[user] = {"clicks": row["clicks"] + 1, "spent": row["spent"] + click["price"]}
            await target.send(key=user, value=row)
            handled()


faust.Worker(app, loglevel="WARNING").execute_from_commandline()
