"""What a device can do, measured on it: every rate of a `DeviceProfile`, each result checked before it is timed.

The sums over neighbours and the picking of rows are the kernels that training runs, not stand-ins for them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nugnn.kernels.spmm import spmm
from nugnn.kernels.structure import Structure
from nugnn.kernels.take_rows import take_rows
from nugnn.planning import device_facts
from nugnn.planning.fitting import WrongResult, largest_that_fits
from nugnn.planning.in_use import said_of_waits
from nugnn.planning.measure_products import measure_products
from nugnn.planning.profiles import DeviceProfile
from nugnn.planning.timing import Rate, Timing, time_calls, timing_of

WIDTH = 128
"""Values of a row, float32."""
DEGREE = 16
"""In-edges of each destination; their sources are random."""

_ROW_BYTES = 4 * WIDTH
_IN_MEMORY = 8
"""Features are so many times as large as the last cache: one row in eight is found there at random."""
_IN_CACHE = 4
"""So many times smaller than it, for indices and sums pass through the cache as well."""
_LEAST_BYTES, _LEAST_ROWS, _LEAST_EDGES = 1 << 20, 1 << 12, 1 << 18
"""Below them nothing is measured. A sum over fewer edges would be DGL's on a CPU, not ours."""
_MOST_BYTES = 4 << 30
_MEMORY_PART = 16
"""One measurement's features take no more than this part of what is free."""
_GPU_EDGES = 1 << 24
"""Of a sum, which takes a millisecond or more with them."""
_PICKED_PART = 4
_MARKS = 61
"""Row r holds the number r % 61, so that every sum is a whole number that float32 holds exactly."""
_CALLS = 200
"""Tiny operators between two looks at the clock: fewer than a GPU's queue holds."""


def _ignored(text: str) -> None:
    """Nobody wants to know."""


