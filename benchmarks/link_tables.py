"""Tables of `links.py` in Markdown: milliseconds of each way at each rate, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from links import (
    MEASURED,
    PEER_WAYS,
    Row,
    below,
    communication_share,
    crossovers,
    interface_ratios,
)

GOALS = {"fp32": 5.0, "bf16": 2.8}
"""How many times faster 4 bits have to be where communication is at least `_MOSTLY` of a float32 step."""
_MOSTLY = 0.9
_BEHIND = 0.1
"""Part of the fastest way's time that ``auto`` may take longer."""

By = Mapping[tuple[str, int], Sequence[Row]]


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
        is_one = bool(sent) and way not in ("compute", "auto") and max(sent) < 1.05 * min(sent)
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
    auto, others = cell.get("auto"), [cell[way] for way in MEASURED if way in cell]
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
        ratios = interface_ratios([row for row in rows if row.way not in PEER_WAYS])
        line.append("-" if ratios is None else f"{ratios[0]:.3f} to {ratios[1]:.3f}")
        lines.append(line)
    return lines
