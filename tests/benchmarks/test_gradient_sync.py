"""Bytes that are counted are those that travel."""

from __future__ import annotations

import gradient_sync
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_interface_sees_what_was_counted(num_ranks: int) -> None:
    ways = ["fp32", "bf16", "4bit", "powersgd"]
    rows = gradient_sync.main(["--ranks", str(num_ranks), "--values", "600000", "--rounds", "1", "--ways", *ways])
    for name, row in rows.items():
        assert row["ms"] is not None and row["ms"] > 0 and row["sent_bytes"] is not None
        values = 600_000 // 1024 * 1024
        bits = {"fp32": 32, "bf16": 16, "4bit": 4 + 64 / 1024}.get(name)
        if bits is not None:  # chunks differ by a bucket at most
            expected = 2 * (num_ranks - 1) / num_ranks * values * bits / 8
            assert row["sent_bytes"] == pytest.approx(expected, abs=2 * num_ranks * 4096)
        if row["interface_bytes"] is not None:  # of all ranks, with headers; others may use the interface too
            assert row["interface_bytes"] >= num_ranks * row["sent_bytes"]
