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
        if itemsize == 2 and num_columns % 256 == 0:
            columns = 256  # a warp for an edge, as there is nothing to add over lanes: 6.4 ms, else 6.8 (found order)
        heads = 1
    else:
        columns = min(power_of_2(num_columns), _BLOCK_BYTES // itemsize)
        heads = min(power_of_2(num_heads), max(1, _BLOCK_BYTES // itemsize // columns))
    row_bytes = heads * columns * itemsize
    if num_heads == 1 and row_bytes == 128 and itemsize == 2 and mean_degree >= 32 and num_streams == 1:
        return Tile(1, 4, 4, 1, columns)  # two rows in lockstep took 3.2 ms, maxima here 2.4; sums were not timed
    if num_heads == 1 and row_bytes <= 16 and mean_degree >= 32 and num_streams == 1:
        # Eight rows at once, for one alone waits for its offsets, indices and values in turn: F = 1 in clustered order
        # 0.44 ms, else 0.67, in random order 0.93 both (H200); 16 lanes still read a row's indices side by side.
        return Tile(4, 8, 2, 1, columns) if columns == 8 else Tile(8, 16, 2 if columns == 1 else 1, 1, columns)
    loads = max(1, LOADS // num_streams)
    if row_bytes < 128 and itemsize == 2:
        loads = max(1, loads // 2)  # their float32 sums are kept for each edge slot: registers
    most = max(1, min(16, power_of_2(mean_degree)))
    if num_heads == 1 and row_bytes == _BLOCK_BYTES and mean_degree >= 32 and num_streams == 1:
        loads, most = 2 * loads, 32  # 3.38 ms in bfloat16, else 3.44, and 5.52 in float32, else 5.71 (F = 128)
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
