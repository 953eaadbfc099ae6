"""Writes docs/unequal-devices.md from JSON rows: splits of unequal GPUs, and predicted steps.

    python benchmarks/report_unequal.py

Rows are those of ``unequal_gpus.py`` and ``replay_accuracy.py --device cuda``, written with their ``--rows``, in
``benchmarks/rows/{unequal,unequal_random_parts,replay}``. All are shown, also those in which we lose.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, markdown, read_rows

Row = dict[str, Any]
Case = tuple[str, str, int]
"""Graph, model and multiprocessors of rank 1."""
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
the limit. `auto`: what `nugnn train --shares auto` plans, with operators and rows that travel timed within the limits
on parts of the graph, and in brackets what it predicted. `tuned`: one correction of that by moved nodes, from what
ranks were busy with in some epochs, as re-balancing levels computing in a run. `over bound`: beside 1 / sum(1 / T),
what both devices would do together if nothing had to travel; `with halo`: beside that bound if each device also spends
what its rows that travel take; `gain`: how much of the way from even shares to the first bound; `waits`: share of an
epoch in which each rank stands still, exchanges included. All four of `auto`. {losses}
"""
_SAME_LOSSES = "Losses of all splits agree with those of one device."
_FOUND = """`auto` beside the best of the three: {auto}.
`tuned` beside it: {tuned}.
Predicted epochs of `auto` are off by {forecast}. 1.15 times the bound was to be reached, and 1.05 times the one with
halo: {within} of {count} reach the first, {within_halo} the second. Two whole GPUs with even shares are 1.63 times as
fast as one (`performance.md`), so what is missing is not in the shares: halo rows, their copies, and steps on less than
the whole graph.
"""
_RANDOM = """### Timed on random parts

The same, when operators were timed on random parts of the expected sizes: expected to do as well, they did not.
Neighbours lie far apart there, which the whole device feels more than the limited one, so that this one seemed fast.
`auto` beside the best of the three: {auto}.
`tuned`: {tuned}.
Predicted epochs were off by {forecast}.
"""
_LINEAR = """### Not measured again yet

By code {codes}: `auto` is from T alone and one time for a row that travels, a model of the benchmark's own; `tuned`
was planned once more from epochs of that.
"""
_STEPS = """## Predicted steps on a GPU

`python benchmarks/replay_accuracy.py --device cuda`: every configuration that was drawn and run before time was out,
no factor. A step is bound by the device where `busy` is near the measured time, else by the host. Two benchmarks ran
side by side on the two GPUs of a host.

Steps of samples were off by 138 % in the mean at first, and their memory by 22 % (by hand, of rows no longer kept),
since laps were scaled to steps that were as long as their host. Then the host's part of a captured step was measured as
well as the peak of timed steps. What is left are transformers in float32: cuDNN takes another kernel for their small
convolution at each of the sizes that are timed, with other seconds and other memory, and in between anything can be.
"""


def splits_section(rows: Sequence[Row], on_random_parts: Sequence[Row]) -> str:
    """Tables of splits that the product planned and of earlier ones, a line for each graph, model and limit."""
    ours, before = (
        _cases(row for row in rows if "forecast_ms" in row),
        _cases(r for r in rows if "forecast_ms" not in r),
    )
    random_parts = _cases(on_random_parts)
    all_rows = [row for by_name in ours.values() for row in by_name.values()]
    spread = max((row["p80_ms"] - row["p20_ms"]) / row["median_ms"] for row in all_rows)
    repeats = min(row["repeats"] for row in all_rows)
    within = {
        "within": sum(by_name["auto"]["over_bound"] <= 1.15 for by_name in ours.values()),
        "within_halo": sum(by_name["auto"]["over_halo_bound"] <= 1.05 for by_name in ours.values()),
    }
    facts = {"auto": _beside_best(ours, "auto"), "tuned": _beside_best(ours, "tuned"), "forecast": _forecast(ours)}
    found = _FOUND.format(**facts, **within, count=len(ours))
    said = _RANDOM.format(
        auto=_beside_best(random_parts, "auto"),
        tuned=_beside_best(random_parts, "tuned"),
        forecast=_forecast(random_parts),
    )
    wrong = sum("error" in row for row in (*rows, *on_random_parts))
    losses = f"{wrong} splits had other losses than one device, and have no figures." if wrong else _SAME_LOSSES
    intro = _SPLITS.format(repeats=repeats, spread=spread, losses=losses)
    sections = [
        f"{intro}\n{_machines(all_rows)}\n\n{_table(ours)}\n\n{found}",
        said,
    ]
    if missing := {case: by_name for case, by_name in before.items() if case not in ours}:
        codes = ", ".join(dict.fromkeys(row["machine"]["code"] for each in missing.values() for row in each.values()))
        sections.append(f"{_LINEAR.format(codes=codes)}\n{_table(missing)}\n")
    return "\n".join(sections)


def _cases(rows: Iterable[Row]) -> dict[Case, dict[str, Row]]:
    """Rows by graph, model and limit, and by split."""
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        if "error" not in row:
            found.setdefault((row["graph"], row["model"], row["sms"]), {})[row["system"]] = row
    return found


def _best(by_name: Mapping[str, Row]) -> float:
    return min(float(by_name[name]["median_ms"]) for name in _STATIC)


def _table(cases: Mapping[Case, Mapping[str, Row]]) -> str:
    lines = []
    for (graph, model, sms), by_name in cases.items():
        auto = by_name["auto"]
        forecast = f" ({auto['forecast_ms']:.1f})" if "forecast_ms" in auto else ""
        halo = f"{auto['over_halo_bound']:.2f}" if "forecast_ms" in auto else "-"
        columns = [_ms(by_name.get(name)) for name in (*_STATIC, "auto", "tuned")]
        columns[-2] += forecast
        lines.append(
            [
                graph, model.upper(), str(sms), " / ".join(f"{ms:.1f}" for ms in auto["alone_ms"]), *columns,
                f"{_best(by_name) / auto['median_ms']:.2f}", f"{auto['over_bound']:.2f}", halo,
                f"{auto['gain_share']:.0%}", " / ".join(f"{share:.0%}" for share in auto["waits"]),
            ]
        )  # fmt: skip
    head = ["graph", "model", "MPs", "T", *_STATIC, "auto", "tuned", "best / auto", "over bound", "with halo"]
    return markdown([*head, "gain", "waits"], lines)


def _beside_best(cases: Mapping[Case, Mapping[str, Row]], name: str) -> str:
    ratios = sorted(_best(each) / each[name]["median_ms"] for each in cases.values() if name in each)
    return (
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as fast, median {statistics.median(ratios):.2f} "
        f"({len(ratios)} cases)"
    )


def _forecast(cases: Mapping[Case, Mapping[str, Row]]) -> str:
    errors = [each["auto"]["forecast_ms"] / each["auto"]["median_ms"] - 1 for each in cases.values()]
    return f"{min(errors):+.1%} to {max(errors):+.1%}"


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
            splits_section(read_rows(rows / "unequal"), read_rows(rows / "unequal_random_parts")),
            steps_table(read_rows(rows / "replay")),
        ]
    )


def _ms(row: Row | None) -> str:
    return "-" if row is None else f"{row['median_ms']:.1f}"


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
