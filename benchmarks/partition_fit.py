"""Splits for unequal devices: one-shot METIS, the loop, KaMinPar and random, by the same work model.

    python benchmarks/partition_fit.py --data-dir DATA              # small real graphs, products-like at 1 %
    python benchmarks/partition_fit.py --data-dir DATA --graphs tolokers --parts 4 --scale 0
    python benchmarks/partition_fit.py --large 120000 240000 --parts 2 8    # products-like of so many nodes
    python benchmarks/partition_fit.py --report                     # docs/partition-fit.md from the kept rows

Prediction, written before the first run: the loop's slowest part takes 0.90 of the time of one-shot METIS' on the
median of graphs and numbers of parts, never more, and 0.8 where the halo is larger than the graph; it takes five times
as long to find. KaMinPar in one shot is within 5 % of METIS on the median. Random is twice METIS.

Outcome, by the kept rows: 0.946 on the median of 44 cases, 0.751 at best, 0.997 at worst; 0.88 on the median for 16
parts. 2.5 to 5 times METIS' seconds on the medians by parts, 9 at most. KaMinPar 0.996 of METIS, 0.94 to 1.10.
Random is 1.17 times METIS, since nodes and edges cost more here than rows that travel; with 16 parts 1.7 times.

DATA is a folder of ``NAME/NAME.npz`` with ``num_nodes``, ``adj_indptr`` and ``adj_indices``: row u lists the targets
of u. The work model is linear and made up, the same for all systems; it says nothing of real devices. Slowdowns of the
devices are drawn by a seed that is in the rows, 1 to 10; a node costs more of a slow device than an edge does, rows
that travel cost all alike. Every measurement is a process of its own whose kernels have run before the clock
starts; seconds are from the arrays of edges to checked parts, memory is the growth of the resident set to its peak.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import partition_large
import torch
from harness import ROOT, Recorder, read_rows

import nugnn  # noqa: F401
from nugnn.datasets.synthetic import FULL_NODES
from nugnn.datasets.synthetic import products_like as generate
from nugnn.partition.assign import Method, partition_nodes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_loop import partition_to_fit
from nugnn.planning.partition_search import LoopMethod
from nugnn.planning.shares import plan_shares
from nugnn.planning.work_model import LinearCost, LinearWork, count_sizes

KEPT, PAGE = ROOT / "benchmarks" / "rows" / "partition_fit", ROOT / "docs" / "partition-fit.md"
KEPT_LARGE = ROOT / "benchmarks" / "rows" / "partition_large"
GRAPHS = (
    "amazon_photo", "flickr_attr", "squirrel", "dblp", "actor", "facebook_pages", "coauthor_physics", "pubmed_topology",
    "email_eu_core", "mesh_copter2",
)  # fmt: skip
SYSTEMS = ("random", "METIS nodes", "METIS", "KaMinPar", "loop", "loop KaMinPar")
HEAD = f"{'graph':16}{'P':>3} {'system':14}{'share':>6}{'idle':>6}{'cut':>6}{'halo':>6}{'/bound':>7}{'s':>7}{'MiB':>6}"
Row = dict[str, Any]
Graph = tuple[int, np.ndarray, np.ndarray, np.ndarray]


def device_work(num_parts: int, seed: int) -> tuple[LinearWork, list[float]]:
    """Devices of random slowdowns, and these."""
    slowdowns = (10 ** np.random.default_rng([seed, num_parts]).random(num_parts)).tolist()
    costs = tuple(
        LinearCost(inner=1e-7 * f**1.3, edges=3e-9 * f, halo=3e-8, sent=3e-8, train=1e-8 * f) for f in slowdowns
    )
    return LinearWork(costs), slowdowns


def load(folder: Path, name: str) -> Graph:
    """Nodes, sources, destinations and training nodes."""
    with np.load(folder / name / f"{name}.npz") as file:
        indptr, num_nodes = file["adj_indptr"], int(file["num_nodes"])
        src = np.repeat(np.arange(num_nodes), np.diff(indptr))
        train = file["train_idx"] if "train_idx" in file.files else np.zeros(0, np.int64)
        return num_nodes, src, file["adj_indices"].astype(np.int64), train


def products_like(scale: float) -> Graph:
    data = generate(num_nodes=round(FULL_NODES * scale), num_features=1)
    return data.num_nodes, data.src.numpy(), data.dst.numpy(), data.train_nodes.numpy()


def bound_of(work: LinearWork, graph: Graph, num_parts: int) -> float:
    """``1 / sum(1 / T)``, T the seconds of the whole graph on a device alone: what no split without halo is below."""
    num_nodes, src, _, train = graph
    whole = PartSizes(num_nodes, len(src), 0, 0, len(train))
    return 1 / sum(1 / work.seconds(part, whole) for part in range(num_parts))


def split(system: str, graph: Graph, work: LinearWork, num_parts: int, seed: int) -> Row:
    """What a system makes of the graph; targets, and the weights that they are of, as the partitioner had them."""
    if system in partition_large.SYSTEMS:
        return partition_large.split(system, graph, work, num_parts, seed)
    num_nodes, src, dst, train = graph
    whole = PartSizes(num_nodes, len(src), 0, 0, len(train))
    relaxed = plan_shares(work, whole, [math.inf] * num_parts).shares
    weights = cost_weights(work, relaxed, graph)
    if system.startswith("loop"):
        method: LoopMethod = "kaminpar" if system.endswith("KaMinPar") else "metis"
        fitted = partition_to_fit(
            num_nodes, src, dst, work, [math.inf] * num_parts, train_nodes=train, method=method, seed=seed
        )
        rounds = [[one.name, one.makespan, one.took_seconds] for one in fitted.rounds]
        found, asked = fitted.assignment, fitted.best.shares
        extra = {"rounds": rounds, "best_round": fitted.best_round}
        if fitted.best.name in ("nodes", "even"):
            weights = np.ones(num_nodes)
    else:
        one_shot: Method = {"random": "random", "KaMinPar": "kaminpar"}.get(system, "metis")  # type: ignore[assignment]
        if system in ("METIS nodes", "random"):
            weights = np.ones(num_nodes)
        found = partition_nodes(num_nodes, src, dst, relaxed, method=one_shot, seed=seed, node_weights=weights)
        asked, extra = found.shares_asked, {}
    loads = np.bincount(found.part.numpy(), weights=weights, minlength=num_parts)
    return {
        "part": found.part.numpy(),
        "targets": list(asked),
        "share_ratios": (loads / loads.sum() / np.asarray(asked)).tolist(),
        "notes": len(found.notes),
        **extra,
    }


def cost_weights(work: LinearWork, shares: Iterable[float], graph: Graph) -> np.ndarray:
    """Alpha + beta times in-degree: the devices' costs, each divided by its average node's, by their shares."""
    num_nodes, _, dst, train = graph
    weights = np.zeros(num_nodes)
    degrees = np.bincount(dst, minlength=num_nodes)
    for cost, share in zip(work.seconds_of, shares, strict=True):
        own = cost.inner + cost.edges * degrees
        own[train] += cost.train
        weights += share * own / own.mean()
    return weights


def measure(system: str, graph: Graph, num_parts: int, seed: int) -> Row:
    """A row, from a process of its own."""
    context = multiprocessing.get_context("forkserver")  # of a process without threads, whatever this one has
    context.set_forkserver_preload(["nugnn.planning.partition_loop"])
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_measure_here, args=(there, system, graph, num_parts, seed))
    child.start()
    there.close()
    try:
        row: Row = here.recv()
    except EOFError:
        row = {"error": "the process ended without an answer"}
    child.join()
    return row


def warm_up(system: str) -> None:
    """Load libraries and kernels."""
    if system in partition_large.SYSTEMS:
        split(system, products_like(6_000 / FULL_NODES), device_work(2, 0)[0], 2, 0)
        return
    ring = np.arange(64)
    split(system, (64, ring, (ring + 1) % 64, ring[:1]), device_work(2, 0)[0], 2, 0)


def _measure_here(answer: Any, system: str, graph: Graph, num_parts: int, seed: int) -> None:
    try:
        work, slowdowns = device_work(num_parts, seed)
        warm_up(system)
        before = _resident_bytes()
        began = time.perf_counter()
        row = split(system, graph, work, num_parts, seed)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        num_nodes, src, dst, train = graph
        part = row.pop("part")
        sizes = count_sizes(src, dst, part, num_parts, train)
        if min(one.inner for one in sizes) < 1 or sum(one.inner for one in sizes) != num_nodes:
            raise AssertionError(f"a part is empty or a node is missing: {sizes}")
        part_seconds = [work.seconds(p, one) for p, one in enumerate(sizes)]
        row |= {"slowdowns": slowdowns, "seconds": seconds, "grown_bytes": max(peak - before, 0)}
        row |= {"inner": [one.inner for one in sizes], "edges": [one.edges for one in sizes]}
        row |= {"halo": [one.halo for one in sizes], "part_seconds": part_seconds, "makespan": max(part_seconds)}
        row |= {"cut": float((part[src] != part[dst]).mean()), "bound": bound_of(work, graph, num_parts)}
        answer.send(row)
    except Exception as error:  # what could not run is a row, too
        answer.send({"error": f"{type(error).__name__}: {str(error)[:160]}"})


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def worst(ratios: list[float]) -> float:
    """The ratio that is furthest from 1, as a factor either way."""
    return max(ratios, key=lambda ratio: abs(math.log(max(ratio, 1e-9))))


def idle(row: Row) -> float:
    """Mean share of an epoch in which devices wait for the slowest."""
    return float(1 - sum(row["part_seconds"]) / (row["parts"] * row["makespan"]))


def line(row: Row) -> str:
    """80 columns of a row."""
    head = f"{row['graph'][:16]:16}{row['parts']:3} {row['system'][:14]:14}"
    if "error" in row:
        return f"{head} {row['error']}"[:80]
    halo = sum(row["halo"]) / row["num_nodes"]
    return (
        f"{head}{worst(row['share_ratios']):6.2f}{idle(row):6.2f}{row['cut']:6.2f}{halo:6.2f}"
        f"{row['makespan'] / row['bound']:7.3f}{row['seconds']:7.2f}{row['grown_bytes'] / 2**20:6.0f}"
    )


def part_line(row: Row) -> str:
    """80 columns: by how many percent every part misses its target, in the order of the devices."""
    numbers = "".join(f"{100 * (ratio - 1):+4.0f}" for ratio in row["share_ratios"])
    return f"{row['graph'][:11]:11}{row['parts']:3}{numbers}"


def ratios_to(rows: list[Row], system: str, other: str) -> list[float]:
    """Makespan of one system over that of the other, for each graph and number of parts that has both."""
    of = {(row["graph"], row["parts"], row["system"]): row["makespan"] for row in rows if "error" not in row}
    return [
        value / of[graph, parts, other]
        for (graph, parts, name), value in of.items()
        if name == system and (graph, parts, other) in of
    ]


def summary(rows: list[Row]) -> list[str]:
    """How each system's slowest part compares with that of METIS in one shot."""
    lines = [f"{'slowest part over that of':28}{'METIS':^27}{'METIS nodes':^24}".rstrip()]
    lines.append(f"{'':22}" + 2 * f"{'median':>9}{'least':>8}{'most':>8}")
    for system in SYSTEMS:
        cells = ""
        for other in ("METIS", "METIS nodes"):
            ratios = ratios_to(rows, system, other)
            if not ratios:
                break
            cells += f"{statistics.median(ratios):9.3f}{min(ratios):8.3f}{max(ratios):8.3f}"
        if cells:
            lines.append(f"{system:22}{cells}")
    return lines


