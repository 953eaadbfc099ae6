"""The codec's table: sizes by arithmetic, errors of Gaussian data by what max-min quantization of it gives."""

from __future__ import annotations

from pathlib import Path

import codec
import pytest
import torch
from harness import read_rows

from nugnn.kernels.quantize import encode_buckets

# relative errors of unit Gaussian data in buckets, to nearest and stochastic, and of a mean over ranks
EXPECTED = {
    "8 128 ratio": 3.76, "8 512 nearest": 0.0069, "8 1024 stochastic": 0.0105, "4 128 nearest": 0.100,
    "4 512 stochastic": 0.167, "4 1024 ratio": 7.88, "2 128 stochastic": 0.71, "2 1024 nearest": 0.63,
    "2 ranks SRA nearest": 0.155, "8 ranks SRA stochastic": 0.244, "4 ranks ring nearest": 0.199,
    "8 ranks ring stochastic": 0.389,
}  # fmt: skip


def test_sizes_and_errors_are_those_of_the_scheme() -> None:
    found = dict(codec.main(["--values", str(1 << 19)]))
    assert len(found) == 9 * 3 + 3 * 4
    for name, value in EXPECTED.items():
        assert found[name] == pytest.approx(value, rel=0.02), name


def test_speeds_stand_beside_a_copy_and_rows_are_kept(tmp_path: Path) -> None:
    found = dict(codec.main(["--speed", "cpu", "--values", "1024", "--bits", "5", "8", "--out", str(tmp_path)]))
    assert len(found) == 2 * 3 and all(share > 0 for share in found.values())
    rows = read_rows(tmp_path)
    for row in rows:  # float32 on one side, on the other a bucket's two ends and its bits
        assert row["moved_bytes"] == 4 * 4096 + 4 * (8 + 128 * row["bits"])
        share = codec.rate_of(row) / row["copy_bytes_per_second"]
        assert share == found[f"{row['bits']} {row['work']}"]
    assert len(rows) == len(found)


@pytest.mark.parametrize("what", codec.WORKS)
def test_what_is_timed_is_what_the_definition_says(what: str) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    result = codec.work_of(what, x, encode_buckets(x, 5, 1024), 5)
    assert codec.problem_of(what, x, 5, result) is None
    result[2000] = result[2000] + 1
    assert codec.problem_of(what, x, 5, result) is not None
