"""Splits of large graphs for unequal devices: one cut and a corrected one, the loop on METIS, the loop on clusters.

`partition_fit.py --large NODES` runs them and puts :func:`section` on its page. A row holds what `partition_fit.split`
gives, and processor seconds, which other work on the machine lengthens least: of the neighbour lists that partitioners
see, of each round and of all.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np

from nugnn.partition import metis
from nugnn.planning.partition_loop import partition_to_fit
from nugnn.planning.work_model import LinearWork

SYSTEMS = ("METIS, twice", "METIS loop", "clusters loop")
HEAD = "M arcs  P system         lists  cuts  moves  all, s   GiB   cut  /bound  beside"
Row = dict[str, Any]
Graph = tuple[int, np.ndarray, np.ndarray, np.ndarray]
TEXT = (
    "`METIS, twice` is what plans of graphs of 30 M edges and more were made of: a cut by work and one with corrected "
    "targets, of neighbour lists made by SciPy. `METIS loop` is what smaller graphs got: all starting splits, rounds, "
    "and moves of single nodes, which plans now have only where memory is lacking. `clusters loop` is the same with "
    "clusters that are found once, and what graphs of 30 M edges now get where no partitioner is named. It is never "
    "worse by the model than its own starting splits; METIS' are not among these, and it may be worse than one of "
    "them.",
    "Processor seconds on one thread: `lists`, neighbour lists for the partitioner; `cuts` and `moves`, medians of "
    "rounds, counting included; `all` of it. `GiB`: growth to the peak. `beside`: slowest part beside `METIS, twice`.",
)
OUTCOME = (
    "What was expected before anything was measured, and what came of it, with processor seconds on one thread; the "
    "machine was busy, and where a range is given it is that of three runs:",
    "| change | expected | found |\n|---|---|---|\n| neighbour lists by counting sorts in place of SciPy's "
    "matrices | 12 M arcs in 1 s in place of 8; a third of the memory | arcs in any order: 12 M in 0.6 to 0.9 s in "
    "place of 1.7, 6 M in 0.2 in place of 0.4 to 0.7; in order of sources: 6 M in 0.16 in place of 0.15 to 0.6. "
    "Peak of 12 M 185 MiB in place of 650. The 8 s had been wall-clock time of a busy machine |\n| the same lists "
    "by a sort of each row, tried first | as above | 0.35 s for 6 M arcs, as slow as SciPy: comparisons took most "
    "of it; transposes need none |\n| clusters found once for all targets | a further cut in a fifth of METIS' "
    "seconds | 0.1 to 0.4 s in place of 1.2 to 1.4 (6 M arcs, 8 parts), 0.2 to 0.3 in place of 3.4 to 3.5 (12 M); "
    "the first one 1.0 in place of 1.4, and 1.7 in place of 3.5 |\n| moves weighed in one pass over a node's "
    "sources, with a bit for each part that has one | 1.6 times as fast, by threads alone | on one thread weighing "
    "3.4 to 1.7 s, moves as a whole 4.5 to 2.7 (6 M arcs, 8 parts); the same slowest part to the last digit |\n| "
    "strains by repeated squares in place of `**` | a third of what was left | 1.69 to 1.61 s, not kept |\n| the "
    "loop on clusters beside `METIS, twice` | slowest part 0.95 (2 parts) and 0.90 (8); 0.6 of its seconds; within "
    "1 % of the METIS loop | 0.98 and 0.995 to 0.998; 1.0 to 2.6 times its seconds, most of them in moves, and 0.6 "
    "to 1.0 of the METIS loop's; 0.7 % better to 0.2 % worse than that; a third of the memory or less |\n| where a "
    "step of all devices decides: no moves, and targets that aim at the step (by hand, replayed steps of GCN, SAGE "
    "and GAT on Cora and Computers, 2 and 4 CPU devices, 18 plans) | a step half a per cent faster, in much less "
    "time | moves were slower than the cuts they began with in 16 of 18, by up to 6.6 %, and faster by 0.3 % at "
    "most. Without them and with the new targets the step is 0.8 % faster to 0.7 % slower, the same in 10; SAGE on "
    "12 M arcs, 2 devices: the same steps in 3.7 and 4.4 s in place of 14.8 and 10.1. Of 124 M arcs plans with "
    "moves were not done after 170 s on an H200's host. `partition_steps.py` has such plans with and without moves, "
    "METIS and equal ends beside them (`partition.md`) |",
    "So METIS is not as slow as had been thought, and by this model, whose devices do not wait for each other in "
    "between, a corrected cut is nearly as good as the loop. What large graphs gain is that baselines are cut as "
    "well, that a step of all devices decides, and that further cuts, also among sets of hosts, cost little. In "
    "this table moves alone made devices wait for less than 2 % of an epoch, so no loop went on to corrected "
    "targets.",
)


def split(system: str, graph: Graph, work: LinearWork, num_parts: int, seed: int) -> Row:
    """What a system makes of the graph.

    "METIS, twice" is what plans of large graphs were until there were loops on clusters: a cut by work and one with
    corrected targets, of lists that SciPy makes, without moves. "METIS loop" is what small graphs get.
    """
    num_nodes, src, dst, train = graph
    many, metis._MANY_ARCS = metis._MANY_ARCS, 2**62 if system == "METIS, twice" else 0
    try:
        marks = [("lists", time.process_time())]
        lists = metis.symmetric_graph(num_nodes, src, dst, None)
    finally:
        metis._MANY_ARCS = many
    how: dict[str, Any] = {"rounds": 1, "only_work": True, "moves": False} if system == "METIS, twice" else {}
    fitted = partition_to_fit(
        num_nodes, src, dst, work, [math.inf] * num_parts, train_nodes=train, seed=seed, symmetric=lists,
        method="clusters" if system == "clusters loop" else "metis",
        on_round=lambda name: marks.append((name, time.process_time())), **how,
    )  # fmt: skip
    ends = [begin for _, begin in marks[1:]] + [time.process_time()]
    spent = [end - begin for (_, begin), end in zip(marks, ends, strict=True)]
    return {
        "part": fitted.assignment.part.numpy(),
        "cpu_seconds": sum(spent),
        "lists_seconds": spent[0],
        "rounds": [[one.name, one.makespan, took] for one, took in zip(fitted.rounds, spent[1:], strict=True)],
        "best_round": fitted.best_round,
        "notes": len(fitted.assignment.notes),
    }


def seconds_of(row: Row, moves: bool) -> list[float]:
    """Of each round of moves, or of each cut with its counts."""
    return [seconds for name, _, seconds in row["rounds"] if (name == "moves") == moves]


def line(row: Row, twice: float | None = None) -> str:
    """80 columns; ``twice`` is the slowest part of "METIS, twice" on the same graph."""
    begin = f"{row['num_edges'] / 1e6:6.1f}{row['parts']:3} {row['system']:14}"
    if "error" in row:
        return f"{begin} {row['error']}"[:80]
    cuts, moves = seconds_of(row, False), seconds_of(row, True)
    moved = f"{statistics.median(moves):7.2f}" if moves else f"{'-':>7}"
    beside = f"{row['makespan'] / twice:8.3f}" if twice else f"{'-':>8}"
    return (
        f"{begin}{row['lists_seconds']:6.2f}{statistics.median(cuts):6.2f}{moved}{row['cpu_seconds']:8.1f}"
        f"{row['grown_bytes'] / 2**30:6.2f}{row['cut']:6.3f}{row['makespan'] / row['bound']:8.3f}{beside}"
    )


def table(rows: list[Row]) -> list[str]:
    """A line for each row, beside "METIS, twice"."""
    twice = {
        (row["num_edges"], row["parts"]): row["makespan"]
        for row in rows
        if row["system"] == "METIS, twice" and "error" not in row
    }
    return [HEAD, *(line(row, twice.get((row["num_edges"], row["parts"]))) for row in rows)]


def section(rows: list[Row]) -> list[str]:
    """Paragraphs of the page; none without rows."""
    if not rows:
        return []
    threads = ", ".join(str(count) for count in sorted({row["threads"] for row in rows}))
    lines = table(sorted(rows, key=lambda row: (row["num_edges"], row["parts"], SYSTEMS.index(row["system"]))))
    machines = sorted({f"{row['machine']['card']}, code {row['machine']['code']}" for row in rows})
    made = f"Graphs shaped like ogbn-products. Threads: {threads}. Measured on: {'; '.join(machines)}."
    return ["## Large graphs", *TEXT, made, "\n".join(["```", *lines, "```"]), *OUTCOME]
