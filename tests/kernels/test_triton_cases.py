"""The acceptance cases of kernels over all Triton kernels, in the interpreter: a test for each law of its checks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from .triton_laws import check_law_of_all

CHECKS = Path(__file__).with_name("case_triton_checks.py")
LAWS = re.findall(r"^def check_(kernels_(\d\d)_\w+)\(", CHECKS.read_text(), re.M)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def of_case(number: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("law", [law for law, case in LAWS if case == number])


@of_case("01")
def test_kernels_01_counts_are_64_bits_from_end_to_end(law: str) -> None:
    check_law_of_all(CHECKS, law)


@of_case("02")
def test_kernels_02_offsets_past_31_bits(law: str) -> None:
    check_law_of_all(CHECKS, law)


@of_case("03")
def test_kernels_03_zero_sizes_in_the_interpreter(law: str) -> None:
    check_law_of_all(CHECKS, law)


@of_case("04")
def test_kernels_04_bfloat16_in_the_interpreter(law: str) -> None:
    check_law_of_all(CHECKS, law)


@of_case("06")
def test_kernels_06_edge_softmax_in_triton(law: str) -> None:
    check_law_of_all(CHECKS, law)


@of_case("07")
def test_kernels_07_id_types_in_triton(law: str) -> None:
    check_law_of_all(CHECKS, law)


def test_every_law_is_run() -> None:
    assert len(LAWS) == len(re.findall(r"^def check_", CHECKS.read_text(), re.M))
    assert {case for _, case in LAWS} == {"01", "02", "03", "04", "06", "07"}
