"""Tables of `links.py`, of a rate on the screen and in Markdown: milliseconds of each way, and what comes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from link_rows import Row, by_way, communication_share, crossovers, interface_ratios

MEASURED = ("fp32", "bf16", "8bit", "4bit", "int8", "int4", "int2", "int2+4bit")
"""The ways that ``auto`` is compared with; it gives gradients no fewer than 4 bits, and rows ``fp16`` for ``bf16``."""
GOALS = {"fp32": 5.0, "bf16": 2.8}
"""How many times faster 4 bits have to be where communication is at least `_MOSTLY` of a float32 step."""
_MOSTLY = 0.9
_BEHIND = 0.1
"""Part of the fastest way's time that ``auto`` may take longer."""

By = Mapping[tuple[str, int], Sequence[Row]]


# -- on the screen -----------------------------------------------------------------------------------------------------


def heading(about: Mapping[str, Any]) -> str:
    """Of a model on some ranks."""
    what = "halo rows of a rank at most" if about["about"] == "gnn" else "parameters"
    return f"{about['about']}, {about['size']:,.0f} {what}, {about['ranks']} ranks"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of one rate, at most 80 columns."""
    cell = {row.way: row for row in rows}
    exact, half = cell.get("fp32"), cell.get("bf16")
    said = "no limit" if rows[0].rate is None else f"{rows[0].rate:g} Gb/s"
    said += f" (a bare exchange: {rows[0].link_rate:.3g}), {rows[0].rounds} rounds"
    if (share := communication_share(cell)) is not None:
        said += f", {100 * share:.0f} % of fp32 is communication"
    yield said
    yield f"{'way':13}{'ms':>8}{'p20':>8}{'p80':>8}{'model':>8}{'fp32 /':>8}{'bf16 /':>8}{'MB sent':>9}"
    for row in rows:
        model = "-" if row.predicted_seconds is None else f"{1000 * row.predicted_seconds:.0f}"
        gain, gain_16 = (f"{other.seconds / row.seconds:.2f}" if other else "-" for other in (exact, half))
        yield (
            f"{row.way:13}{1000 * row.seconds:8.0f}{1000 * row.p20:8.0f}{1000 * row.p80:8.0f}{model:>8}"
            f"{gain:>8}{gain_16:>8}{row.sent_bytes / 1e6:9.2f}" + (f" {row.chosen}" if row.chosen else "")
        )


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What comes of the rows of a model on some ranks: crossovers, bytes, ``auto``."""
    for (short, exact), (measured, predicted) in crossovers(rows).items():
        yield f"{short} beats {exact} {below(measured)}; by the model, {below(predicted)}"
    if (ratios := interface_ratios(rows)) is not None:
        yield f"interfaces sent {ratios[0]:.3f} to {ratios[1]:.3f} times the bytes of the reports"
    cells = by_way(rows)
    for rate, row in cells.get("auto", {}).items():
        best = min(compared({way: cells[way][rate] for way in cells}), key=lambda other: other.seconds, default=row)
        yield (
            f"auto at {rate:g} Gb/s: {row.chosen}, {100 * (row.seconds / best.seconds - 1):+.0f} % "
            f"beside the fastest, {best.way}"
        )


def compared(cell: Mapping[str, Row]) -> list[Row]:
    """What ``auto`` is held against at one rate: ``int2`` rows with gradients of 4 bits, which cost no accuracy that
    shows, in place of those with gradients of 2, where both were measured.
    """
    left_out = "int2" if "int2+4bit" in cell else None
    return [cell[way] for way in MEASURED if way in cell and way != left_out]


def below(rate: float) -> str:
    """Of a rate below which something is so, in words."""
    return "at no rate" if rate == 0 else "at every rate" if math.isinf(rate) else f"below {rate:.2g} Gb/s"


# -- in Markdown -------------------------------------------------------------------------------------------------------


def rows_by_model(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], list[Row]]:
    """Rows of each model on each number of ranks; of rows that measure the same the last one counts."""
    names = [entry.name for entry in fields(Row)]
    found: dict[tuple[str, int], dict[tuple[str, float | None], Row]] = {}
    for line in lines:
        row = Row(**{name: line[name] for name in names})
        found.setdefault((row.model, row.ranks), {})[row.way, row.rate] = row
    return {case: list(rows.values()) for case, rows in sorted(found.items(), key=lambda item: item[0])}


