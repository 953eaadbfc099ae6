"""A plan for a cluster that nobody has: papers100M's counts on 64 mixed V100, T4, A100 and H100, 10 and 100 Gb/s.

    python benchmarks/plan_on_paper.py                          # both networks: the plan, and growth up to 256
    python benchmarks/plan_on_paper.py --gbit-per-second 25 --devices V100,A100 --count 32

Every figure is simulated: data sheets, counts of the graph and an assumed halo, never held against a run on such cards.
What is shown is that a plan for them takes seconds, and where by prediction exchanges cost more than devices bring.
16 hosts of four, each kind on four of them; a 3-layer SAGE of width 256. Prints how long the plan took, from counts to
the plan, on the clock and of one core; and fails if a plan takes more than `--within` seconds of the core.
"""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console

import nugnn  # noqa: F401
from nugnn.cli_simulate import growth_table
from nugnn.config import TrainConfig
from nugnn.plan_run import subject_by_counts
from nugnn.plan_tables import show_plan
from nugnn.planned import plan_by_counts
from nugnn.planning.cluster import cluster_on_paper
from nugnn.planning.cluster_file import LinkFields
from nugnn.planning.graph_statistics import parse_statistics
from nugnn.planning.growth import where_it_stops
from nugnn.simulate_run import simulate


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph-stats", default="ogbn-papers100M")
    options.add_argument("--devices", default="V100,T4,A100,H100")
    options.add_argument("--count", type=int, default=64)
    options.add_argument("--growth", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="devices of the table")
    options.add_argument("--per-host", type=int, default=4)
    options.add_argument("--gbit-per-second", type=float, nargs="+", default=[10.0, 100.0])
    options.add_argument("--latency-us", type=float, default=30.0)
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--precision", default="fp32")
    options.add_argument("--within", type=float, default=10.0, help="seconds that a plan may take")
    chosen = options.parse_args()
    config = TrainConfig(dataset="counts", model="sage", layers=3, hidden=chosen.hidden, precision=chosen.precision)
    graph, sheets = parse_statistics(chosen.graph_stats), chosen.devices.split(",")
    console, is_late = Console(width=80), False
    for gbit in chosen.gbit_per_second:
        between = LinkFields(gbit_per_second=gbit, latency_us=chosen.latency_us)
        began, worked = time.perf_counter(), time.process_time()
        cluster = cluster_on_paper(sheets, chosen.count, per_host=chosen.per_host, between=between)
        subject = subject_by_counts(config, graph, ["cuda"], chosen.count)
        planned = plan_by_counts(subject, cluster, halo=graph.expected_halo)
        took, worked = time.perf_counter() - began, time.process_time() - worked
        console.rule(f"simulated: {chosen.count} devices, {gbit:g} Gb/s")
        show_plan(planned, console)
        console.print(f"planned in {took:.1f} s, {worked:.1f} s of a core")
        is_late = is_late or worked > chosen.within
        rows, _ = simulate(config, chosen.graph_stats, sheets, chosen.growth, per_host=chosen.per_host, between=between)
        console.print(growth_table(rows, f"{chosen.graph_stats} on {chosen.devices}, {gbit:g} Gb/s"))
        console.print(f"simulated: {where_it_stops(rows)}\n", highlight=False)
    for note in planned.plan.notes:
        console.print(f"note: {note}", highlight=False)
    return 1 if is_late else 0


if __name__ == "__main__":
    sys.exit(main())
