"""Pipelines: topics in, typed rows through a transform, rows out into topics, files and tables.

Read `docs/pipelines.md`. `definition` has the parts of a pipeline, `toml_file` reads them from a file. `running` runs a
pipeline: `frames` builds its stream, `preflight` checks the sinks, `writing` claims files and tables and writes one
sink, `batch` writes all of them, `lineage` notes beside files what they were made of, `metrics` counts batches, and
`tracing` makes their spans.
`expectations` judges rows, `letters` reads dead ones again, and `batch_ranges` says what a batch read. `inspecting`
reports plan and progress; `backlog` counts rows that Spark's progress does not report. `sampling` tries a few rows,
`replaying` processes a range again; `log_ranges` has what they read.
"""

from broker_spark.pipeline.definition import CallSink, FileSink, Pipeline, Sink, Source, TableSink, TopicSink
from broker_spark.pipeline.expectations import Expect
from broker_spark.pipeline.frames import Frames, frames_of
from broker_spark.pipeline.metrics import BatchMetrics
from broker_spark.pipeline.replaying import Replay, replay
from broker_spark.pipeline.running import BatchReport, Run, run
from broker_spark.pipeline.sampling import Sample, sample
from broker_spark.pipeline.tracing import BatchSpans

__all__ = [
    "BatchMetrics",
    "BatchReport",
    "BatchSpans",
    "CallSink",
    "Expect",
    "FileSink",
    "Frames",
    "Pipeline",
    "Replay",
    "Run",
    "Sample",
    "Sink",
    "Source",
    "TableSink",
    "TopicSink",
    "frames_of",
    "replay",
    "run",
    "sample",
]
