"""The benchmark of start-up times measures what it says and knows its limits."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def start_up() -> ModuleType:
    """``benchmarks/start_up.py``, which is no package."""
    path = Path(__file__).parents[2] / "benchmarks" / "start_up.py"
    spec = importlib.util.spec_from_file_location("start_up", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["start_up"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_imports_are_timed_without_the_interpreter(start_up: ModuleType) -> None:
    begin = time.perf_counter()
    seconds = start_up.seconds_of_import("time.sleep(0.1)", "time.sleep(1)")
    assert 0.1 <= seconds <= time.perf_counter() - begin - 1


def test_the_first_epoch_is_seen(start_up: ModuleType) -> None:
    begin = time.perf_counter()
    assert 0 < start_up.seconds_to_first_epoch() < time.perf_counter() - begin


def test_a_run_that_fails_is_no_measurement(start_up: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="ended with 2 and epoch 1 not shown"):
        start_up.seconds_to_first_epoch("--layers", "0")


def test_rows_have_median_percentiles_and_the_limit(start_up: ModuleType) -> None:
    measurement = start_up.Measurement("help", "nugnn --help", lambda: 0.0, 0.5)
    text, is_kept = start_up.row_of(measurement, [0.9, 0.1, 0.2, 0.3, 0.4, 0.6])
    assert text.split()[2:] == ["0.350", "0.200", "0.600", "0.900", "0.5"] and is_kept
    assert not start_up.row_of(measurement, [0.6, 0.7, 0.1])[1]
    assert start_up.row_of(start_up.Measurement("x", "x", lambda: 0.0), [99.0])[1]


def test_wall_time_alone_counts(start_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 10.25])
    monkeypatch.setattr(start_up.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(start_up.subprocess, "run", lambda *_, **__: None)
    assert start_up.seconds_of_help() == 0.25
