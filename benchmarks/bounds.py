"""What a card can do at best: bytes copied per second, and bytes of rows gathered per second out of the cache.

An SpMM can be no faster than reading every input and writing the output once at the copy rate, nor than gathering one
row for each edge at the rate of the cache when every row is in it. Both rates are measured, not taken from a datasheet.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from harness import Timing, time_ms
from torch import Tensor

_COPIED_BYTES = 1 << 30
_TABLE_BYTES = 12 << 20
"""Rows of the gather: a quarter of an H100's L2, so they stay in it beside the indices that stream through."""
_GATHERED_BYTES = 8 << 30
_CONFIGS = [
    {"edges": edges, "unroll": unroll, "num_warps": warps}
    for edges, unroll, warps in ((64, 8, 1), (64, 16, 1), (64, 16, 2), (64, 32, 4), (256, 16, 1), (256, 32, 2))
]
"""Few, since each is compiled for each type and width."""


def copy_rate(device: torch.device, num_bytes: int = _COPIED_BYTES) -> tuple[float, Timing]:
    """Bytes read and written per second by a copy between two buffers on the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_ms(lambda: target.copy_(source), device, budget_seconds=0.2)
    return 2 * num_bytes / (timing.median_ms / 1e3), timing


@triton.jit
def _gather_kernel(
    x, indices, out, num_features, edges: tl.constexpr, unroll: tl.constexpr, block_features: tl.constexpr
):
    """Each program adds up the rows that ``edges`` indices name, ``unroll`` of them in flight, and writes the sum."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block_features)
    total = tl.zeros((block_features,), dtype=tl.float32)
    for start in range(0, edges, unroll):
        ids = tl.load(indices + program * edges + start + tl.arange(0, unroll)).to(tl.int64)
        rows = tl.load(x + ids[:, None] * num_features + columns[None, :], mask=columns[None, :] < num_features)
        total += tl.sum(rows.to(tl.float32), 0)
    tl.store(out + program * num_features + columns, total, mask=columns < num_features)


def gather_sums(x: Tensor, indices: Tensor, edges: int, unroll: int, num_warps: int = 4) -> Tensor:
    """Sum of each ``edges`` consecutive rows ``x[indices]``: ``(len(indices) / edges, F)`` float32."""
    num_programs, remainder = divmod(len(indices), edges)
    if remainder or edges % unroll:
        raise ValueError(f"{len(indices)} indices do not divide into programs of {edges}, or those into {unroll}")
    num_features = x.shape[1]
    out = torch.empty(num_programs, num_features, dtype=torch.float32, device=x.device)
    _gather_kernel[(num_programs,)](
        x, indices, out, num_features, edges, unroll, triton.next_power_of_2(num_features), num_warps=num_warps
    )
    return out


def gather_rate(
    device: torch.device,
    num_features: int,
    dtype: torch.dtype,
    *,
    table_bytes: int = _TABLE_BYTES,
    gathered_bytes: int = _GATHERED_BYTES,
    configs: list[dict[str, Any]] = _CONFIGS,
) -> dict[str, Any]:
    """Bytes per second of rows gathered and added up while all rows lie in the cache; the best of ``configs``."""
    row_bytes = num_features * dtype.itemsize
    num_rows = max(1, table_bytes // row_bytes)
    num_edges = max(1, gathered_bytes // row_bytes // 256) * 256
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.ones(num_rows, num_features, dtype=dtype, device=device)
    indices = torch.randint(num_rows, (num_edges,), dtype=torch.int32, device=device, generator=generator)
    best: dict[str, Any] = {}
    for config in configs:
        sums = gather_sums(x, indices, **config)
        # ones, so any skipped or repeated row shows
        assert bool((sums == config["edges"]).all()), f"the gather kernel is wrong with {config}"
        timing = time_ms(
            lambda config=config: gather_sums(x, indices, **config),
            device, warmup=2, budget_seconds=0.02, flush_l2=False,
        )  # fmt: skip
        rate = num_edges * row_bytes / (timing.median_ms / 1e3)
        if rate > best.get("bytes_per_second", 0.0):
            best = {"bytes_per_second": rate, "config": config, "timing": timing}
    return best
