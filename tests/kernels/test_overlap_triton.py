"""Sums beside the exchange of halo rows on the code of a GPU, interpreted; on CPUs: `tests/nugnn/test_overlap.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .triton_laws import run_checks


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "law",
    [
        "sage_sends_first_and_changes_no_bit",
        pytest.param("other_layers_and_steps_keep_their_bits", marks=pytest.mark.slow),
        pytest.param("approximate_rows_are_the_same_whenever_they_leave", marks=pytest.mark.slow),
        pytest.param("parts_are_one_device", marks=pytest.mark.slow),
    ],
)
def test_the_code_of_a_gpu_in_the_interpreter(law: str) -> None:
    run_checks(Path(__file__).with_name("overlap_triton_checks.py"), "cpu", law)
