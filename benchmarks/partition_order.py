"""Partitioners and the order of rows: seconds, cut, balance and memory beside METIS; aggregation in each order.

Prediction, written before the first run of this file: clusters take a third of METIS' time on one core and a sixth on
several, with a smaller cut where nodes form communities; KaMinPar is as fast; aggregation in the found order is within
5 % of that in the planted one, and 1.7 times as fast as in the given one.

Outcome at 300,000 nodes on a quiet machine of two cores: clusters and order 1.32 s on one thread and 0.75 s on two,
0.39 and 0.22 of METIS' partition and order (1.72 and 1.64 s), with a cut of 0.131 against 0.139 and a fifth of the
memory; KaMinPar 0.44 and 0.32. At the size of ogbn-products on two cores (one round): 51.5 s on one thread and 30.5
on two, 0.31 and 0.18 of METIS' partition and order (104 and 63 s), cut 0.129 against 0.140, 0.7 GiB beside 8.1;
KaMinPar 0.36 and 0.21. On ten cores of a Xeon: 32.2 s on one thread and 10.9 on all,
0.34 and 0.12. Sums in the found order take as long as in the planted one, two thirds of the time in the given one.

    python benchmarks/partition_order.py                        # 300,000 nodes / 12 M arcs
    python benchmarks/partition_order.py --scale 0.25           # a quarter of ogbn-products; 1 for all of it
    python benchmarks/partition_order.py --family mixed         # 30 % of the edges inside communities
    python benchmarks/partition_order.py --balance edges        # shares of the edges, not of the nodes

The graph is `products-like` or `mixed-like`, its node ids shuffled; the planted communities are used for the row
"planted" only. Every measurement is a process of its own, kernels compiled before the clock starts. Of a partitioner
the clock measures its own work on the symmetric graph, which all of them share (row "symmetric graph"). METIS runs as
`nugnn.partition` calls it, by recursive bisection; its row "order" is its k-way partition into as many clusters as
fill the cache. "started" is the order that begins with the clusters which the partitioner "clusters" found. Memory is
the growth of the process's resident set from the start of the work to its peak.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHARES = (0.4, 0.3, 0.2, 0.1)
WIDTHS = (64, 128)
ARRAYS = ("src", "dst", "planted", "indptr", "indices")


def prepare(folder: Path, family: str, num_nodes: int, num_arcs: int | None) -> dict[str, float]:
    """Write the graph and its symmetric form, once for all processes; the seconds of each."""
    from nugnn.datasets import synthetic
    from nugnn.partition.metis import symmetric_graph

    begin = time.perf_counter()
    make = {"products": synthetic.products_like, "mixed": synthetic.mixed_like}[family]
    data = make(num_nodes, num_arcs, num_features=1)
    made = time.perf_counter()
    graph = symmetric_graph(num_nodes, data.src.numpy(), data.dst.numpy(), None).adjacency
    seconds = {"generate": made - begin, "symmetric graph": time.perf_counter() - made}
    planted = np.argsort(synthetic.planted_communities(num_nodes).numpy(), kind="stable")
    ids = (data.src.numpy().astype(np.int32), data.dst.numpy().astype(np.int32))
    for name, array in zip(ARRAYS, (*ids, planted, graph.indptr, graph.indices), strict=True):
        np.save(folder / f"{name}.npy", array)
    return seconds


def begin_peak() -> None:
    """Forget the peak so far; Linux only, elsewhere the whole process counts."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def measured(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    begin_peak()
    before, begin, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    answer = work()
    seconds = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    return seconds | {"grown_bytes": resident("VmHWM") - before} | answer


