"""Pipelines: topics in, typed rows through a transform, rows out into topics, files and tables.

Read `docs/pipelines.md`. `definition` has the parts of a pipeline, `toml_file` reads them from a file. `running` runs a
pipeline: `frames` builds its stream, `preflight` checks the sinks, `writing` claims files and tables and writes a
batch. `inspecting` reports plan and progress; `backlog` counts rows that Spark's progress does not report.
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
