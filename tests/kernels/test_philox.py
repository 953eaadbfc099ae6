"""Philox words: published answers, one value on every implementation, statistics, ids of 64 bits."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.kernels.philox import RandomKey, derived_key, random_words
from nugnn.kernels.philox.reference import block_words_reference, philox_block, random_words_reference

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123, kat_vectors, philox4x32 with 10 rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_published_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert philox_block(counter, key) == words  # type: ignore[arg-type]


def test_layout_of_keys_and_counters() -> None:
    key = RandomKey(seed=0x299F31D0_A4093822, step=0x243F6A88, stream=0x85A308D3)
    derived = philox_block((0x243F6A88, 0x85A308D3, 0, 0), (0xA4093822, 0x299F31D0))[:2]
    assert derived_key(key) == derived
    row = 0x1234_89ABCDEF
    expected = [w for block in range(3) for w in philox_block((0x89ABCDEF, 0x1234, block, 0), derived)]
    assert random_words(key, torch.tensor([row]), 11).tolist() == [expected[:11]]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    stream=st.integers(0, 2**32 - 1),
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=300),
    num_columns=st.integers(0, 41),
)
def test_numba_equals_the_reference(seed: int, step: int, stream: int, ids: list[int], num_columns: int) -> None:
    key, row_ids = RandomKey(seed, step, stream), torch.tensor(ids, dtype=torch.int64)
    words = random_words(key, row_ids, num_columns)
    assert words.dtype == torch.int64 and words.shape == (len(ids), num_columns)
    assert torch.equal(words, random_words_reference(derived_key(key), row_ids, num_columns))


def test_rows_wider_than_a_batch_and_more_rows_than_a_task() -> None:
    key = RandomKey(3, 1, 4)
    for num_rows, num_columns in ((3, 5000), (700, 9)):
        ids = torch.arange(num_rows).flip(0)
        assert torch.equal(
            random_words(key, ids, num_columns), random_words_reference(derived_key(key), ids, num_columns)
        )


def test_words_are_uniform_and_bits_balanced() -> None:
    words = random_words(RandomKey(11, 0, 0), torch.arange(4096), 64).flatten()
    count = words.numel()
    # A sum of n fair bits has standard deviation sqrt(n) / 2; 32 bits at 5 sigma: chance of failure below 2e-5.
    for bit in range(32):
        assert abs(int(((words >> bit) & 1).sum()) - count / 2) < 5 * count**0.5 / 2
    # Chi-square over 256 bins has mean 255 and variance 510.
    observed = torch.bincount(words >> 24, minlength=256).double()
    chi_square = ((observed - count / 256) ** 2 / (count / 256)).sum()
    assert abs(chi_square - 255) < 5 * 510**0.5


@pytest.mark.parametrize("change", [{"seed": 8}, {"step": 1}, {"stream": 1}])
def test_seed_step_and_stream_each_give_other_words(change: dict[str, int]) -> None:
    base = {"seed": 7, "step": 0, "stream": 0}
    ids = torch.arange(100)
    same = random_words(RandomKey(**base), ids, 8) == random_words(RandomKey(**{**base, **change}), ids, 8)
    assert same.sum() <= 1  # 800 words, chance of a collision 2e-7


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": 2**64}, {"step": 2**32}, {"stream": -1}])
def test_values_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RandomKey(**{"seed": 0, "step": 0, "stream": 0, **bad})


def test_wrong_row_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        random_words(RandomKey(0, 0, 0), torch.arange(3, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="num_columns"):
        random_words(RandomKey(0, 0, 0), torch.arange(3), -1)


def test_block_words_broadcast() -> None:
    words = block_words_reference((1, 2), torch.tensor([5, 6]), torch.tensor([0, 3]))
    assert words.tolist() == [list(philox_block((5, 0, 0, 0), (1, 2))), list(philox_block((6, 0, 3, 0), (1, 2)))]


TRITON = """
import torch
from nugnn.kernels.philox import RandomKey, derived_key
from nugnn.kernels.philox.gpu import probe_offset, random_words_triton
from nugnn.kernels.philox.reference import random_words_reference

device = {device!r}
key = derived_key(RandomKey(2**63 + 12345, 5, 77))
ids = torch.tensor([0, 1, 2**33 + 5, 2**63 - 1, -1] + list(range(60)), device=device)
for num_columns in (64, 0, 1, 3, 4, 5, 77):
    for row_ids in (ids, ids[:0], ids[:1]):
        words = random_words_triton(key, row_ids, num_columns)
        assert words.shape == (len(row_ids), num_columns) and words.dtype == torch.int64
        assert torch.equal(words, random_words_reference(key, row_ids, num_columns)), num_columns
for pair in ((1, 2), (1, 1), (2**32 - 1, 0)):
    assert torch.equal(random_words_triton(pair, ids, 9), random_words_reference(pair, ids, 9)), pair
assert probe_offset(524_288, 0, 4_096, device) == 2**31
assert probe_offset(524_288, 5, 4_096, device) == 2**31 + 5
assert probe_offset(2**31 - 1, 1, 2**31 - 1, device) == (2**31 - 1) ** 2 + 1
print("equal")
"""


def run_triton(device: str, **environment: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", TRITON.format(device=device)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "equal", result.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_02_and_kernels_03_triton_twin_in_the_interpreter() -> None:
    """Bit-equal words, 64-bit offsets past 2**31 (index function alone), empty sizes after a normal call."""
    run_triton("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_triton_twin_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_triton("cuda")
