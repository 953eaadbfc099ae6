"""Writes docs/unequal-devices.md from JSON rows: splits of unequal GPUs, and predicted steps.

    python benchmarks/report_unequal.py

Rows are those of ``unequal_gpus.py`` and ``replay_accuracy.py --device cuda``, written with their ``--rows``, in
``benchmarks/rows/{unequal,unequal_random_parts,replay}``. All are shown, also those in which we lose; splits whose
``auto`` was made in another way, by the planner that rows name, in a section of their own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, markdown, read_rows
from unequal_figures import PLANNER

Row = dict[str, Any]
Case = tuple[str, str, int]
"""Graph, model and multiprocessors of rank 1."""
ROWS = ROOT / "benchmarks" / "rows"
PAGE = ROOT / "docs" / "unequal-devices.md"
_STATIC = ("even", "flops", "bandwidth")
_PLAN = "plan"
"""``auto`` where the product's planning made it; in older rows, of the static splits and ``auto`` the one that is
fastest by its forecast.
"""
_HEAD = """# Unequal devices, measured

Written by `python benchmarks/report_unequal.py` from `benchmarks/rows`; do not edit. How it works: `plan.md`,
`rebalance.md` (with a GPU that became slow in mid-run), `replayer.md`, `virtual-devices.md`.
"""
_SPLITS = """## {title}

`python benchmarks/unequal_gpus.py`: rank 1 keeps to 64, 32 or 16 of 132 multiprocessors. Milliseconds of an epoch,
medians of {repeats} epochs in turns; an epoch's p20 and p80 lie within {spread:.1%} of its median. `T`: the whole
graph on each device alone. `even`, `flops`, `bandwidth`: shares by one number, FLOP/s and bandwidth measured under
the limit. {planned}
`over bound`: beside 1 / sum(1 / T), what both devices would do together if nothing had to travel; `with halo`: beside
that bound if each device also spends what its rows that travel take; `gain`: how much of the way from even shares to
the first bound; `waits`: share of an epoch in which each rank stands still, exchanges included. All four of `{plan}`.
{losses}
"""
_TITLE = "Two GPUs, one of them limited"
_TUNED = """`tuned`: one correction of that by
moved nodes, from what ranks were busy with in some epochs; it levels computing alone, whatever comes of exchanges,
which re-balancing weighs, too, in a run with a plan of its own."""
_EQUAL_ENDS = """\
`auto`: parts of which each ends as early as the other, by operators and rows that travel timed within the
limits on parts of the graph, and in brackets what was predicted for a step of both. {tuned} `plan`: of
`even`, `flops`, `bandwidth` and `auto` the fastest by its prediction, `=` where that is `auto`.
`nugnn train --shares auto` cuts all four and keeps it; it then aims at shares of a faster step, which {whole} has."""
_WHOLE_PLANS = """`auto`: the plan of `nugnn train --shares auto`, by operators and rows that travel timed within the
limits on parts of the graph. It is the fastest by its prediction, in brackets, of cuts by many shares: those of
the other columns, those with which each device ends as early as the other, and ones for a faster step of both.
{tuned}"""
_SAME_LOSSES = "Losses of all splits agree with those of one device."
_OF_EQUAL_ENDS = """`plan` beside the best of the three: {plan}; `auto`: {auto}; `tuned`: {tuned}.
Predicted epochs of all splits, {predictions} of them, are off by {mean} in the mean ({forecast}).

Where `auto` is slower than `flops`, devices end together by what each does for itself, and still wait for each other in
between: one is slow at products, the other at rows. Predictions of the step of both see that: they name the fastest of
the four in {named} of {count} cases, and elsewhere one that is at most {behind:.1%} slower.
"""
_OF_WHOLE_PLANS = """`auto` beside the best of the three: {plan}; `tuned`: {tuned}.
Predicted epochs of all splits, {predictions} of them, are off by {mean} in the mean ({forecast}).

`auto` is the fastest of the four in {named} of {count} cases, and elsewhere at most {behind:.1%} slower than the
fastest. Predictions put one of the three before it, as this benchmark cuts them, in {beaten} cases.
"""
_GOALS = """
85 % of the way from even shares to the bound were to be reached: {gained} of {count} do{limits}. \
1.15 times the bound was to be reached, and 1.05 times the one with halo: {within} of {count} reach the
first, {within_halo} the second. Two whole GPUs with even shares are 1.63 times as fast as one (`performance.md`), so
what is missing is not in the shares: halo rows, their copies, and steps on less than the whole graph. With 64
multiprocessors even shares are nearer to the bound at the start, and the same loss is a larger part of the way.
{since}"""
_SINCE = """
Since these rows, forward sums begin while halo rows travel, and attention's halo rows have faster kernels: half a graph
on one GPU is 1.84 and 1.81 times as fast as the whole with GAT, where it was 1.67 and 1.62 (`half_alone.py`,
`performance-notes.md`). Two GPUs have not been measured since.
"""
_OLD_SUMS = ("70ddd1f328e6", "868a645bdfbf", "90982bab5cc4+")
"""Code before that."""
_RANDOM = """### Timed on random parts

