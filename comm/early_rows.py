"""How many edges of a plain sum forward are summed while its halo rows travel, where GPUs read each other's memory.

An exchange takes less time there than the sum. What was summed so far is put down in float32 and read again, which
takes time as well, so this is done for as many rows of the result as fill the exchange; the others are summed in one
pass. Over slower links all rows begin early (`nugnn.comm.overlap`).
"""

from __future__ import annotations

EDGES_PER_ROW = 24
"""Edges that are summed early for each row that travels.

An H200 gathers some 6.3 TB/s of rows, most of them from its cache, and NVLink brings 0.35 TB/s: 18 edges in the time of
a row. The others are for peers that come late.
"""
LEAST_BYTES = 1 << 23
"""Exchanges of less are taken not to pay for the launches of two more kernels: over NVLink 1 MiB took 0.04 ms, 16 MiB
0.09 (by hand).
"""


def edges_begun_early(num_rows: int, row_bytes: int) -> int:
    """Of an exchange of ``num_rows`` rows, sent or received, whichever is more.

    >>> edges_begun_early(1_000_000, 512)
    24000000
    >>> edges_begun_early(1_000, 512)
    0
    """
    return EDGES_PER_ROW * num_rows if num_rows * row_bytes >= LEAST_BYTES else 0
