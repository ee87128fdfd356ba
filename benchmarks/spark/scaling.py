"""More tasks on one partition, and more cores: rows per second of a batch read."""

from __future__ import annotations

from benchmarks.measure import Spread
from benchmarks.report import Curve, Finding, Section
from benchmarks.spark.rowwise import PLAIN
from benchmarks.spark.stage import Side, SparkStage
from benchmarks.spark.timing import Work, in_turn

__all__ = ["measure_scaling"]

_TASKS = (1, 2, 4)
_CORES = (1, 2)


def measure_scaling(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure `tasksPerPartition` by `local[N]`."""
    section = Section(
        "Scaling with tasks and cores",
        "Thousand rows per second of a batch read of 100 B and five columns by the Python source, of one partition cut "
        "into tasks by `tasksPerPartition`, in `local[1]` and `local[2]`. The broker has no core of its own.",
    )
    section.curve_axes = ("tasks", "k rows/s")
    count = max(2000, int(200_000 * scale))
    topics = {side.name: side.filled(count, 100) for side in stage.sides}
    for cores in _CORES:
        stage.use_cores(cores)
        # The first reads of a session are not measured.
        works = {
            (side, tasks): _work(stage, side, topics[side.name], tasks, count)
            for side in stage.sides
            for tasks in _TASKS
        }
        for side in stage.sides:
            works[side, 1].run(None)
        series = in_turn(
            {f"{side.name}, {tasks}": work for (side, tasks), work in works.items()}, min(rounds, 2), stage.roots
        )
        for side in stage.sides:
            points: list[tuple[float, float]] = []
            for tasks in _TASKS:
                found = series[f"{side.name}, {tasks}"]
                name = f"{side.name}, {tasks} tasks on {cores} cores"
                section.runs[name] = found
                rate = Spread.of([sample.rate / 1000 for sample in found.samples])
                section.findings.append(Finding(name, rate, "k rows/s"))
                points.append((tasks, rate.median))
            section.curves.append(Curve(f"{side.name}, local[{cores}]", points))
    for side in stage.sides:
        side.drop(topics[side.name])
    return [section]


def _work(stage: SparkStage, side: Side, topic: str, tasks: int, count: int) -> Work:
    frame = stage.spark.read.format("broker").options(
        url=side.url, topic=topic, columns=",".join(PLAIN), tasksPerPartition=tasks
    )
    return Work(count, lambda _: frame.load().write.format("noop").mode("overwrite").save())