def of_systems(rows: list[Row]) -> list[str]:
    """Medians over graphs by number of parts."""
    lines = [f"{'P':>3} {'system':16}{'/bound':>8}{'idle':>7}{'worst share':>13}{'seconds':>9}{'MiB':>7}"]
    for parts in sorted({row["parts"] for row in rows}):
        for system in SYSTEMS:
            chosen = [r for r in rows if r["parts"] == parts and r["system"] == system and "error" not in r]
            if not chosen:
                continue
            far = worst([worst(row["share_ratios"]) for row in chosen])
            lines.append(
                f"{parts:3} {system:16}{statistics.median(r['makespan'] / r['bound'] for r in chosen):8.3f}"
                f"{statistics.median(idle(r) for r in chosen):7.3f}{far:13.2f}"
                f"{statistics.median(r['seconds'] for r in chosen):9.2f}"
                f"{statistics.median(r['grown_bytes'] for r in chosen) / 2**20:7.0f}"
            )
    return lines


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row for each measurement, the last one, in the order in which they first came."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[row["graph"], row["parts"], row["system"], row["seed"]] = row
    return list(found.values())


def page(rows: list[Row], large: list[Row]) -> str:
    """The whole page, in Markdown, of the rows alone; ``large`` are those of large graphs."""
    rows = latest(rows)
    graphs = {row["graph"]: (row["num_nodes"], row["num_edges"]) for row in rows}
    drawn = {row["parts"]: row["slowdowns"] for row in rows if "slowdowns" in row}
    machines = sorted({f"{row['machine']['card']}, code {row['machine']['code']}" for row in rows})
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    text = [
        "# Splits for unequal devices",
        "Written by `python benchmarks/partition_fit.py --report` from `benchmarks/rows/partition_fit`; do not edit. "
        "How the loop works: `partition.md`. What was expected: the first lines of the script.",
        f"Graphs (nodes, edges): {', '.join(f'{name} ({n:,}, {e:,})' for name, (n, e) in graphs.items())}. "
        f"Measured on: {'; '.join(machines)}; other work ran beside. Seed {seeds}. "
        "Seconds are predicted by a work model that is made up, the same for all; it says nothing of real devices.",
        "Slowdowns of the devices, drawn by the seed:",
        _block(f"{parts:3}: " + " ".join(f"{f:.1f}" for f in drawn[parts]) for parts in sorted(drawn)),
        "`METIS`: one shot, relaxed shares of the work model's node weights. `METIS nodes`: the same shares of the "
        "nodes. `KaMinPar`: one shot, as `METIS`. `loop`: `partition_to_fit`, on METIS or KaMinPar.",
        "## Slowest part",
        _block(summary(rows)),
        "Medians over graphs; `/bound`: slowest part over 1 / sum(1 / T), T the whole graph on a device alone, without "
        "halo. `idle`: mean share of an epoch that devices wait. `worst share`: achieved over target of the part that "
        "misses most, of all graphs. The loop leaves its targets on purpose: what is balanced is seconds, with halo.",
        _block(of_systems(rows)),
        *partition_large.section(latest(large)),
        "## Every graph",
        "`share`: achieved over target of the worst part; `cut`: share of the edges; `halo`: rows over nodes.",
        _block([HEAD, *(line(row) for row in rows)]),
    ]
    for system in ("METIS", "KaMinPar", "loop"):
        chosen = [row for row in rows if row["system"] == system and "error" not in row]
        if chosen:
            text += [f"## Every part: {system}", "Percent above or below its target, in the order of the devices."]
            text.append(_block(part_line(row) for row in chosen))
    return "\n\n".join(text) + "\n"


