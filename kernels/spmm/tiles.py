"""How much of a feature matrix one program of a GPU kernel reads at once, chosen from sizes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """What one program loads before it adds: ``unroll * rows * edges`` feature rows of ``heads * columns`` features.

    Args:
        rows: Output rows in lockstep; 1 walks the groups of the schedule.
        edges: Edges of a row side by side in a warp.
        unroll: Loads in flight in each thread, so that ``unroll * edges`` edges of a row are read at once.
        heads, columns: Features, powers of two like the others.
        row_sets: How many sets of ``rows`` a program takes one after the other; 1 where ``rows`` is 1.
        num_warps: Of a program.
    """

    rows: int
    edges: int
    unroll: int
    heads: int
    columns: int
    row_sets: int = 1
    num_warps: int = 1


LOADS = 8
"""Loads of 16 bytes in flight in each thread."""
_BLOCK_BYTES = 256
"""Widest part of a feature row in one program; wider rows are passes over the edges, whose features share the cache.

On an H100 a row of 512 bytes took more than twice as long as one of 256 (``gpu_spmm.py``), in random and in clustered
order: two passes that read half of each row find twice as many rows in the cache.
"""
_PASS_BYTES = 64
"""What one more pass costs for each edge: its index and the instructions around it, as bytes of features."""
_MANY_EDGES = 32
"""Mean degree from which tiles are those of :data:`_SEARCHED`."""
_SEARCHED: dict[tuple[int, int], tuple[int, int, int]] = {
    (4, 32): (4, 4, 4),
    (4, 64): (4, 4, 2),
    (4, 128): (1, 8, 4),
    (4, 256): (1, 2, 16),
    (2, 32): (4, 4, 2),
    (2, 64): (1, 8, 2),
    (2, 128): (1, 8, 4),
    (2, 256): (1, 2, 16),
    (8, 256): (1, 2, 16),
}
"""``rows, edges, unroll`` by the bytes of a value and of a row's part, for plain sums of rows with many edges.

Milliseconds on an H200, products-like, in the given order and by communities, before and with them: float32 32 bytes
1.77 and 1.07 to 1.51 and 0.86; 64 bytes 2.49 and 1.62 to 1.99 and 1.17; 128 bytes 3.9 and 2.6 to 2.5 and 1.6; bfloat16
32 bytes 1.98 and 1.23 to 1.65 and 1.01; 64 bytes 3.1 and 2.07 to 2.32 and 1.59; 128 bytes 3.0 and 2.2 to 2.7 and 2.0.
"""


@functools.cache
def choose_tile(num_heads: int, num_columns: int, itemsize: int, mean_degree: int, num_streams: int = 1) -> Tile:
    """A tile for rows of ``num_heads * num_columns`` features, from sizes alone: a user's step tries nothing out.

    ``num_streams``: what a thread keeps for each value beside a running sum, in values.
    """
    if num_heads == 1:
        fitting = power_of_2(num_columns)
        sizes = [size for size in (_BLOCK_BYTES // itemsize >> shift for shift in range(4)) if size <= fitting]
        columns = fitting
        if fitting * itemsize > _BLOCK_BYTES // 8:
            columns = min(sizes, key=lambda size: -(-num_columns // size) * (size * itemsize + _PASS_BYTES))
        if itemsize == 2 and (num_columns % 256 == 0 or 128 < num_columns < 256):
            # a warp for an edge, as there is nothing to add over lanes: 256 columns 6.4 ms, else 6.8, 160 columns 5.5,
            # else 6.6 (found order)
            columns = 256
        heads = 1
    else:
        columns = min(power_of_2(num_columns), _BLOCK_BYTES // itemsize)
        heads = min(power_of_2(num_heads), max(1, _BLOCK_BYTES // itemsize // columns))
    row_bytes = heads * columns * itemsize
    if num_heads == 1 and mean_degree >= _MANY_EDGES and num_streams == 1:
        if row_bytes <= 16:
            # Eight rows at once, for one alone waits for its offsets, indices and values in turn: F = 1 in clustered
            # order 0.44 ms, else 0.67, in random order 0.93 both (H200); 16 lanes still read a row's indices side by
            # side.
            return Tile(4, 8, 2, 1, columns) if columns == 8 else Tile(8, 16, 2 if columns == 1 else 1, 1, columns)
        if (itemsize, row_bytes) in _SEARCHED:
            rows, edges, unroll = _SEARCHED[itemsize, row_bytes]
            return Tile(rows, edges, unroll, 1, columns)
    loads = max(1, LOADS // num_streams)
    if row_bytes < 128 and itemsize == 2:
        loads = max(1, loads // 2)  # their float32 sums are kept for each edge slot: registers
    most = max(1, min(16, power_of_2(mean_degree)))
    slots = max(1, loads * 512 // row_bytes)  # edges that one warp reads at once
    of_a_row = min(most, slots)
    rows = min(16, slots // of_a_row)
    # with rows side by side, few lanes for each: its sum over lanes is then short
    side_by_side = max(1, min(of_a_row, 512 // row_bytes, 32 if rows == 1 else 4))
    return Tile(rows, side_by_side, of_a_row // side_by_side, heads, columns)


@functools.cache
def wide_tile(num_columns: int, itemsize: int, mean_degree: int, loads: int = LOADS) -> Tile:
    """A tile of one row at a time, for rows of ``num_columns`` that fill some lanes of a warp by themselves.

    ``loads``: of 16 bytes in flight in each thread.
    """
    columns = choose_tile(1, num_columns, itemsize, mean_degree).columns
    if itemsize == 4 and num_columns % 128 == 0:
        columns = 128  # a warp for an edge: no lanes to reduce; 6.7 ms in the order found, else 7.4; given 12.3, 11.0
    side_by_side = max(1, min(512 // (columns * itemsize), power_of_2(mean_degree)))
    unroll = max(1, min(loads, power_of_2(mean_degree) // side_by_side))
    return Tile(1, side_by_side, unroll, 1, columns)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