{same}, when operators were timed on random parts of the expected sizes: expected to do as well, they did not.
Neighbours lie far apart there, which the whole device feels more than the limited one, so that this one seemed fast.
`auto` beside the best of the three: {auto}.
`tuned`: {tuned}.
Predicted epochs were off by {forecast}.
"""
_STEPS = """## Predicted steps on a GPU

`python benchmarks/replay_accuracy.py --device cuda`: every configuration that was drawn and run before time was out,
no factor. Steps of graphs on one GPU are recorded as CUDA graphs, as runs have them by default: then the device alone
counts. Told operator by operator, as before and still on several GPUs, a step is bound by the device where `busy` is
near the measured time, else by the host, whose part of the same step was seen to go from 13 to 18 ms within one run.
The ten configurations below that stand in both tables were drawn with one seed, and trained on two machines of the same
kind. Four more steps of the run that was not recorded are left out: a second process measured beside them by mistake.

Steps of samples were off by 138 % in the mean at first, and their memory by 22 % (by hand, of rows no longer kept),
since laps were scaled to steps that were as long as their host. Then the host's part of a captured step was measured as
well as the peak of timed steps. What is left are transformers in float32: cuDNN takes another kernel for their small
convolution at each of the sizes that are timed, with other seconds and other memory, and in between anything can be.
"""


def splits_sections(rows: Sequence[Row], on_random_parts: Sequence[Row]) -> str:
    """A section for each way in which ``auto`` was made, and what operators that were timed on random parts led to.

    Raises:
        ValueError: Rows name a planner that this page knows nothing of.
    """
    planners = {row.get("planner") for row in (*rows, *on_random_parts)}
    if unknown := planners - {PLANNER, None}:
        raise ValueError(f"rows of splits name planners that have no text here: {sorted(map(str, unknown))}")
    kinds = [planner for planner in (PLANNER, None) if any(row.get("planner") == planner for row in rows)]
    parts = [
        _section([row for row in rows if row.get("planner") == planner], planner, has_both=len(kinds) == 2)
        for planner in kinds
    ]
    random_parts = _cases(on_random_parts, None)
    said = _RANDOM.format(
        same="The same" if kinds[-1] is None else "With parts of which each ends as early as the other",
        auto=_beside_best(random_parts, "auto"),
        tuned=_beside_best(random_parts, "tuned"),
        forecast=_forecast(random_parts),
    )
    return "\n".join([*parts, said])


def _section(rows: Sequence[Row], planner: str | None, *, has_both: bool) -> str:
    """A line for each graph, model and limit, and what was found."""
    is_whole = planner is not None
    ours = _cases(rows, planner)
    all_rows = [row for by_name in ours.values() for name, row in by_name.items() if name != _PLAN]
    wrong = sum("error" in row for row in rows)
    title = f"{_TITLE}: parts that end together" if has_both and not is_whole else _TITLE
    whole = "the section above" if has_both else "no row here"
    intro = _SPLITS.format(
        title=title,
        planned=(_WHOLE_PLANS if is_whole else _EQUAL_ENDS).format(tuned=_TUNED, whole=whole),
        plan="auto" if is_whole else _PLAN,
        spread=max((row["p80_ms"] - row["p20_ms"]) / row["median_ms"] for row in all_rows),
        repeats=min(row["repeats"] for row in all_rows),
        losses=f"{wrong} splits had other losses than one device, and have no figures." if wrong else _SAME_LOSSES,
    )
    return f"{intro}\n{_machines(all_rows)}\n\n{_table(ours, is_whole)}\n\n{_found(ours, all_rows, is_whole)}"


def _found(ours: Mapping[Case, Mapping[str, Row]], all_rows: Sequence[Row], is_whole: bool) -> str:
    """What the cases come to."""
    plans = [by_name[_PLAN] for by_name in ours.values()]
    lost = [plan["median_ms"] / _best(by_name, "auto") - 1 for plan, by_name in zip(plans, ours.values(), strict=True)]
    errors = [row["forecast_ms"] / row["median_ms"] - 1 for row in all_rows]
    foreseen = [[by_name[name]["forecast_ms"] for name in (*_STATIC, "auto")] for by_name in ours.values()]
    said = (_OF_WHOLE_PLANS if is_whole else _OF_EQUAL_ENDS).format(
        **{name: _beside_best(ours, name) for name in ("auto", "tuned", _PLAN)},
        mean=f"{statistics.mean(map(abs, errors)):.1%}",
        predictions=len(errors),
        forecast=f"{min(errors):+.1%} to {max(errors):+.1%}",
        named=sum(each == 0 for each in lost),
        behind=max(lost),
        beaten=sum(min(static) < auto for *static, auto in foreseen),
        count=len(ours),
    )
    gained = [row for row in plans if row["gain_share"] >= 0.85]
    return said + _GOALS.format(
        gained=len(gained),
        limits=_limits(gained, plans),
        within=sum(row["over_bound"] <= 1.15 for row in plans),
        within_halo=sum(row["over_halo_bound"] <= 1.05 for row in plans),
        count=len(ours),
        since=_SINCE if all(row["machine"]["code"] in _OLD_SUMS for row in plans) else "",
    )


def _limits(some: Sequence[Row], plans: Sequence[Row]) -> str:
    """Which limits ``some`` have, unless all have some."""
    found = sorted({row["sms"] for row in some}, reverse=True)
    if not found or len(found) == len({row["sms"] for row in plans}):
        return ""
    named = [str(sms) for sms in found]
    words = " or ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
    return f", all with {words}\nmultiprocessors"


def _cases(rows: Iterable[Row], planner: str | None) -> dict[Case, dict[str, Row]]:
    """Rows by graph, model and limit, and by split, that of the plan among them."""
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        if "error" not in row:
            found.setdefault((row["graph"], row["model"], row["sms"]), {})[row["system"]] = row
    for by_name in found.values():
        could_be = ("auto",) if planner else (*_STATIC, "auto")
        by_name[_PLAN] = min((by_name[name] for name in could_be), key=lambda row: float(row["forecast_ms"]))
    return found


def _best(by_name: Mapping[str, Row], *others: str) -> float:
    return min(float(by_name[name]["median_ms"]) for name in (*_STATIC, *others))


def _table(cases: Mapping[Case, Mapping[str, Row]], is_whole: bool) -> str:
    """All cases; which split is the plan is said where that is not always ``auto``."""
    lines = []
    for (graph, model, sms), by_name in cases.items():
        auto, plan = by_name["auto"], by_name[_PLAN]
        columns = [f"{by_name[name]['median_ms']:.1f}" for name in (*_STATIC, "auto")]
        columns[-1] += f" ({auto['forecast_ms']:.1f})"
        columns.append(f"{by_name['tuned']['median_ms']:.1f}" if "tuned" in by_name else "")
        lines.append(
            [
                graph, model.upper(), str(sms), " / ".join(f"{ms:.1f}" for ms in auto["alone_ms"]), *columns,
                *([] if is_whole else ["=" if plan is auto else plan["system"]]),
                f"{_best(by_name) / plan['median_ms']:.2f}",
                f"{plan['over_bound']:.2f}", f"{plan['over_halo_bound']:.2f}", f"{plan['gain_share']:.0%}",
                " / ".join(f"{share:.0%}" for share in plan["waits"]),
            ]
        )  # fmt: skip
    head = ["graph", "model", "MPs", "T", *_STATIC, "auto", "tuned"]
    head += ["best / auto"] if is_whole else ["plan", "best / plan"]
    return markdown([*head, "over bound", "with halo", "gain", "waits"], lines)


def _beside_best(cases: Mapping[Case, Mapping[str, Row]], name: str) -> str:
    ratios = sorted(_best(each) / each[name]["median_ms"] for each in cases.values() if name in each)
    return (
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as fast, median {statistics.median(ratios):.2f} "
        f"({len(ratios)} cases)"
    )


def _forecast(cases: Mapping[Case, Mapping[str, Row]]) -> str:
    errors = [each["auto"]["forecast_ms"] / each["auto"]["median_ms"] - 1 for each in cases.values()]
    return f"{min(errors):+.1%} to {max(errors):+.1%}"


def _named(row: Row) -> str:
    """What was drawn, and the limit of the device."""
    return f"{row['case']}, {row['label']}" if row.get("label") else str(row["case"])


def steps_table(rows: Sequence[Row]) -> str:
    """A line for each step, and means."""
    rows = [row for row in rows if "error" not in row]
    parts = [f"{_STEPS}\n{_machines(rows)}."]
    for family, is_captured in dict.fromkeys((row["family"], row.get("is_captured")) for row in rows):
        here = [row for row in rows if row["family"] == family and row.get("is_captured") == is_captured]
        errors = [row["predicted_seconds"] / row["measured_seconds"] - 1 for row in here]
        memory = [row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1 for row in here]
        lines = [
            [
                _named(row), f"{row['sizes']['inner'] or row['sizes']['batch']:,}",
                *(f"{1e3 * row[f'{what}_seconds']:.2f}" for what in ("measured", "busy", "predicted")),
                f"{error:+.1%}", f"{held:+.1%}",
            ]
            for row, error, held in zip(here, errors, memory, strict=True)
        ]  # fmt: skip
        name = "GNN epochs" if family == "graph" else "Steps of samples"
        name += ", recorded as CUDA graphs" if is_captured else ", told operator by operator"
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
            splits_sections(read_rows(rows / "unequal"), read_rows(rows / "unequal_random_parts")),
            steps_table(read_rows(rows / "replay")),
        ]
    )


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
