"""What the processes of Spark keep, without Spark."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace

import pytest
from pyspark import TaskContext

from broker_spark.runtime.workers import collect_seldom, keep_what_is_loaded, take_turns_often


def test_only_processes_of_spark_keep_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = keep_what_is_loaded.__wrapped__
    frozen = gc.get_freeze_count()
    keep()
    assert gc.get_freeze_count() == frozen
    with monkeypatch.context() as patch:
        # One that is made would be that of this process for good.
        patch.setattr(TaskContext, "get", object)
        keep()
        assert gc.get_freeze_count() > frozen
    gc.unfreeze()
    # That in which the driver has a plan made: it is started as `python -m pyspark.daemon`.
    main = ModuleType("__main__")
    monkeypatch.setattr(main, "__spec__", SimpleNamespace(name="pyspark.daemon"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    try:
        keep()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_only_processes_of_spark_collect_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_threshold() == before
        monkeypatch.setattr(TaskContext, "get", object)
        gc.set_threshold(0, 10, 10)
        collect_seldom()
        assert gc.get_threshold() == (0, 10, 10), "who turned it off wants none"
        gc.set_threshold(1_000_000, 10, 10)
        collect_seldom()
        assert gc.get_threshold() == (1_000_000, 10, 10)
        gc.set_threshold(*before)
        collect_seldom()
        assert gc.get_threshold() == (100_000, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_only_threads_of_sparks_processes_take_turns_often(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval()
    try:
        take_turns_often()
        assert sys.getswitchinterval() == before
        monkeypatch.setattr(TaskContext, "get", object)
        take_turns_often()
        assert sys.getswitchinterval() == pytest.approx(0.001, rel=0.01)
        sys.setswitchinterval(0.0001)
        take_turns_often()
        assert sys.getswitchinterval() < 0.00011, "somebody wants them more often"
    finally:
        sys.setswitchinterval(before)
