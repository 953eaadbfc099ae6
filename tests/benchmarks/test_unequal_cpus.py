"""CPU workers with unequal threads: what the benchmark makes of its runs, and shares that fit on four cores."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import unequal_cpus
from harness import Recorder

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _run(losses: list[float], milliseconds: float, nodes: tuple[int, ...]) -> Any:
    epochs = [SimpleNamespace(loss=loss, seconds={"epoch": milliseconds / 1e3}) for loss in losses]
    times = {"epoch_seconds": milliseconds / 1e3, "halo_seconds": 0.0, "sync_seconds": 0.001}
    reports = [{"nodes": count, "halo_rows": 0} | times for count in nodes]
    return SimpleNamespace(history=epochs, rank_reports=reports, plan=None)


def _compared(monkeypatch: pytest.MonkeyPatch, losses_of_auto: list[float]) -> dict[str, dict[str, Any]]:
    losses = [2.0, 1.5, 1.2, 1.0, 0.9]
    runs = {
        "even": _run(losses, 20.0, (50, 50)), "flops": _run(losses, 16.0, (80, 20)),
        "bandwidth": _run(losses, 15.0, (70, 30)), "auto": _run(losses_of_auto, 12.5, (75, 25)),
    }  # fmt: skip

    def trained(*_: Any, limits: str, shares: str | None = None, **__: Any) -> Any:
        return _run(losses, 40.0 if limits == "threads=1" else 40.0 / 3, (100,)) if shares is None else runs[shares]

    monkeypatch.setattr(unequal_cpus, "_trained", trained)
    graph: Any = SimpleNamespace(num_nodes=100, num_edges=1000)
    given = unequal_cpus.parse(["--epochs", "2", "--rounds", "2"])
    rows = unequal_cpus.compare(graph, "sage", given, Recorder(None, torch.device("cpu"), unequal_cpus.line_of))
    return {row["system"]: row for row in rows}


def test_splits_are_held_against_what_both_workers_do_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _compared(monkeypatch, [2.0, 1.5, 1.2, 1.0, 0.9])
    assert rows["even"]["bound_ms"] == pytest.approx(10.0) and rows["even"]["gain_share"] == 0
    assert rows["auto"]["gain_share"] == pytest.approx(0.75)
    assert rows["auto"]["best_static_ratio"] == pytest.approx(15 / 12.5)
    assert rows["auto"]["waits"] == pytest.approx([1 / 12.5] * 2) and rows["auto"]["shares"] == [0.75, 0.25]


@pytest.mark.parametrize("losses", [[2.0, 1.5, 1.2, 1.0, 0.95], [2.0, 1.5, 1.2, 1.0, math.nan]])
def test_a_run_with_other_losses_has_no_time(
    losses: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _compared(monkeypatch, losses)
    assert "losses differ" in rows["auto"]["error"] and "median_ms" not in rows["auto"]
    assert "error" not in rows["even"]
    assert "times as long as auto" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(CORES < 4, reason="takes four cores: three for one worker, one for the other")
@pytest.mark.parametrize("model", ["sage", "gat"])
def test_workers_with_three_threads_and_one_have_shares_that_fit(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Not behind the best single number beyond the spread of epochs, and nearer to the bound than to even shares.

    With one thread of four the second worker's share is a quarter where work alone counts, and more where exchanges do.
    """
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the workers' threads are what the limits say
    rows = {row["system"]: row for row in unequal_cpus.main(["--models", model])}
    auto, even = rows["auto"], rows["even"]
    assert not any("error" in row for row in rows.values())
    best = min((row for name, row in rows.items() if name != "auto"), key=lambda row: row["median_ms"])
    assert auto["shares"][1] < even["shares"][1] and auto["gain_share"] > 0.5
    assert auto["p20_ms"] < best["p80_ms"]
    # 4.5 % in the mean of many steps on two ranks (`replay_links.py`), single ones off by up to five times that
    assert abs(auto["forecast_ms"] / auto["median_ms"] - 1) < 0.25
