"""Half a graph without the other half: every case is timed, and its counts are those of the split."""

from __future__ import annotations

import half_alone
import pytest

from nugnn.comm import early_rows


@pytest.mark.slow
def test_a_half_is_timed_in_every_way_beside_the_whole(tmp_path) -> None:
    before = early_rows.EDGES_PER_ROW
    small = ["--device", "cpu", "--nodes", "600", "--arcs", "6000", "--families", "mixed-like"]
    few = ["--models", "gcn", "gat", "--epochs", "2", "--edges-per-row", "3", "--kernels", "2"]
    rows = half_alone.main([*small, *few, "--rows", str(tmp_path / "rows.jsonl")]).rows
    named = [(row["model"], row["system"]) for row in rows]
    halves = ["half, off", "half, backward", "half, on 3"]
    assert named == [("gcn", each) for each in ("whole", *halves)] + [("gat", each) for each in ("whole", "half, off")]
    for row in rows:
        assert row["median_ms"] > 0 and len(row["samples_ms"]) == 2 and len(row["kernels"]) == 2
        assert row["beside_whole"] > 0 and (row["system"] != "whole" or row["beside_whole"] == 1)
        half = row["half"]
        assert half["inner"] == 300 and 0 < half["halo_edges"] < half["edges"]
        assert 0 < half["halo"] <= 300 and 0 < half["sent"] <= 300
    assert early_rows.EDGES_PER_ROW == before
