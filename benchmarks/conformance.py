"""Prints which modules of ``dgl.nn.pytorch`` give the same numbers on three unequal parts, on one, and in plain DGL.

Run it from anywhere: ``python benchmarks/conformance.py [--device cuda] [NAME ...]``. It starts its own
ranks. On a GPU, runs with dropout are compared with one part on the CPU too.
"""

from __future__ import annotations

import argparse
import atexit
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch

import nugnn  # noqa: F401
from conformance import Job, Outcome, Run, compare, run_shards
from conformance_cases import REASONS, all_cases
from fork_server import ForkServer
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.devices import devices_of
from nugnn.seam import install
from rank_pool import RankPool

NAME_WIDTH, REASON_WIDTH = 27, 52


def on_three_ranks(device: torch.device) -> Callable[[list[Job]], list[list[Run | str]]]:
    """`run_shards` on three ranks: threads on the CPU, processes that share the card on a GPU."""
    if device.type == "cpu":
        return lambda jobs: run_local_ranks(3, lambda ranks: run_shards(ranks, jobs), timeout_seconds=120)
    server = ForkServer()
    atexit.register(server.stop)
    pool = RankPool(server)
    return lambda jobs: pool.run(3, run_shards, jobs, device, timeout=300)


def summary(name: str, outcomes: Iterable[Outcome]) -> tuple[str, bool]:
    """Line of the table for one module, and whether it passes."""
    outcomes = list(outcomes)
    for outcome in outcomes:
        if outcome.error:
            return f"{name:<{NAME_WIDTH}} {outcome.job.case.options}: {outcome.error}"[:80], False
    to_one = max(outcome.to_one[0] for outcome in outcomes)
    to_dgl = max(outcome.to_dgl[0] for outcome in outcomes if outcome.to_dgl is not None)
    bound = max(outcome.job.case.bound for outcome in outcomes)
    configurations = len({outcome.job.case.options for outcome in outcomes})
    verdict = "same" if max(to_one, to_dgl) <= bound else "DIFFERS"
    return f"{name:<{NAME_WIDTH}} {configurations:>7} {to_one:>13.1e} {to_dgl:>13.1e}  {verdict}", verdict == "same"


def main(names: list[str], device: torch.device) -> int:
    """Print the table; the number of modules that do not pass."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    install()
    print("Train mode, float64; outputs, input and weight gradients, statistics; dropout on")
    print("against one part, off against plain DGL. Largest relative difference.\n")
    print(f"{'module':<{NAME_WIDTH}} {'options':>7} {'3 parts - 1':>13} {'nugnn - DGL':>13}")
    failures = 0
    run_on_three = on_three_ranks(device)
    cases = all_cases()
    for name in sorted({case.name for case in cases}):
        if names and name not in names:
            continue
        line, passes = summary(name, compare([case for case in cases if case.name == name], run_on_three, device))
        failures += not passes
        print(line, flush=True)
    for name, reason in sorted(REASONS.items()):
        if not names or name in names:
            print(f"{name:<{NAME_WIDTH}} {'-':>7}  {reason[: REASON_WIDTH - 9]}")
    print(f"\n{failures} not the same")
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules; all when none is named")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    sys.exit(min(main(options.names, devices_of(options.device, 1)[0][0]), 1))
