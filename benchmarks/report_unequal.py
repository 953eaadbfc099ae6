"""Writes docs/unequal-devices.md from JSON rows: splits of unequal GPUs, and predicted steps.

    python benchmarks/report_unequal.py

Rows are those of ``unequal_gpus.py`` and ``replay_accuracy.py --device cuda``, written with their ``--rows``, in
``benchmarks/rows/{unequal,replay}``. All are shown, also those in which we lose.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, markdown, read_rows

Row = dict[str, Any]
ROWS = ROOT / "benchmarks" / "rows"
PAGE = ROOT / "docs" / "unequal-devices.md"
_STATIC = ("even", "flops", "bandwidth")
_HEAD = """# Unequal devices, measured

Written by `python benchmarks/report_unequal.py` from `benchmarks/rows`; do not edit. How it works: `plan.md`,
`rebalance.md` (with a GPU that became slow in mid-run), `replayer.md`, `virtual-devices.md`.
"""
_SPLITS = """## Two GPUs, one of them limited

`python benchmarks/unequal_gpus.py`: rank 1 keeps to 64, 32 or 16 of 132 multiprocessors. Milliseconds of an epoch,
medians of {repeats} epochs in turns; an epoch's p20 and p80 lie within {spread:.1%} of its median. `T`: the whole
graph on each device alone. `even`, `flops`, `bandwidth`: shares by one number, FLOP/s and bandwidth measured under
the limit. `auto`: shares from T alone and one time for a row that travels, cut once and corrected at most twice.
`tuned`: planned once more from what ranks were busy with in six epochs of `auto`, as re-balancing levels computing
in a run (of which it makes no more than shortens the whole epoch). `over bound`: beside 1 / sum(1 / T), what both
devices would do together if nothing had to travel; `gain`: how much of the way from even shares to that bound;
`waits`: share of an epoch in which each rank stands still, exchanges included. Both of the latter three of the last
planned column. Losses of all splits agree with those of one device.

**These rows were made with a linear model of the benchmark's own**, as said above. Since then its `auto` is what
`nugnn train --shares auto` plans, with operators and rows that travel timed within the limits, and its `tuned` one
correction of that by moved nodes; that has not been measured yet.
"""
_BEST = """`tuned` beside the best of the three: {tuned}. `auto` beside it: {auto}.
**`auto` by itself falls behind shares by FLOP/s** on {behind}: it takes a row that travels for as dear on the
limited device as on the whole one. 1.15 times the bound was to be reached and is not. Nor is it by two whole GPUs
with even shares (1.63 times as fast as one: `performance.md`), so shares are not what is missing: halo rows, their
copies, and steps on less than the whole graph are.
"""
_STEPS = """## Predicted steps on a GPU

`python benchmarks/replay_accuracy.py --device cuda`: every configuration that was drawn and run before time was out,
no factor. A step is bound by the device where `busy` is near the measured time, else by the host. Two benchmarks ran
side by side on the two GPUs of a host.

