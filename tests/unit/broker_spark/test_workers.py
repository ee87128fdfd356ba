"""Garbage collection and thread switching in Spark's processes, without Spark."""

from __future__ import annotations

import gc
import os
import socket
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext

from broker_spark.runtime.workers import (
    collect_less_often,
    end_quietly,
    freeze_loaded_objects,
    leave_out_broken_pipes,
    switch_threads_faster,
)


def test_only_processes_of_spark_freeze_loaded_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = freeze_loaded_objects.__wrapped__
    frozen = gc.get_freeze_count()
    keep()
    assert gc.get_freeze_count() == frozen
    with monkeypatch.context() as patch:
        # A real one would stay the context of this process.
        patch.setattr(TaskContext, "get", object)
        keep()
        assert gc.get_freeze_count() > frozen
    gc.unfreeze()
    # The planner's process: it is started as `python -m pyspark.daemon`.
    main = ModuleType("__main__")
    monkeypatch.setattr(main, "__spec__", SimpleNamespace(name="pyspark.daemon"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    try:
        keep()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_only_processes_of_spark_collect_garbage_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    try:
        collect_less_often()
        assert gc.get_threshold() == before
        monkeypatch.setattr(TaskContext, "get", object)
        gc.set_threshold(0, 10, 10)
        collect_less_often()
        assert gc.get_threshold() == (0, 10, 10), "who turned it off wants none"
        gc.set_threshold(1_000_000, 10, 10)
        collect_less_often()
        assert gc.get_threshold() == (1_000_000, 10, 10)
        gc.set_threshold(*before)
        collect_less_often()
        assert gc.get_threshold() == (100_000, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_only_processes_of_spark_switch_threads_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval()
    try:
        switch_threads_faster()
        assert sys.getswitchinterval() == before
        monkeypatch.setattr(TaskContext, "get", object)
        switch_threads_faster()
        assert sys.getswitchinterval() == pytest.approx(0.001, rel=0.01)
        sys.setswitchinterval(0.0001)
        switch_threads_faster()
        assert sys.getswitchinterval() < 0.00011, "the application switches more often"
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("spec", "error", "quiet"),
    [
        ("pyspark.daemon", EOFError, True),
        ("pyspark.daemon", BrokenPipeError, True),
        # Spark reports any other error, and its traceback may help.
        ("pyspark.daemon", ValueError, False),
        ("program", EOFError, False),
    ],
)
def test_only_a_planner_whose_stream_spark_has_ended_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, spec: str, error: type[Exception], quiet: bool
) -> None:
    main = ModuleType("__main__")
    monkeypatch.setattr(main, "__spec__", SimpleNamespace(name=spec))
    monkeypatch.setitem(sys.modules, "__main__", main)
    redirected: list[int] = []
    monkeypatch.setattr(os, "dup2", lambda _, to: redirected.append(to))

    def planner() -> None:
        try:
            raise error
        finally:
            # As PySpark calls `stop` of a reader.
            end_quietly()

    with pytest.raises(error):
        planner()
    assert redirected == ([2] if quiet else [])
    end_quietly()
    assert redirected == ([2] if quiet else [])


def test_only_the_flush_of_a_worker_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_out_broken_pipes()
    # As PySpark's daemon: `manager` prints the errors of `worker`, which has called what a task runs before its flush.
    main: Any = ModuleType("__main__")
    main.__spec__ = SimpleNamespace(name="pyspark.daemon")
    code = """
import traceback

def worker(flush, task):
    task()
    flush()

def manager(flush, task):
    try:
        worker(flush, task)
    except BaseException:
        traceback.print_exc()
"""
    exec(code, main.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, "__main__", main)
    ours, theirs = socket.socketpair()
    theirs.close()

    def fails() -> None:
        raise BrokenPipeError("of the task")

    with ours:
        flush = partial(ours.sendall, b"rows")
        main.manager(flush, int)
        assert "BrokenPipeError: [Errno 32] Broken pipe" in capsys.readouterr().err
        leave_out_broken_pipes()
        leave_out_broken_pipes()
        main.manager(flush, int)
        assert capsys.readouterr().err == ""
        main.manager(flush, fails)
        assert "BrokenPipeError: of the task" in capsys.readouterr().err
        main.manager(partial(int, "x"), int)
        assert "ValueError: invalid literal" in capsys.readouterr().err
