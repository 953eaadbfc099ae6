"""Bits for each tensor: the fewest bytes whose squared error, all tensors together, is at most that of 4 bits each.

A multiple-choice knapsack over measured errors, as CGX and L-GreCo pose it (Markov et al., "CGX", Middleware 2022;
"L-GreCo", MLSys 2024). Exact for few tensors; by the best error for each byte otherwise.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from torch import Tensor

from nugnn.comm.compression.arrangement import rounding_error
from nugnn.comm.compression.wire import Wire

BITS = tuple(range(1, 9))
_UNIFORM = 4
_MOST_STATES = 1 << 11


def quantization_errors(x: Tensor, bucket: int) -> list[float]:
    """Squared error of ``x (n,)`` float32 for each of `BITS`, infinite where it is not finite."""
    return [rounding_error(x, Wire(f"{bits}bit", bucket)) for bits in BITS]


def bits_for(sizes: Sequence[int], errors: Sequence[Sequence[float]], buckets: Sequence[int]) -> list[int]:
    """Bits of each tensor.

    Args:
        sizes: Values of each.
        errors: Of each, for each of `BITS`.
        buckets: Of each, values that share their ends.

    >>> bits_for([4096, 4096], [[64, 16, 4, 1, 0.2, 0.06, 0.02, 0], [0.8, 0.16, 0.04, 0.01, 0, 0, 0, 0]], [1024] * 2)
    [5, 1]
    >>> bits_for([4096, 4096], [[64, 16, 4, 1, 0.2, 0.06, 0.02, 0]] * 2, [1024] * 2)
    [4, 4]
    """
    uniform = [_UNIFORM] * len(sizes)
    choices = [
        [(Wire(f"{b}bit", bucket).num_bytes(size), error) for b, error in zip(BITS, of_tensor, strict=True)]
        for size, of_tensor, bucket in zip(sizes, errors, buckets, strict=True)
    ]
    at_uniform = [of_tensor[_UNIFORM - 1] for of_tensor in choices]
    budget = math.fsum(error for _, error in at_uniform)
    if not math.isfinite(budget):
        return uniform
    chosen = _exact(choices, budget)
    if chosen is None:
        chosen = _greedy(choices, budget)
        if sum(c[b - 1][0] for c, b in zip(choices, chosen, strict=True)) >= sum(n for n, _ in at_uniform):
            return uniform
    return chosen


_Choices = list[list[tuple[int, float]]]


def _exact(choices: _Choices, budget: float) -> list[int] | None:
    """Over all states that no other one beats in bytes and error; None where there are too many."""
    states: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    least_to_come = [math.fsum(min(e for _, e in c) for c in choices[i + 1 :]) for i in range(len(choices))]
    for of_tensor, least in zip(choices, least_to_come, strict=True):
        grown = sorted(
            (num_bytes + more, error + extra, (*path, bits))
            for num_bytes, error, path in states
            for bits, (more, extra) in zip(BITS, of_tensor, strict=True)
            if error + extra + least <= budget * (1 + 1e-12)
        )
        states, best = [], math.inf
        for state in grown:
            if state[1] < best:
                states.append(state)
                best = state[1]
        if len(states) > _MOST_STATES:
            return None
    fitting = [state for state in states if state[1] <= budget]
    return list(fitting[0][2]) if fitting else [_UNIFORM] * len(choices)


def _greedy(choices: _Choices, budget: float) -> list[int]:
    """From the fewest bits up, each time where a byte takes away the most error."""
    bits = [BITS[0]] * len(choices)
    heap: list[tuple[float, int, int]] = []

    def offer(tensor: int) -> None:
        num_bytes, error = choices[tensor][bits[tensor] - 1]
        gains = [
            ((choices[tensor][b - 1][1] - error) / (choices[tensor][b - 1][0] - num_bytes), tensor, b)
            for b in BITS
            if b > bits[tensor]
        ]
        if gains:
            heapq.heappush(heap, min(gains))

    for tensor in range(len(choices)):
        offer(tensor)
    while heap and math.fsum(c[b - 1][1] for c, b in zip(choices, bits, strict=True)) > budget:
        _, tensor, b = heapq.heappop(heap)
        bits[tensor] = b
        offer(tensor)
    return _trimmed(choices, bits, budget)


def _trimmed(choices: _Choices, bits: list[int], budget: float) -> list[int]:
    """With fewer bits where the error that is left allows it, the largest tensors first."""
    left = budget - math.fsum(c[b - 1][1] for c, b in zip(choices, bits, strict=True))
    for tensor in sorted(range(len(bits)), key=lambda i: -choices[i][0][0]):
        now = choices[tensor][bits[tensor] - 1][1]
        for b in BITS[: bits[tensor] - 1]:
            if choices[tensor][b - 1][1] - now <= left:
                left -= choices[tensor][b - 1][1] - now
                bits[tensor] = b
                break
    return bits