def _block(lines: Iterable[str]) -> str:
    return "\n".join(["```", *lines, "```"])


def run_large(arguments: argparse.Namespace) -> None:
    """Rows of large graphs."""
    torch.set_num_threads(arguments.threads)
    out = None if arguments.out is None else arguments.out / "partition_large.jsonl"
    recorder = Recorder(out, torch.device("cpu"), partition_large.line)
    systems = arguments.systems or partition_large.SYSTEMS
    print(partition_large.HEAD)
    for nodes in arguments.large:
        graph = products_like(nodes / FULL_NODES)
        for parts in arguments.parts:
            facts = {"kind": "partition_large", "graph": f"products-like {graph[0]}", "num_nodes": graph[0]}
            facts |= {"num_edges": len(graph[1]), "parts": parts, "seed": arguments.seed, "threads": arguments.threads}
            for system in systems:
                recorder.add(facts | {"system": system} | measure(system, graph, parts, arguments.seed))
    print("\n".join(["", *partition_large.table(recorder.rows)]))
    if any("error" in row for row in recorder.rows):
        sys.exit(1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder of NAME/NAME.npz")
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS))
    parser.add_argument(
        "--scale", type=float, default=0.01, help="products-like beside them, of ogbn-products; 0: none"
    )
    parser.add_argument("--large", nargs="+", type=int, metavar="NODES", help="only products-like of so many nodes")
    parser.add_argument("--parts", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS + partition_large.SYSTEMS, default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="for --large")
    parser.add_argument("--out", type=Path, help="add rows to this folder")
    parser.add_argument("--report", action="store_true", help="only write the page")
    parser.add_argument("--rows", type=Path, default=KEPT, help="folder of rows for --report")
    parser.add_argument("--rows-large", type=Path, default=KEPT_LARGE, help="likewise those of large graphs")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args(argv)
    if arguments.report:
        rows = read_rows(arguments.rows)
        if not rows:
            raise SystemExit(f"no rows in {arguments.rows}")
        arguments.page.write_text(page(rows, read_rows(arguments.rows_large)), encoding="utf-8")
        return
    if arguments.large:
        run_large(arguments)
        return
    if arguments.graphs and arguments.data_dir is None:
        raise SystemExit("--data-dir is needed for --graphs; `--graphs --scale 0.01` runs without")
    torch.set_num_threads(1)
    has_kaminpar = importlib.util.find_spec("kaminpar") is not None
    systems = [name for name in arguments.systems or SYSTEMS if has_kaminpar or "KaMinPar" not in name]
    out = None if arguments.out is None else arguments.out / "partition_fit.jsonl"
    recorder = Recorder(out, torch.device("cpu"), line)
    print(HEAD)
    for name in [*arguments.graphs, *(["products-like"] if arguments.scale else [])]:
        graph = products_like(arguments.scale) if name == "products-like" else load(arguments.data_dir, name)
        for parts in arguments.parts:
            facts = {"kind": "partition_fit", "graph": name, "num_nodes": graph[0], "num_edges": len(graph[1])}
            facts |= {"parts": parts, "seed": arguments.seed}
            for system in systems:
                recorder.add(facts | {"system": system} | measure(system, graph, parts, arguments.seed))
    print("\n".join(["", *summary(recorder.rows), "", *of_systems(recorder.rows)]))
    if any("error" in row for row in recorder.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
