"""Reading OGB's ``edge.csv.gz``: this reader against ``pandas.read_csv`` as the ``ogb`` package calls it.

Prediction, written before the first run of this file on 20 M edges (296 MB of text, 148 MB gzip): pandas spends
about 4.5 s parsing and 1.5 s inflating, one after the other; isal inflates in 0.4 s beside pyarrow's 1.5 s of parsing,
so 3 to 3.5 times as fast on two cores. pandas holds the pieces and the whole, 2 x 320 MB and 75 MB of interpreter;
into memory this reader holds 160 MB of int32 ids, blocks and 55 MB of interpreter, 0.4 of that; into a cache it
holds blocks alone, 0.2 of it, at 0.3 s more for writing 160 MB and summing it.

    python benchmarks/ogb_read.py                 # 20 M edges, five rounds
    python benchmarks/ogb_read.py --edges 1000000 --rounds 3

Each reader runs in a process of its own, in turn. Time is that of the reading, without imports; memory is the
process's peak resident set (VmHWM) at its end, interpreter and libraries included. Afterwards each process hashes its
edges as int64 ``(2, E)``; different hashes are an error and no figures are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

NUM_NODES = 2_449_029
READERS = ("pandas", "memory", "cache")


def write_edge_file(path: Path, num_edges: int) -> None:
    """Random edges among as many nodes as ogbn-products has, seed 0, at gzip's level 6."""
    import pyarrow as pa
    from isal import igzip
    from pyarrow import csv

    rng = np.random.default_rng(0)
    with igzip.open(path, "wb", compresslevel=3) as file:  # isal's 3 is about gzip's 6
        for start in range(0, num_edges, 1_000_000):
            ids = rng.integers(0, NUM_NODES, (min(1_000_000, num_edges - start), 2))
            table = pa.table({"source": ids[:, 0], "target": ids[:, 1]})
            csv.write_csv(table, file, csv.WriteOptions(include_header=False))


class Clock:
    """Wall-clock and processor seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        wall, cpu = self._start
        return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def read_pandas(path: Path) -> tuple[np.ndarray, dict[str, float]]:
    """As ``ogb.io.read_graph_raw`` reads edges."""
    import pandas as pd

    clock = Clock()
    edge_index = pd.read_csv(path, compression="gzip", header=None).values.T.astype(np.int64)
    return edge_index, clock.read()


def read_ours(path: Path, num_edges: int, folder: Path | None) -> tuple[list[np.ndarray], dict[str, float]]:
    """The reader's own path, into memory or into the ``.npy`` files of a cache."""
    import pyarrow.csv  # noqa: F401 - imports are not timed
    from isal import igzip  # noqa: F401

    from nugnn.datasets.array_writers import MemoryArrays, NpyFolder
    from nugnn.datasets.ogb_csv import write_edges

    clock = Clock()
    arrays = MemoryArrays() if folder is None else NpyFolder(folder)
    write_edges(arrays, path, NUM_NODES, num_edges, inverse=False, counted_in=path)
    seconds = clock.read()
    if isinstance(arrays, MemoryArrays):
        return [rows.numpy() for rows in arrays.tensors().values()], seconds
    return [np.load(arrays.folder / f"{name}.npy", mmap_mode="r") for name in ("src", "dst")], seconds


def peak_bytes() -> int:
    """VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this benchmark needs Linux")


def run_child(reader: str, path: Path, num_edges: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if reader == "pandas":
            ends, seconds = read_pandas(path)
        else:
            ends, seconds = read_ours(path, num_edges, Path(folder) if reader == "cache" else None)
        peak = peak_bytes()
        digest = hashlib.sha256()
        for end in ends:
            digest.update(np.ascontiguousarray(end, np.int64).data)
    return {"reader": reader, **seconds, "peak_bytes": peak, "sha256": digest.hexdigest()}


def main() -> None:
    """Write the file, run the readers in turn, print each run and the ratios of the medians."""
    parser = argparse.ArgumentParser(description="OGB edge files: this reader against pandas")
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(options.child, options.file, options.edges)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "edge.csv.gz"
        write_edge_file(path, options.edges)
        print(f"{options.edges} edges, {path.stat().st_size} bytes of gzip")
        rows = []
        for _ in range(options.rounds):
            for reader in READERS:
                command = [sys.executable, __file__, "--child", reader, "--file", path, "--edges", str(options.edges)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                rows.append(json.loads(output))
                print(output.strip(), flush=True)
    if len({row["sha256"] for row in rows}) != 1:
        sys.exit("the readers disagree about the edges")
    medians = {
        reader: [statistics.median(row[what] for row in rows if row["reader"] == reader) for what in _FIGURES]
        for reader in READERS
    }
    print("reader   seconds  processor s  peak MiB   faster  less processor  memory")
    for reader, (seconds, cpu, peak) in medians.items():
        faster, leaner, share = (medians["pandas"][k] / figure for k, figure in enumerate((seconds, cpu, peak)))
        print(
            f"{reader:7s}  {seconds:7.2f}  {cpu:11.2f}  {peak / 2**20:8.0f}  {faster:6.2f}x  {leaner:13.2f}x  "
            f"{1 / share:6.2f}"
        )


_FIGURES = ("seconds", "cpu_seconds", "peak_bytes")

if __name__ == "__main__":
    main()