def run_partition(arrays: dict[str, np.ndarray], method: str, folder: str, balance: str) -> dict[str, Any]:
    """Parts with these shares of the nodes or of the edges: the cut, and the largest load beside its share of both."""
    from scipy import sparse

    from nugnn.partition.balance import Balance
    from nugnn.partition.coarse import cluster_parts
    from nugnn.partition.kaminpar import kaminpar_parts
    from nugnn.partition.metis import SymmetricGraph, metis_parts

    def graph_of(indptr: np.ndarray, indices: np.ndarray) -> tuple[SymmetricGraph, Balance]:
        num_nodes = len(indptr) - 1
        twos = np.full(len(indices), 2, np.int64)
        adjacency = sparse.csr_array((twos, indices, indptr), shape=(num_nodes, num_nodes))
        weights = np.ones(num_nodes) if balance == "nodes" else np.maximum(np.diff(indptr), 1).astype(np.float64)
        return SymmetricGraph(adjacency, 0), Balance(weights[:, None], SHARES, 0.02)

    def partition(graph: SymmetricGraph, target: Balance, notes: list[str]) -> np.ndarray:
        if method == "clusters":
            part, clusters = cluster_parts(graph, target, 0, notes)
            np.save(Path(folder) / "clusters.npy", clusters)  # the last ones are those of the graph itself
            return part
        return {"metis": metis_parts, "kaminpar": kaminpar_parts}[method](graph, target, 0, notes)

    partition(*graph_of(*path_graph(10_000)), [])  # compiles
    graph, target = graph_of(arrays["indptr"], arrays["indices"])
    notes: list[str] = []
    kept: list[np.ndarray] = []
    answer = measured(lambda: kept.append(partition(graph, target, notes)) or {})  # type: ignore[func-returns-value]
    part = kept[0]
    row = np.repeat(np.arange(len(part)), np.diff(arrays["indptr"]))
    nodes, edges = (np.bincount(of, minlength=len(SHARES)) / len(of) for of in (part, part[row]))
    return answer | {
        "cut": float((part[row] != part[arrays["indices"]]).mean()),
        "worst_load": float((nodes / np.array(SHARES)).max()),
        "worst_edge_load": float((edges / np.array(SHARES)).max()),
        "notes": notes,
    }


