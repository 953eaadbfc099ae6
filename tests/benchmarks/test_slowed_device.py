"""What the benchmark of a device that becomes slow makes of its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import slowed_device
import torch
from slowed_device import epochs_until, figures, line_of, speeds


def rank(epoch: list[float], compute: list[float], losses: list[float] | None = None, **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "compute": compute, "losses": losses or [1.0] * len(epoch), "moves": [], **more}


def test_epochs_until_near_the_optimum() -> None:
    slow, fast = [3.0] * 6, [1.55] * 8
    assert epochs_until([1.0] * 5 + slow + fast, 5, 1.5) == 6
    assert epochs_until([1.0] * 5 + slow + [1.9] * 8, 5, 1.5) is None
    one_slow_epoch = [*fast[:3], 4.0, *fast]
    assert epochs_until([1.0] * 5 + slow + one_slow_epoch, 5, 1.5) == 6
    assert epochs_until([1.0] * 5 + [4.0] + fast, 5, 1.5) == 1, "the epoch of the move itself is not near"


def test_a_row_says_how_slow_and_when_it_was_near_again() -> None:
    moves = [{"after_epoch": 12, "share": 0.25, "seconds": 0.2}]
    walls = [1.1] * 8 + [3.2] * 4 + [1.6] * 8
    sizes = {"nodes_then": 100, "edges_then": 1000}
    moved = [
        rank(walls, [1.0] * 12 + [1.5] * 8, moves=moves, **sizes),
        rank(walls, [1.0] * 8 + [3.0] * 4 + [1.5] * 8, moves=moves, **sizes),
    ]
    steady = [rank([1.1] * 20, [1.0] * 20, [1.0] * 19 + [1.001])] * 2
    ideal = [rank([1.6] * 5, [1.5] * 5, halo_rows=7)] * 2
    row = figures(steady, moved, ideal, 8)
    assert row["slower"] == 3 and row["epochs_until_near"] == 4 and row["halo_rows_of_ideal"] == 14
    assert row["slow_ms"] == 3200 and row["after_ms"] == row["optimum_ms"] == 1600
    assert row["loss_difference"] == pytest.approx(0.001, rel=0.01)
    assert speeds(moved, 9, 12) == [2000, pytest.approx(2000 / 3)]
    line = line_of(row | {"graph": "products-like", "model": "sage", "exact_difference": 2e-16})
    assert "3.00x slower" in line and "after 4 epochs; moves after 12 (25%, 0.20 s)" in line
    assert "losses 1.0e-03 (2e-16 in float64)" in line
    assert "losses differ" in line_of(row | {"graph": "g", "model": "sage", "error": "losses differ in float64: 1e-3"})


def test_the_page_says_what_the_kept_rows_say() -> None:
    root = Path(slowed_device.__file__).resolve().parents[1]
    page = (root / "docs" / "rebalance.md").read_text(encoding="utf-8")
    lines = (root / "benchmarks" / "rows" / "slowed_device" / "h200.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    more = [f"{row['moves'][-1]['halo_rows'][-1] / row['halo_rows_of_ideal'] - 1:.1%}"[:-1] for row in rows]
    assert f"halo rows came to {' and '.join(more)} % more than in" in page
    for row in rows:
        times = " | ".join(f"{row[name]:.1f}" for name in ("before_ms", "slow_ms", "after_ms", "optimum_ms"))
        (moved,) = row["moves"]
        told = f"| {row['model'].upper()} | {row['slower']:.1f} times | {times} | {row['epochs_until_near']} epochs |"
        assert f"{told} {moved['share']:.1%}".replace("%", " %") in page
        assert float(f"{row['loss_difference']:.0e}") < 1e-5


def test_parts_are_stretches_of_equal_work() -> None:
    from slowed_device import _NODE_WORK, _parts

    class Graph:
        degrees = torch.arange(1, 1001)

    parts = _parts(Graph(), [0.25, 0.75])  # type: ignore[arg-type]
    work = torch.zeros(2).index_add(0, parts.int(), (Graph.degrees + _NODE_WORK).float())
    assert (parts.diff() >= 0).all() and float(work[0] / work.sum()) == pytest.approx(0.25, abs=0.002)
