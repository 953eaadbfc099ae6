"""Sums over in-edges on a CPU beside plain DGL, forward and backward, and beside what the machine's caches allow.

    python benchmarks/cpu_spmm.py                     # 300,000 nodes / 12 M arcs, F = 64 and 128
    python benchmarks/cpu_spmm.py --cases             # other widths, types, weights, graphs: before and after

DGL runs at its best known use: CSC and CSR made before the clock starts, int32 or int64 ids, whichever is faster in the
run. nuGNN's rows stand in the order that `nugnn.fit` finds. Systems run in turn, so each round has a ratio of its own;
the ratio is the median of those with the 20th and 80th percentile, and on a machine that others use the processor's
seconds, which are printed as well, say more than the clock's. A result is held against plain DGL's before any timing.

Bounds are measured in the same run: copying (one stream read, one written), and gathering rows with the same kernel
from a table that lies in the second-level cache of each core, and from one far larger than all caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Runs = dict[str, Callable[[], Any]]


def in_turn(runs: Runs, rounds: int) -> dict[str, np.ndarray]:
    """``(rounds, 2)`` milliseconds of each: by the clock, and of all cores together; two rounds before do not count."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            begin, cpu = time.perf_counter(), time.process_time()
            result = run()
            end = time.perf_counter(), time.process_time()
            del result  # its memory is given back outside of the time, for everyone
            taken[name].append(((end[0] - begin) * 1e3, (end[1] - cpu) * 1e3))
    return {name: np.array(values[2:]) for name, values in taken.items()}


def ratio(base: np.ndarray, mine: np.ndarray) -> str:
    """How many times faster, round by round: median, 20th and 80th percentile; by the clock and by processor time."""
    low, middle, high = np.percentile(base[:, 0] / mine[:, 0], [20, 50, 80])
    return f"{middle:6.2f} x ({low:.2f} to {high:.2f}){statistics.median(base[:, 1] / mine[:, 1]):8.2f} x"