def step_table(rows: Sequence[Row]) -> list[list[str]]:
    """A head, then a line for each way: bytes, and at each rate the median with the model's in brackets."""
    rates = sorted({row.rate for row in rows if row.rate is not None})
    ways = dict.fromkeys(row.way for row in rows)
    cell = {(row.way, row.rate): row for row in rows}
    lines = [["way", "MB sent", *(f"{rate:g} Gb/s" for rate in rates), "no limit"]]
    for way in ways:
        sent = [row.sent_bytes for row in rows if row.way == way and row.rate is not None]
        is_one = bool(sent) and way != "compute" and not way.startswith("auto") and max(sent) < 1.05 * min(sent)
        said = [f"{sent[0] / 1e6:.2f}" if is_one else ""]
        lines.append(
            [f"`{way}`", *said, *(_step(cell.get((way, rate))) for rate in rates), _step(cell.get((way, None)))]
        )
    return lines


def _step(row: Row | None) -> str:
    if row is None:
        return "-"
    said = f"{1000 * row.seconds:,.0f}"
    if row.rate is not None and row.predicted_seconds is not None and row.chosen is None:
        said += f" ({1000 * row.predicted_seconds:,.0f})"
    return said if row.chosen is None else f"{said} {_chosen(row)}"


def verdict_table(cases: By) -> list[list[str]]:
    """A line for each model, number of ranks and rate: 4 bits beside more, ``auto`` beside the fastest. What was to be
    reached and is not is bold.
    """
    lines = [
        ["", "ranks", "Gb/s", "of `fp32`, communication", "4 bits beside `fp32`", "beside `bf16`", "`auto` took",
         "beside the fastest"],
    ]  # fmt: skip
    for (model, ranks), rows in cases.items():
        for rate in sorted({row.rate for row in rows}, key=lambda rate: float("inf") if rate is None else rate):
            cell = {row.way: row for row in rows if row.rate == rate}
            share = communication_share(cell)
            line = [model, str(ranks), "-" if rate is None else f"{rate:g}", "-" if share is None else f"{share:.0%}"]
            short = cell.get("4bit", cell.get("int4"))
            for other, goal in GOALS.items():
                gain = cell[other].seconds / short.seconds if short is not None and other in cell else None
                is_missed = gain is not None and share is not None and share >= _MOSTLY and gain < goal
                line.append("-" if gain is None else _bold(f"{gain:.2f}", is_missed))
            line += auto_cells(cell)
            lines.append(line)
    return lines


def auto_cells(cell: Mapping[str, Row]) -> list[str]:
    """What it took, and how much longer a step is than that of the fastest of the ways it is measured against."""
    auto, others = cell.get("auto"), compared(cell)
    if auto is None or not others:
        return ["-", "-"]
    best = min(others, key=lambda row: row.seconds)
    behind = auto.seconds / best.seconds - 1
    return [_chosen(auto), _bold(f"{behind:+.0%}", behind > _BEHIND) + f", {best.way}"]


def _chosen(row: Row) -> str:
    """Of a graph for gradients and for most of the rows; older rows have words between."""
    return (row.chosen or "-").replace(", rows ", "+").replace("+", " + ")


def _bold(text: str, is_so: bool) -> str:
    return f"**{text}**" if is_so else text


def said_of(cases: By) -> list[list[str]]:
    """A line for each model and number of ranks: where 4 bits begin to win, measured and by the model; bytes."""
    lines = [["", "ranks", "4 bits beat `fp32` below, Gb/s", "by the model", "`bf16` below", "by the model",
              "the interfaces' bytes beside the reports'"]]  # fmt: skip
    for (model, ranks), rows in cases.items():
        found = crossovers(rows)
        line = [model, str(ranks)]
        for exact in GOALS:
            pair = next((both for (_, other), both in found.items() if other == exact), None)
            line += ["-", "-"] if pair is None else [below(rate).removeprefix("below ") for rate in pair]
        ratios = interface_ratios(rows)
        line.append("-" if ratios is None else f"{ratios[0]:.3f} to {ratios[1]:.3f}")
        lines.append(line)
    return lines
