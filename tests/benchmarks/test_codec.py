"""The codec's table: sizes by arithmetic, errors of Gaussian data by what max-min quantization of it gives."""

from __future__ import annotations

import codec
import pytest

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


def test_speeds_stand_beside_a_copy() -> None:
    found = dict(codec.main(["--speed", "cpu", "--values", "4096"]))
    assert len(found) == 5 * 3 and all(share > 0 for share in found.values())