def gathered_bytes_per_second(table_bytes: int, num_columns: int, rounds: int) -> float:
    """Of random rows of a table, added up 40 at a time by the kernel for large sums."""
    from nugnn.kernels.spmm.sums import vector_sum
    from nugnn.kernels.structure import Structure

    row_bytes = 4 * num_columns
    num_rows = max(1, table_bytes // row_bytes)
    num_edges = (1 << 30) // row_bytes // 40 * 40
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(num_rows, (num_edges,), dtype=torch.int32, generator=generator)
    structure = Structure(num_rows, torch.arange(0, num_edges + 1, 40), indices)
    x = torch.ones(num_rows, num_columns)
    assert bool((vector_sum(structure, x) == 40).all())
    (seconds,) = in_turn({"": lambda: vector_sum(structure, x)}, rounds).values()
    return num_edges * row_bytes / float(np.median(seconds[:, 0])) * 1e3


def bounds(widths: list[int], num_edges: int, rounds: int) -> None:
    x = torch.ones(64 << 20)
    y = x.clone()
    (copied,) = in_turn({"": lambda: y.copy_(x)}, rounds).values()
    print(f"copy: {2 * x.nbytes / float(np.median(copied[:, 0])) / 1e6:.1f} GB/s read and written")
    for width in widths:
        near, far = (gathered_bytes_per_second(size, width, rounds) for size in (512 << 10, 256 << 20))
        total = num_edges * width * 4
        print(
            f"F = {width}: gathers {near / 1e9:.1f} GB/s from 512 KiB, {far / 1e9:.1f} GB/s from 256 MiB: "
            f"{total / near * 1e3:.1f} and {total / far * 1e3:.1f} ms for the edges of this graph"
        )


def differs(found: Tensor, expected: Tensor, degrees: Tensor, mass: Tensor) -> bool:
    """Whether two sums of ``degrees`` terms differ by more than their roundings, ``(d - 1) eps`` on either side."""
    bound = 2 * torch.finfo(found.dtype).eps * degrees[:, None] * mass
    return not bool(((found - expected).abs() <= bound).all())


def compare(arguments: argparse.Namespace) -> None:
    import dgl

    from nugnn.datasets import load
    from nugnn.kernels.spmm import spmm
    from nugnn.partition import assign, shard
    from nugnn.seam import install
    from nugnn.shard_graph import ShardGraph

    data = load(f"products-like:{arguments.nodes}:{arguments.arcs}:0")
    graphs = {}
    for name, ids in (("int32", torch.int32), ("int64", torch.int64)):
        graph = dgl.graph((data.src.to(ids), data.dst.to(ids)), num_nodes=data.num_nodes).formats(["csr", "csc"])
        graph.create_formats_()
        graphs[name] = graph
    part = shard.build_shard(data, assign.partition_nodes(data.num_nodes, data.src, data.dst, [1.0]), 0, order="auto")
    install()
    ours = ShardGraph(part, keep_edge_ids=False)
    structure, rows = ours.index.structure, ours.global_node_ids
    print(part.order.sentence)
    bounds(arguments.widths, structure.num_edges, arguments.rounds)
    print(f"{'':38}{'clock ms':>9}{'':18}{'cpu ms':>8}  plain DGL / this: by the clock, by processor time")
    for width in arguments.widths:
        x, grad = torch.randn(data.num_nodes, width), torch.randn(data.num_nodes, width)
        moved, moved_grad = x[rows].requires_grad_(), grad[rows]
        x.requires_grad_()

        def plain(name: str, x: Tensor = x) -> Tensor:
            return dgl.ops.copy_u_sum(graphs[name], x)  # type: ignore[no-any-return]

        def mine(x: Tensor = moved) -> Tensor:
            return spmm(structure, "copy_lhs", "sum", x, None)

        with torch.no_grad():
            mass = spmm(structure, "copy_lhs", "sum", moved.abs(), None)
            wrong = differs(mine(), plain("int64")[rows], structure.in_degrees, mass)
            out_degrees = torch.bincount(structure.indices, minlength=structure.num_src)
            backward_mass = dgl.ops.copy_u_sum(dgl.reverse(graphs["int64"]), grad.abs())[rows]
        (found,) = torch.autograd.grad(mine(), moved, moved_grad)
        (expected,) = torch.autograd.grad(plain("int64"), x, grad)
        if wrong or differs(found, expected[rows], out_degrees, backward_mass):
            raise SystemExit(f"the sums at F = {width} are wrong; no timing of a wrong result")
        rest, moved_rest = x.detach(), moved.detach()
        forward: Runs = {
            "plain DGL int32": lambda plain=plain, x=rest: plain("int32", x),
            "nuGNN": lambda mine=mine, x=moved_rest: mine(x),
            "plain DGL int64": lambda plain=plain, x=rest: plain("int64", x),
        }
        both: Runs = {
            "plain DGL int32": lambda plain=plain, x=x, g=grad: torch.autograd.grad(plain("int32"), x, g),
            "nuGNN": lambda mine=mine, x=moved, g=moved_grad: torch.autograd.grad(mine(), x, g),
            "plain DGL int64": lambda plain=plain, x=x, g=grad: torch.autograd.grad(plain("int64"), x, g),
        }
        for what, runs in (("forward", forward), ("with backward", both)):
            taken = in_turn(runs, arguments.rounds)
            best = min(("plain DGL int32", "plain DGL int64"), key=lambda name: float(np.median(taken[name][:, 0])))
            for name, values in taken.items():
                low, middle, high = np.percentile(values[:, 0], [20, 50, 80])
                head = f"F = {width:4} {what:14}{name:16}"
                end = "baseline" if name == best else ratio(taken[best], values)
                print(f"{head}{middle:9.1f} {f'({low:.1f} to {high:.1f})':18}{np.median(values[:, 1]):7.1f}  {end}")


def cases(arguments: argparse.Namespace) -> None:
    """Other calls, before and after: the same operator with the kernel for large sums and without it."""
    from nugnn.datasets import synthetic
    from nugnn.kernels.spmm import spmm, sums
    from nugnn.kernels.structure import Structure
    from nugnn.partition.clusters import grouped

    def structure_of(num_nodes: int, num_arcs: int) -> Structure:
        data = synthetic.products_like(num_nodes, num_arcs, num_features=1)
        order, indptr = grouped(data.dst.numpy().astype(np.int32), num_nodes)
        return Structure(
            num_nodes, torch.from_numpy(indptr), torch.from_numpy(data.src.numpy().astype(np.int32)[order])
        )

    large, small = structure_of(arguments.nodes, arguments.arcs), structure_of(3_000, 30_000)
    least = sums.FEWEST_BYTES

    def with_and_without(name: str, structure: Structure, op: str, reduce: str, u: Tensor, e: Tensor | None) -> None:
        def run(fewest: int) -> Tensor:
            sums.FEWEST_BYTES = fewest
            try:
                return spmm(structure, op, reduce, u, e)
            finally:
                sums.FEWEST_BYTES = least

        taken = in_turn({"without": lambda: run(1 << 62), "with": lambda: run(least)}, arguments.rounds)
        without, mine = taken["without"], taken["with"]
        print(
            f"{name:40}{np.median(without[:, 0]):10.2f}{np.median(mine[:, 0]):10.2f}  {ratio(without, mine)}",
            flush=True,
        )

    print(f"{'given order':40}{'without':>10}{'with, ms':>10}")
    for width in (1, 2, 4, 8, 16, 32, 47, 64, 100, 128, 256, 1024):
        nodes = large if width < 1024 else structure_of(arguments.nodes // 8, arguments.arcs // 8)
        with_and_without(f"sum F = {width}", nodes, "copy_lhs", "sum", torch.randn(nodes.num_src, width), None)
    x = torch.randn(large.num_src, 64)
    weights = torch.rand(large.num_edges, 1)
    with_and_without("sum F = 64, a weight per edge", large, "mul", "sum", x, weights)
    heads = (x.view(-1, 4, 16), torch.rand(large.num_edges, 4, 1))
    with_and_without("sum 4 x 16, a weight per head", large, "mul", "sum", *heads)
    with_and_without("sum F = 64, float64", large, "copy_lhs", "sum", x.double(), None)
    with_and_without("sum F = 32, every other column", large, "copy_lhs", "sum", x[:, ::2], None)
    with_and_without("sum F = 64, bfloat16", large, "copy_lhs", "sum", x.bfloat16(), None)
    with_and_without("max F = 64", large, "copy_lhs", "max", x, None)
    with_and_without("min F = 64", large, "copy_lhs", "min", x, None)
    for width in (16, 64, 256, 1024):
        x = torch.randn(small.num_src, width)
        with_and_without(f"30,000 edges, sum F = {width}", small, "copy_lhs", "sum", x, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--arcs", type=int, default=12_000_000)
    parser.add_argument("--widths", type=lambda text: [int(x) for x in text.split(",")], default=[64, 128])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", action="store_true")
    arguments = parser.parse_args()
    import nugnn  # noqa: F401  (lets DGL import)

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{arguments.threads} threads, torch {torch.__version__}, {arguments.nodes} nodes, {arguments.arcs} arcs")
    (cases if arguments.cases else compare)(arguments)


if __name__ == "__main__":
    main()
