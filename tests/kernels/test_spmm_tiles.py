"""Tiles: powers of two, wide enough for the row, no more loads in flight than registers hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nugnn.kernels.spmm.tiles import LOADS, cdiv, choose_tile, power_of_2, wide_tile


@given(
    num_heads=st.integers(1, 16),
    num_columns=st.integers(1, 1100),
    itemsize=st.sampled_from([2, 4, 8]),
    mean_degree=st.integers(0, 200),
    num_streams=st.sampled_from([1, 2]),
)
def test_tiles_are_powers_of_two_within_their_bytes(
    num_heads: int, num_columns: int, itemsize: int, mean_degree: int, num_streams: int
) -> None:
    tile = choose_tile(num_heads, num_columns, itemsize, mean_degree, num_streams)
    sizes = (tile.rows, tile.edges, tile.unroll, tile.heads, tile.columns, tile.row_sets, tile.num_warps)
    assert all(size >= 1 and size & (size - 1) == 0 for size in sizes)
    row_bytes = tile.heads * tile.columns * itemsize
    assert row_bytes <= 1024 and tile.columns < 2 * num_columns and tile.heads < 2 * num_heads
    # sixteen bytes for each of 32 lanes and each load, unless one row alone is wider; twice that for sums of 256 bytes
    loads = 2 * LOADS if num_heads == num_streams == 1 and row_bytes == 256 else LOADS
    assert tile.rows * tile.edges * tile.unroll * row_bytes <= max(row_bytes, loads * 512 // num_streams)
    is_narrow = tile.edges == 32 and row_bytes <= 16 and mean_degree >= 32  # a lane for each edge
    assert is_narrow or tile.edges * tile.unroll <= max(1, power_of_2(mean_degree))
    assert num_heads > 1 or tile.heads == 1


@given(num_columns=st.integers(16, 1100), itemsize=st.sampled_from([2, 4]), mean_degree=st.integers(1, 200))
def test_a_wide_tile_takes_one_row_and_no_lane_twice(num_columns: int, itemsize: int, mean_degree: int) -> None:
    tile = wide_tile(num_columns, itemsize, mean_degree)
    assert (tile.rows, tile.heads, tile.row_sets, tile.num_warps) == (1, 1, 1, 1)
    assert tile.columns < 2 * num_columns and tile.edges * tile.columns * itemsize <= 512
    assert 1 <= tile.unroll <= LOADS and tile.edges * tile.unroll <= power_of_2(mean_degree)


def test_usual_widths_are_one_pass_and_odd_ones_waste_little() -> None:
    for itemsize in (2, 4):
        for width in (w for w in (1, 16, 47, 64, 100, 128) if w * itemsize <= 256):
            assert cdiv(width, choose_tile(1, width, itemsize, 50).columns) == 1
    for width in (257, 300, 520, 1000):
        columns = choose_tile(1, width, 4, 50).columns
        assert cdiv(width, columns) * columns <= 1.3 * width
