"""Preparing a graph shaped like ogbn-papers100M, at 1/50 of its size by default: raw files to cache to ``GraphData``.

Prediction, written before the first run (2.22 M nodes, 128 float32 features = 1.06 GiB, 32.3 M edges): interpreter and
libraries 0.25 GiB; a window of features 32 MiB at a time; labels, years and split ids, which are read whole, 0.05 GiB:
0.35 GiB together, 0.33 of the feature bytes.

    python benchmarks/papers_prepare.py                    # 1/50: 3 GB of disk for a while
    python benchmarks/papers_prepare.py --fraction 1000 --parts 3

Generates ``raw/data.npz`` and ``raw/node-label.npz`` as stored zips (``--deflate`` compresses them) and
``split/time``, then runs each step in a process of its own and prints its peak resident set, VmHWM: all pages that
counted at the worst moment, libraries and pages of mapped files included, page cache not. Steps: prepare (a cache
miss), open again (a hit), cut into shards by a random assignment and write them, load each shard.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_NODES, NUM_EDGES, NUM_FEATURES, NUM_CLASSES = 111_059_956, 1_615_685_872, 128, 172
_BLOCK_ROWS = 100_000


def write_member(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], blocks: Iterator[np.ndarray]) -> None:
    """One array of an ``.npz``, block by block."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        for number, block in enumerate(blocks):
            if number == 0:
                header = {"descr": block.dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)


def sizes(total: int) -> Iterator[int]:
    """Block sizes that sum to ``total``."""
    for start in range(0, total, _BLOCK_ROWS):
        yield min(_BLOCK_ROWS, total - start)


def write_raw(folder: Path, num_nodes: int, num_edges: int, compression: int) -> None:
    """The binary layout, random, seed 0; 1.4 % of the nodes labelled, as in the original."""
    from isal import igzip

    rng = np.random.default_rng(0)
    (folder / "raw").mkdir(parents=True)
    (folder / "split" / "time").mkdir(parents=True)
    with zipfile.ZipFile(folder / "raw" / "data.npz", "w", compression) as archive:
        ends = (rng.integers(0, num_nodes, size) for _ in range(2) for size in sizes(num_edges))
        write_member(archive, "edge_index", (2, num_edges), ends)
        features = (rng.standard_normal((size, NUM_FEATURES), np.float32) for size in sizes(num_nodes))
        write_member(archive, "node_feat", (num_nodes, NUM_FEATURES), features)
        years = (rng.integers(1990, 2020, (size, 1)) for size in sizes(num_nodes))
        write_member(archive, "node_year", (num_nodes, 1), years)
        write_member(archive, "num_nodes_list", (1,), iter([np.array([num_nodes])]))
        write_member(archive, "num_edges_list", (1,), iter([np.array([num_edges])]))
    labelled = np.flatnonzero(rng.random(num_nodes) < 0.014)
    labels = np.full((num_nodes, 1), np.nan, np.float32)
    labels[labelled, 0] = rng.integers(0, NUM_CLASSES, len(labelled))
    with zipfile.ZipFile(folder / "raw" / "node-label.npz", "w", compression) as archive:
        write_member(archive, "node_label", labels.shape, iter([labels]))
    cuts = [int(len(labelled) * share) for share in (0.78, 0.86)]
    for part, ids in zip(("train", "valid", "test"), np.split(labelled, cuts), strict=True):
        with igzip.open(folder / "split" / "time" / f"{part}.csv.gz", "wb") as file:
            file.write("".join(f"{node}\n" for node in ids.tolist()).encode())


def peak_bytes() -> int:
    """VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this benchmark needs Linux")


def prepare(folder: Path) -> dict[str, Any]:
    from nugnn.datasets.ogb import read_ogb

    data = read_ogb(folder, "ogbn-papers100M", cache=folder / "cache")
    return {"graph": repr(data)}


def shards(folder: Path, num_parts: int) -> dict[str, Any]:
    from nugnn.datasets.ogb import read_ogb
    from nugnn.partition.assign import partition_nodes
    from nugnn.partition.shard import iter_shards
    from nugnn.partition.store import write_shards

    data = read_ogb(folder, "ogbn-papers100M", cache=folder / "cache")
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, [1] * num_parts, method="random")
    after_partition = peak_bytes()
    write_shards(folder / "shards", iter_shards(data, assignment), key="benchmark", versions={})
    return {"peak_bytes_after_partition": after_partition}


def load(folder: Path, rank: int) -> dict[str, Any]:
    from nugnn.partition.store import load_shard

    shard = load_shard(folder / "shards", rank)
    return {"rows": shard.num_inner, "edges": shard.num_edges}


def run_child(step: str, folder: Path, num_parts: int, rank: int) -> None:
    start = time.perf_counter()
    steps = {"shards": lambda: shards(folder, num_parts), "load": lambda: load(folder, rank)}
    found = steps.get(step, lambda: prepare(folder))()
    print(json.dumps({"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes(), **found}))


def main() -> None:
    """Generate, run each step in a process of its own, print peak memory over feature bytes."""
    parser = argparse.ArgumentParser(description="A graph shaped like ogbn-papers100M: memory of preparing it")
    parser.add_argument("--fraction", type=int, default=50, help="1/50 of the nodes and edges by default")
    parser.add_argument("--parts", type=int, default=0, help="also cut into so many shards")
    parser.add_argument("--deflate", action="store_true", help="compressed archives, as numpy.savez_compressed")
    parser.add_argument("--folder", type=Path, help="parent of the temporary folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.folder, options.parts, options.rank)
        return
    num_nodes, num_edges = NUM_NODES // options.fraction, NUM_EDGES // options.fraction
    feature_bytes = num_nodes * NUM_FEATURES * 4
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary) / "ogbn_papers100M"
        write_raw(folder, num_nodes, num_edges, zipfile.ZIP_DEFLATED if options.deflate else zipfile.ZIP_STORED)
        print(f"{num_nodes} nodes, {num_edges} edges, features {feature_bytes / 2**20:.0f} MiB")
        steps = [("prepare", 0), ("open again", 0)]
        if options.parts:
            steps += [("shards", 0), *(("load", rank) for rank in range(options.parts))]
        for step, rank in steps:
            command = [sys.executable, __file__, "--child", step, "--folder", folder, "--rank", str(rank)]
            command += ["--parts", str(options.parts)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            row = json.loads(output)
            peak = row.pop("peak_bytes")
            print(
                f"{step} {rank}: peak {peak / 2**20:.0f} MiB, {peak / feature_bytes:.2f} of the feature bytes; {row}",
                flush=True,
            )


if __name__ == "__main__":
    main()