def measure_device(
    device: torch.device,
    *,
    seconds: float,
    usable_bytes: int | None = None,
    on_stage: Callable[[str], None] = _ignored,
    on_note: Callable[[str], None] = _ignored,
) -> DeviceProfile:
    """Measure a device that is idle otherwise; torch's settings and generators are afterwards as they were.

    The sums over neighbours take rows in at random, which no order of nodes makes worse.

    Args:
        device: ``cpu`` with the threads that torch has, or a GPU by its number in this process.
        seconds: For all timed calls together; compiling and making inputs come on top, 1 to 10 s the first time.
        usable_bytes: Where this process may use less memory than the device has: what it may use.
        on_stage: Called with what is measured next.
        on_note: Called with a sentence about what was left out or made smaller.

    Raises:
        RuntimeError: Memory does not suffice for the smallest sizes, or the device computes wrong sums.
    """
    budget = seconds / 10  # half for products, a tenth for each of the others
    whole_bytes = min(usable_bytes or 2**63, device_facts.memory_bytes(device))
    cache_bytes = device_facts.cache_bytes(device)
    most_bytes = min(_MOST_BYTES, min(whole_bytes, device_facts.free_bytes(device)) // _MEMORY_PART)
    large_bytes = min(_IN_MEMORY * cache_bytes, most_bytes)
    if large_bytes < _IN_MEMORY // 2 * cache_bytes:
        on_note(f"features of {large_bytes >> 20} MiB only, for lack of memory: part of them is found in the cache")
    rows, cached_rows = large_bytes // _ROW_BYTES, cache_bytes // _IN_CACHE // _ROW_BYTES
    # Triton launches on the device that is the current one
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with torch.no_grad(), current:
        on_stage("dense products")
        gemm = measure_products(device, seconds=5 * budget, on_note=on_note)
        on_stage("copies")
        stream = largest_that_fits(
            lambda size: copied(size, device, budget), large_bytes, _LEAST_BYTES, "copies, bytes", on_note
        )
        on_stage("sums over neighbours")
        gather = largest_that_fits(
            lambda rows: gathered(rows, _edges(rows, device), device, budget),
            max(_LEAST_ROWS, rows), _LEAST_ROWS, "sums over neighbours, rows", on_note,
        )  # fmt: skip
        most_edges = _GPU_EDGES if device.type == "cuda" else _LEAST_EDGES
        cached = largest_that_fits(
            lambda edges: gathered(max(1, cached_rows), edges, device, budget),
            most_edges, _LEAST_EDGES, "sums over neighbours in the cache, edges", on_note,
        )  # fmt: skip
        on_stage("picking rows")
        pack = largest_that_fits(
            lambda rows: packed(rows, device, budget),
            max(_LEAST_ROWS, rows), _LEAST_ROWS, "picking rows, rows", on_note,
        )  # fmt: skip
        on_stage("launches")
        launch = launched(device, budget)
    rates = {"stream_bytes": stream, "gather_bytes": gather, "cached_gather_bytes": cached, "pack_bytes": pack}
    spread = {f"gemm_flops.{name}": rate.spread for name, rate in gemm.items()}
    spread |= {name: rate.spread for name, rate in rates.items()} | {"launch_seconds": launch.spread}
    waited = {f"gemm_flops.{name}": rate.waited for name, rate in gemm.items()}
    waited |= {name: rate.waited for name, rate in rates.items()} | {"launch_seconds": launch.waited}
    return DeviceProfile(
        name=device_facts.device_name(device),
        kind="cuda" if device.type == "cuda" else "cpu",
        source="measured",
        uuid=device_facts.device_uuid(device),
        memory_bytes=whole_bytes,
        cache_bytes=cache_bytes,
        gemm_flops={name: rate.per_second for name, rate in gemm.items()},
        **{name: rate.per_second for name, rate in rates.items()},  # type: ignore[arg-type]
        launch_seconds=launch.seconds,
        multiprocessors=device_facts.num_multiprocessors(device),
        spread={name: round(value, 4) for name, value in spread.items()},
        note=said_of_waits(waited),
    )


def copied(num_bytes: int, device: torch.device, budget: float) -> Rate:
    """Bytes a second, read and written, of a copy of ``num_bytes``."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    target.copy_(source)
    _require(bool((target == 1).all()), "a copy differs")
    return Rate.of(2 * 4 * len(source), time_calls(lambda: target.copy_(source), device, budget_seconds=budget))


def _edges(num_rows: int, device: torch.device) -> int:
    """Of a random graph whose features are in memory: a CPU takes its time for each."""
    edges = min(_GPU_EDGES, DEGREE * num_rows) if device.type == "cuda" else num_rows // DEGREE * DEGREE
    return max(_LEAST_EDGES, edges)


def gathered(num_rows: int, num_edges: int, device: torch.device, budget: float) -> Rate:
    """Bytes of source rows a second of a sum over the neighbours in a random graph with ``num_rows`` sources.

    Each destination has `DEGREE` in-edges, of which ``num_edges`` is a multiple.
    """
    generator = torch.Generator(device).manual_seed(0)
    indices = torch.randint(num_rows, (num_edges,), generator=generator, dtype=torch.int32, device=device)
    structure = Structure(num_rows, torch.arange(0, num_edges + 1, DEGREE, device=device), indices)
    features = marked_rows(num_rows, device)
    sums = spmm(structure, "copy_lhs", "sum", features, None)
    expected = (indices % _MARKS).view(-1, DEGREE).sum(1).float()
    _require(bool((sums == expected[:, None]).all()), "a sum over neighbours is wrong")
    del sums, expected
    timing = time_calls(lambda: spmm(structure, "copy_lhs", "sum", features, None), device, budget_seconds=budget)
    return Rate.of(num_edges * _ROW_BYTES, timing)


def packed(num_rows: int, device: torch.device, budget: float) -> Rate:
    """Bytes a second, read and written, of picking a quarter of ``num_rows`` rows, in their order."""
    features = marked_rows(num_rows, device)
    generator = torch.Generator(device).manual_seed(0)
    rows = (
        torch.randperm(num_rows, generator=generator, device=device)[: max(1, num_rows // _PICKED_PART)].sort().values
    )
    _require(bool((take_rows(features, rows) == (rows % _MARKS)[:, None]).all()), "rows that were picked differ")
    timing = time_calls(lambda: take_rows(features, rows), device, budget_seconds=budget)
    return Rate.of(2 * len(rows) * _ROW_BYTES, timing)


def launched(device: torch.device, budget: float) -> Timing:
    """The host's seconds for one more operator: of a GPU to put it into the queue, of a CPU to do what is no work."""
    tiny = torch.zeros(1, dtype=torch.float64, device=device)
    samples: list[float] = []
    end = time.perf_counter() + budget
    while len(samples) < 5 or time.perf_counter() < end:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(_CALLS):
            tiny.add_(1)
        samples.append((time.perf_counter() - begin) / _CALLS)
    _require(float(tiny) == _CALLS * len(samples), "a sum of ones is wrong")
    return timing_of(samples[1:])


def marked_rows(num_rows: int, device: torch.device) -> Tensor:
    """``(num_rows, 128)`` float32, written row by row: untouched zeros of a CPU would all be one page of memory."""
    marks = (torch.arange(num_rows, device=device) % _MARKS).float()
    return marks[:, None].expand(num_rows, WIDTH).contiguous()


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise WrongResult(problem)
