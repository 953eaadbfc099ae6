"""Bits for each tensor: within the error of four for all, in no more bytes."""

from __future__ import annotations

import itertools
import math
import random

import torch

from nugnn.comm.compression.adaptive import BITS, _exact, _greedy, bits_for, quantization_errors
from nugnn.comm.compression.wire import Wire


def _drawn(num_tensors: int, seed: int) -> tuple[list[int], list[list[float]]]:
    """Errors fall fourfold with each bit, as of uniform values, with some noise."""
    draw = random.Random(seed)
    sizes = [draw.choice([1024, 3000, 65_536]) for _ in range(num_tensors)]
    scales = [10 ** draw.uniform(-5, 0) for _ in sizes]
    errors = [
        [n * scale / (2**b - 1) ** 2 * draw.uniform(0.8, 1.2) for b in BITS]
        for n, scale in zip(sizes, scales, strict=True)
    ]
    return sizes, errors


def _bytes_and_error(
    bits: tuple[int, ...] | list[int], sizes: list[int], errors: list[list[float]]
) -> tuple[int, float]:
    num_bytes = sum(Wire(f"{b}bit", 1024).num_bytes(n) for b, n in zip(bits, sizes, strict=True))
    return num_bytes, math.fsum(of_tensor[b - 1] for b, of_tensor in zip(bits, errors, strict=True))


def test_few_tensors_get_the_best_of_all_choices() -> None:
    for seed in range(6):
        sizes, errors = _drawn(4, seed)
        budget = _bytes_and_error([4] * 4, sizes, errors)[1]
        found = _bytes_and_error(bits_for(sizes, errors, [1024] * len(sizes)), sizes, errors)
        every = (_bytes_and_error(bits, sizes, errors) for bits in itertools.product(BITS, repeat=4))
        assert found[1] <= budget and found[0] == min(n for n, error in every if error <= budget)


def test_many_tensors_stay_within_the_error_and_save_bytes() -> None:
    for count in (1, 9, 60):
        sizes, errors = _drawn(count, count)
        found, uniform = (
            _bytes_and_error(b, sizes, errors) for b in (bits_for(sizes, errors, [1024] * len(sizes)), [4] * count)
        )
        assert found[1] <= uniform[1] and found[0] <= uniform[0]
        assert count < 9 or found[0] < 0.9 * uniform[0]


def test_the_fast_way_is_at_most_a_bit_of_the_largest_tensor_from_the_best_one() -> None:
    """As the greedy rule is for any knapsack: only its last step takes more than was needed."""
    for seed in range(5):
        sizes, errors = _drawn(8, seed)
        choices = [
            [(Wire(f"{b}bit", 1024).num_bytes(n), e[b - 1]) for b in BITS] for n, e in zip(sizes, errors, strict=True)
        ]
        budget = _bytes_and_error([4] * 8, sizes, errors)[1]
        exact, fast = _exact(choices, budget), _greedy(choices, budget)
        assert exact is not None
        best, near = _bytes_and_error(exact, sizes, errors), _bytes_and_error(fast, sizes, errors)
        assert max(best[1], near[1]) <= budget and best[0] <= near[0] <= best[0] + max(sizes) // 8


def test_gradients_that_are_zero_or_not_finite() -> None:
    assert bits_for([], [], []) == []
    assert bits_for([2048, 4096], [[0.0] * 8, [0.0] * 8], [1024] * 2) == [1, 1]
    assert bits_for([2048, 4096], [[math.inf] * 8, [1.0] * 8], [1024] * 2) == [4, 4]
    assert quantization_errors(torch.tensor([1.0, math.nan]), 64) == [math.inf] * 8
    errors = quantization_errors(torch.randn(5000, generator=torch.Generator().manual_seed(0)), 1024)
    # two bits between the ends are worse than one bit whose values are means
    assert errors[1:] == sorted(errors[1:], reverse=True) and 0 < errors[7] and errors[0] < errors[1]
