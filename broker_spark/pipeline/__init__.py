"""Pipelines: topics in, typed rows through a transform, rows out into topics, files and tables.

Read `docs/pipelines.md`. `definition` is what a pipeline is made of, `toml_file` reads one, `frames` makes its frames,
`checking` tells whether its sinks can take the rows, `writing` writes a batch into one, `running` runs it, `waiting`
tells what is behind a batch, `inspecting` tells its plan and how far it is.
"""

from broker_spark.pipeline.definition import CallSink, FileSink, Pipeline, Sink, Source, TableSink, TopicSink
from broker_spark.pipeline.frames import Frames, frames_of
from broker_spark.pipeline.running import BatchReport, Run, run

__all__ = [
    "BatchReport",
    "CallSink",
    "FileSink",
    "Frames",
    "Pipeline",
    "Run",
    "Sink",
    "Source",
    "TableSink",
    "TopicSink",
    "frames_of",
    "run",
]