**Steps of samples are predicted wrong by factors**, but for convolutions: in these tables operators add up to steps
that were as long as their host, 1.5 to 14 ms whatever the batch, and the graph that the step really runs as does
without. That is mended, and not measured again. Of a step that runs as a graph, the optimizer counted as one launch,
whatever it launches; now as its operators, which is not measured again either. Some transformers in float32 take 11 to
15 times the memory that was predicted, likely by another attention kernel; perceptrons 2 to 21 % more, transformers in
bfloat16 11 %. Both are open.
"""


def splits_table(rows: Sequence[Row]) -> str:
    """A line for each graph, model and limit."""
    lines = []
    of_case: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        if "error" not in row:
            of_case.setdefault((row["graph"], row["model"], row["sms"]), {})[row["system"]] = row
    auto, tuned, behind = [], [], []
    for (graph, model, sms), by_name in of_case.items():
        best = min(by_name[name]["median_ms"] for name in _STATIC)
        last = by_name.get("tuned") or by_name["auto"]
        auto.append(best / by_name["auto"]["median_ms"])
        if auto[-1] < 0.99:
            behind.append(f"{model.upper()} {sms}")
        if "tuned" in by_name:
            tuned.append(best / by_name["tuned"]["median_ms"])
        columns = [_ms(by_name.get(name)) for name in (*_STATIC, "auto", "tuned")]
        lines.append(
            [
                graph, model.upper(), str(sms), " / ".join(f"{ms:.1f}" for ms in last["alone_ms"]), *columns,
                f"{best / last['median_ms']:.2f}", f"{last['over_bound']:.2f}", f"{last['gain_share']:.0%}",
                " / ".join(f"{share:.0%}" for share in last["waits"]),
            ]
        )  # fmt: skip
    head = ["graph", "model", "MPs", "T", *_STATIC, "auto", "tuned", "best / planned", "over bound", "gain", "waits"]
    spread = max((row["p80_ms"] - row["p20_ms"]) / row["median_ms"] for row in rows if "error" not in row)
    repeats = min(row["repeats"] for row in rows if "error" not in row)
    said = _BEST.format(tuned=_range(tuned), auto=_range(auto), behind=", ".join(dict.fromkeys(behind)) or "no case")
    intro = _SPLITS.format(repeats=repeats, spread=spread)
    return f"{intro}\n{_machines(rows)}\n\n{markdown(head, lines)}\n\n{said}"


def steps_table(rows: Sequence[Row]) -> str:
    """A line for each step, and means."""
    parts = [f"{_STEPS}\n{_machines(rows)}."]
    for family in dict.fromkeys(row["family"] for row in rows):
        here = [row for row in rows if row["family"] == family and "error" not in row]
        errors = [row["predicted_seconds"] / row["measured_seconds"] - 1 for row in here]
        memory = [row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1 for row in here]
        lines = [
            [
                row["case"], f"{row['sizes']['inner'] or row['sizes']['batch']:,}",
                *(f"{1e3 * row[f'{what}_seconds']:.2f}" for what in ("measured", "busy", "predicted")),
                f"{error:+.1%}", f"{held:+.1%}",
            ]
            for row, error, held in zip(here, errors, memory, strict=True)
        ]  # fmt: skip
        name = "GNN epochs" if family == "graph" else "Steps of samples, recorded as CUDA graphs"
        head = [
            "configuration",
            "nodes" if family == "graph" else "batch",
            "measured, ms",
            "busy",
            "predicted",
            "error",
            "memory",
        ]
        mean = statistics.mean(abs(error) for error in errors)
        held = statistics.mean(abs(value) for value in memory)
        parts.append(
            f"**{name}**: {len(here)} steps of {len(dict.fromkeys(row['case'] for row in here))} configurations, "
            f"mean absolute error {mean:.1%}, "
            f"median {statistics.median(abs(error) for error in errors):.1%}; of peak memory {held:.1%}, median "
            f"{statistics.median(abs(value) for value in memory):.1%}.\n\n{markdown(head, lines)}"
        )
    return "\n\n".join(parts) + "\n"


def page(rows: Path) -> str:
    """The whole page."""
    return "\n".join(
        [
            _HEAD,
            splits_table(read_rows(rows / "unequal")),
            steps_table(read_rows(rows / "replay")),
        ]
    )


def _ms(row: Row | None) -> str:
    return "-" if row is None else f"{row['median_ms']:.1f}"


def _range(values: Sequence[float]) -> str:
    ordered = sorted(values)
    median = statistics.median(ordered)
    return f"{ordered[0]:.2f} to {ordered[-1]:.2f} times as fast, median {median:.2f} ({len(ordered)} cases)"


def _machines(rows: Sequence[Row]) -> str:
    cards = dict.fromkeys(row["machine"]["card"] for row in rows)
    codes = dict.fromkeys(row["machine"]["code"] for row in rows)
    return f"{', '.join(cards)}; torch {rows[0]['machine']['torch']}; code {', '.join(codes)}"


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(ROWS), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
