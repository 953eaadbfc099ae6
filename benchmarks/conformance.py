"""Prints which modules of ``dgl.nn.pytorch`` give the same numbers on three unequal parts, on one, and in plain DGL.

    python benchmarks/conformance.py [--device cuda] [--out ROWS] [NAME ...]
    python benchmarks/conformance.py --report           # docs/conformance.md from the rows that the repository keeps

Run it from anywhere. It starts its own ranks. On a GPU, runs with dropout are compared with one part on the CPU too.
"""

from __future__ import annotations

import argparse
import atexit
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from harness import ROOT, Recorder, read_rows

import nugnn  # noqa: F401
from conformance import Job, Outcome, Run, compare, run_shards
from conformance_cases import REASONS, all_cases
from fork_server import ForkServer
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.devices import devices_of
from nugnn.seam import install
from rank_pool import RankPool

NAME_WIDTH, REASON_WIDTH = 27, 52
KEPT, PAGE = ROOT / "benchmarks" / "rows" / "conformance", ROOT / "docs" / "conformance.md"


def on_three_ranks(device: torch.device) -> Callable[[list[Job]], list[list[Run | str]]]:
    """`run_shards` on three ranks: threads on the CPU, processes that share the card on a GPU."""
    if device.type == "cpu":
        return lambda jobs: run_local_ranks(3, lambda ranks: run_shards(ranks, jobs), timeout_seconds=120)
    server = ForkServer()
    atexit.register(server.stop)
    pool = RankPool(server)
    return lambda jobs: pool.run(3, run_shards, jobs, device, timeout=300)


def row_of(name: str, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """What came out for one module: the largest relative differences, and the bound on them, or what went wrong."""
    outcomes = list(outcomes)
    row: dict[str, Any] = {"kind": "conformance", "system": name}
    row |= {"configurations": len({outcome.job.case.options for outcome in outcomes})}
    for outcome in outcomes:
        if outcome.error:
            return row | {"error": f"{outcome.job.case.options}: {outcome.error}"}
    row |= {"to_one": max(outcome.to_one[0] for outcome in outcomes)}
    row |= {"to_dgl": max(outcome.to_dgl[0] for outcome in outcomes if outcome.to_dgl is not None)}
    is_same = all(
        max(outcome.to_one[0], outcome.to_dgl[0] if outcome.to_dgl else 0.0) <= outcome.job.case.bound
        for outcome in outcomes
    )
    return row | {"bound": max(outcome.job.case.bound for outcome in outcomes), "is_same": is_same}


def line_of(row: dict[str, Any]) -> str:
    """A row for people, at most 80 columns."""
    if "error" in row:
        return f"{row['system']:<{NAME_WIDTH}} {row['error']}"[:80]
    numbers = f"{row['configurations']:>7} {row['to_one']:>13.1e} {row['to_dgl']:>13.1e}"
    return f"{row['system']:<{NAME_WIDTH}} {numbers}  {'same' if row['is_same'] else 'DIFFERS'}"


def page(rows: list[dict[str, Any]]) -> str:
    """The whole page, in Markdown, a section for each device; of rows of one module there the last one counts."""
    parts = [
        "# Modules of DGL on parts",
        "Written by `python benchmarks/conformance.py --report`; do not edit. Each module of `dgl.nn.pytorch` that "
        "takes a graph, in train mode and float64: outputs, gradients of inputs and weights, and statistics on three "
        "unequal parts beside one part, with dropout, and beside plain DGL on the CPU, without it (masks are "
        "nuGNN's own). Numbers are the largest relative differences over all configurations and two graphs; "
        "the bound on a module's is derived in `tests/support/conformance.py` and `conformance_cases.py`.",
    ]
    for card in dict.fromkeys(row["machine"]["card"] for row in rows):
        of_card = {row["system"]: row for row in rows if row["machine"]["card"] == card}
        torch_, python, code = (
            " and ".join(dict.fromkeys(row["machine"][name] for row in of_card.values()))
            for name in ("torch", "python", "code")
        )
        lines = [f"## {card}", "", f"torch {torch_}, Python {python}; code {code}.", ""]
        lines += ["| module | configurations | 3 parts - 1 | nuGNN - DGL | bound | |", "|---|---|---|---|---|---|"]
        for name, row in sorted(of_card.items()):
            found = [row["error"]] if "error" in row else [f"{row[key]:.1e}" for key in ("to_one", "to_dgl", "bound")]
            verdict = "same" if row.get("is_same") else "**differs**"
            cells = [name, str(row["configurations"]), *found, *[""] * (3 - len(found)), verdict]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    lines = ["## Not compared", "", "| module | reason |", "|---|---|"]
    parts.append("\n".join([*lines, *(f"| {name} | {reason} |" for name, reason in sorted(REASONS.items()))]))
    return "\n\n".join(parts) + "\n"


def main(names: list[str], device: torch.device, out: Path | None = None) -> int:
    """Print the table; the number of modules that do not pass."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    install()
    print("Train mode, float64; outputs, input and weight gradients, statistics; dropout on")
    print("against one part, off against plain DGL. Largest relative difference.\n")
    print(f"{'module':<{NAME_WIDTH}} {'options':>7} {'3 parts - 1':>13} {'nugnn - DGL':>13}")
    recorder = Recorder(None if out is None else out / "conformance.jsonl", device, line_of)
    run_on_three = on_three_ranks(device)
    cases = all_cases()
    for name in sorted({case.name for case in cases}):
        if not names or name in names:
            of_name = [case for case in cases if case.name == name]
            recorder.add(row_of(name, compare(of_name, run_on_three, device)))
    for name, reason in sorted(REASONS.items()):
        if not names or name in names:
            print(f"{name:<{NAME_WIDTH}} {'-':>7}  {reason[: REASON_WIDTH - 9]}")
    failures = sum(not row.get("is_same") for row in recorder.rows)
    print(f"\n{failures} not the same")
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules; all when none is named")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="folder for conformance.jsonl")
    parser.add_argument("--report", action="store_true", help="write docs/conformance.md, run nothing")
    options = parser.parse_args()
    if options.report:
        PAGE.write_text(page(read_rows(KEPT)), encoding="utf-8")
        sys.exit()
    sys.exit(min(main(options.names, devices_of(options.device, 1)[0][0], options.out), 1))