def run_order(arrays: dict[str, np.ndarray], method: str, folder: str) -> dict[str, Any]:
    """Rows ordered in one part: METIS k-way into clusters of the cache's size, or nested clusters.

    "clusters" finds all of them, "started" takes the innermost ones from the partitioner.
    """
    from scipy import sparse

    from nugnn.partition.clusters import grouped
    from nugnn.partition.metis import call_metis
    from nugnn.partition.order import locality_order, near_share, neighbour_lists, rows_in_cache

    most_rows = rows_in_cache(4 * 100)

    def order_of(
        indptr: np.ndarray, indices: np.ndarray, src: np.ndarray, dst: np.ndarray, start: np.ndarray | None
    ) -> np.ndarray:
        num_nodes = len(indptr) - 1
        if method == "metis":
            adjacency = sparse.csr_array((np.ones(len(indices), np.int64), indices, indptr), shape=(num_nodes,) * 2)
            num_clusters = max(2, -(-num_nodes // most_rows))
            shares = (1 / num_clusters,) * num_clusters
            part = call_metis(adjacency, None, None, shares, recursive=False, seed=0, tolerance=0.03)
            return np.argsort(part, kind="stable")
        edge_order, in_indptr = grouped(dst, num_nodes)
        graph = neighbour_lists(in_indptr, src[edge_order], src, dst, None)
        return locality_order(graph, most_rows, start=start)[0]

    indptr, indices = path_graph(10_000 if method == "metis" else 600_000)  # large enough for every kernel
    order_of(indptr, indices, indices, np.repeat(np.arange(len(indptr) - 1, dtype=np.int32), np.diff(indptr)), None)
    kept: list[np.ndarray] = []
    work = [arrays[name] for name in ("indptr", "indices", "src", "dst")]
    start = np.load(Path(folder) / "clusters.npy") if method == "started" else None
    answer = measured(lambda: kept.append(order_of(*work, start)) or {})  # type: ignore[func-returns-value]
    order = kept[0]
    np.save(Path(folder) / f"order-{method}.npy", order)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    edge_order, in_indptr = grouped(arrays["dst"], len(order))
    graph = neighbour_lists(in_indptr, arrays["src"][edge_order], arrays["src"], arrays["dst"], None)
    return answer | {"near": near_share(graph, position, most_rows // 2)}


def path_graph(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """A path as CSR, with the types of the graph's arrays."""
    here = np.arange(num_nodes, dtype=np.int32)
    both = np.stack([here - 1, here + 1], axis=1).ravel()
    indptr = np.concatenate([[0], np.arange(1, 2 * num_nodes - 2, 2), [2 * num_nodes - 2]]).astype(np.int32)
    return indptr, both[(both >= 0) & (both < num_nodes)]


def run_spmm(arrays: dict[str, np.ndarray], rounds: int, folder: str) -> dict[str, Any]:
    """Sum over in-edges, the orders in turn: plain DGL in the given order, nuGNN in each."""
    import dgl
    import torch

    from nugnn.kernels.spmm import spmm
    from nugnn.kernels.structure import Structure
    from nugnn.partition.clusters import grouped
    from nugnn.seam import install

    num_nodes = len(arrays["indptr"]) - 1
    orders = {"given": np.arange(num_nodes), "planted": arrays["planted"]}
    for method in ("clusters", "started", "metis"):
        file = Path(folder) / f"order-{method}.npy"
        if file.exists():
            orders[method] = np.load(file)
    structures: dict[str, Structure] = {}
    for name, order in orders.items():
        position = np.empty(num_nodes, np.int32)
        position[order] = np.arange(num_nodes, dtype=np.int32)
        dst = position[arrays["dst"]]
        edge_order, indptr = grouped(dst, num_nodes)
        src = position[arrays["src"][edge_order]]
        structures[name] = Structure(num_nodes, torch.from_numpy(indptr), torch.from_numpy(src))
    plain = dgl.graph((torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])), num_nodes=num_nodes)
    plain = plain.formats(["csc"])
    plain.create_formats_()
    install()
    answer: dict[str, Any] = {}
    for width in WIDTHS:
        x = torch.randn(num_nodes, width)
        expected = dgl.ops.copy_u_sum(plain, x)
        runs: dict[str, Callable[[], Any]] = {"plain DGL, given": lambda x=x: dgl.ops.copy_u_sum(plain, x)}
        for name, order in orders.items():
            rows = torch.from_numpy(order)
            moved = x[rows]
            found = spmm(structures[name], "copy_lhs", "sum", moved, None)
            # a sum of d terms in another order: (d - 1) eps relative to the sum of magnitudes, on either side
            bound = 2 * torch.finfo(x.dtype).eps * structures[name].in_degrees[:, None]
            bound = bound * spmm(structures[name], "copy_lhs", "sum", moved.abs(), None)
            if not ((found - expected[rows]).abs() <= bound).all():
                raise SystemExit(f"the sums in the order {name!r} are wrong; no timing of a wrong result")
            runs[name] = lambda name=name, moved=moved: spmm(structures[name], "copy_lhs", "sum", moved, None)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                begin = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begin)
        answer[str(width)] = seconds
    return answer


def child(arguments: argparse.Namespace) -> None:
    import torch

    import nugnn  # noqa: F401  (lets DGL import)

    torch.set_num_threads(arguments.threads)
    arrays = {name: np.load(Path(arguments.folder) / f"{name}.npy") for name in ARRAYS}
    what, _, method = arguments.run.partition(":")
    if what == "spmm":
        answer = run_spmm(arrays, arguments.rounds, arguments.folder)
    else:
        balanced = {"balance": arguments.balance} if what == "partition" else {}
        answer = {"partition": run_partition, "order": run_order}[what](arrays, method, arguments.folder, **balanced)
    print(json.dumps(answer))


def spawn(folder: str, run: str, threads: int, rounds: int, balance: str) -> dict[str, Any] | None:
    """What the process found; None, and its last words on standard error, when it failed."""
    command = [sys.executable, os.path.abspath(__file__), "--run", run, "--folder", folder]
    command += ["--threads", str(threads), "--rounds", str(rounds), "--balance", balance]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(f"{run} failed ({done.returncode}):\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("products", "mixed"), default="products")
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--arcs", type=int, default=None, help="default: 12 M for 300,000 nodes, else as ogbn-products")
    parser.add_argument("--scale", type=float, help="of ogbn-products, instead of --nodes")
    parser.add_argument("--balance", choices=("nodes", "edges"), default="nodes", help="what the shares are of")
    parser.add_argument("--methods", nargs="+", choices=("clusters", "kaminpar"), default=["clusters", "kaminpar"])
    parser.add_argument("--without-sums", action="store_true", help="no sums in each order")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all processes")
    parser.add_argument("--rounds", type=int, default=9, help="sums in each order; the first 2 are not counted")
    parser.add_argument("--without-metis-order", action="store_true", help="METIS takes as long again for that row")
    parser.add_argument("--json", type=Path, help="add one object per row to this file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        child(arguments)
        return
    from nugnn.datasets.synthetic import FULL_NODES

    if arguments.scale:
        arguments.nodes = round(FULL_NODES * arguments.scale)
    if arguments.arcs is None and arguments.nodes == 300_000:
        arguments.arcs = 12_000_000
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, folder)


def report(arguments: argparse.Namespace, folder: str) -> None:
    from nugnn.planning.device_facts import processor_name

    seconds = prepare(Path(folder), arguments.family, arguments.nodes, arguments.arcs)
    num_arcs = len(np.load(Path(folder) / "src.npy", mmap_mode="r"))
    cores = len(os.sched_getaffinity(0))
    print(
        f"{arguments.family}-like, {arguments.nodes} nodes, {num_arcs} arcs, {cores} cores, "
        f"shares {SHARES} of the {arguments.balance}, "
        f"generated in {seconds['generate']:.1f} s, symmetric graph in {seconds['symmetric graph']:.1f} s",
        flush=True,
    )
    thread_counts = (1, cores) if cores > 1 else (1,)
    jobs = [("partition:metis", 1)]
    if "clusters" in arguments.methods:
        jobs += [("partition:clusters", threads) for threads in thread_counts]
    if "kaminpar" in arguments.methods and importlib.util.find_spec("kaminpar") is not None:
        jobs += [("partition:kaminpar", threads) for threads in thread_counts]
    jobs += [] if arguments.without_metis_order else [("order:metis", 1)]
    orders = ("clusters", "started") if "clusters" in arguments.methods else ("clusters",)
    jobs += [(f"order:{method}", threads) for method in orders for threads in thread_counts]
    facts = {"kind": "partition", "graph": f"{arguments.family}-like", "num_nodes": arguments.nodes}
    facts |= {
        "num_edges": num_arcs,
        "shares": SHARES,
        "balance": arguments.balance,
        "processor": processor_name(),
        "python": platform.python_version(),
    }

    def keep(row: dict[str, Any]) -> None:  # as soon as it is there
        if arguments.json:
            with open(arguments.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(facts | row) + "\n")

    rows: dict[tuple[str, int], list[dict[str, Any]]] = {job: [] for job in jobs}
    for _ in range(arguments.repeats):
        for run, threads in jobs:
            answer = spawn(folder, run, threads, arguments.rounds, arguments.balance)
            if answer is not None:
                rows[run, threads].append(answer)
                keep({"work": run, "threads": threads} | answer)
                print(f"{run}, {threads} threads: {answer['seconds']:.1f} s", file=sys.stderr, flush=True)
    print(f"{'work':20}{'threads':>8}{'seconds':>9}{'cpu s':>8}{'MiB':>7}{'cut':>8}{'nodes':>7}{'edges':>7}{'near':>7}")
    for (run, threads), answers in rows.items():
        if not answers:
            continue
        row = {
            key: statistics.median(answer[key] for answer in answers)
            for key in ("seconds", "cpu_seconds", "grown_bytes")
        }
        last = answers[-1]
        print(
            f"{run:20}{threads:8}{row['seconds']:9.2f}{row['cpu_seconds']:8.2f}{row['grown_bytes'] / 2**20:7.0f}"
            + (
                f"{last['cut']:8.4f}{last['worst_load']:7.3f}{last['worst_edge_load']:7.3f}"
                if "cut" in last
                else " " * 22 + f"{last['near']:7.3f}"
            )
        )
    show_ratios({job: [answer["seconds"] for answer in answers] for job, answers in rows.items()})
    sums = None if arguments.without_sums else spawn(folder, "spmm", cores, arguments.rounds, arguments.balance)
    if sums is not None:
        show_sums(sums, cores)
        keep({"work": "spmm", "threads": cores, "sums": sums})


def show_ratios(seconds: dict[tuple[str, int], list[float]]) -> None:
    """Partition and order together, over METIS' partition alone, and over METIS' partition and order."""
    medians = {job: statistics.median(values) for job, values in seconds.items() if values}
    metis = medians.get(("partition:metis", 1))
    if metis is None:
        return
    order_too = medians.get(("order:metis", 1))
    for (run, threads), taken in medians.items():
        order = medians.get(("order:started" if run == "partition:clusters" else "order:clusters", threads))
        if run in ("partition:clusters", "partition:kaminpar") and order is not None:
            print(
                f"{run.partition(':')[2]} and order on {threads} threads: {taken + order:.2f} s, "
                f"{(taken + order) / metis:.2f} of METIS' partition"
                + ("" if order_too is None else f", {(taken + order) / (metis + order_too):.2f} of METIS' both")
            )


def show_sums(sums: dict[str, Any], threads: int) -> None:
    print(f"sum over in-edges, {threads} threads, milliseconds: median (20th to 80th percentile)")
    for width, runs in sums.items():
        base = statistics.median(runs["plain DGL, given"][2:])
        for name, seconds in runs.items():
            low, middle, high = np.percentile(seconds[2:], [20, 50, 80]) * 1e3
            print(f"F = {width:4}{name:18}{middle:9.1f} ({low:.1f} to {high:.1f}){base * 1e3 / middle:8.2f} x")


if __name__ == "__main__":
    main()
