"""Tables of `compression_accuracy.py`: one of each data set on the screen, two in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compression_cases import BASELINE, ROWS, TARGETS
from paired_runs import (
    GOAL,
    PART_OF_BASELINE,
    Interval,
    Pair,
    Runs,
    beside_baseline,
    check_pairs,
    pairs_of,
    points_between,
    time_to_accuracy,
    timed_alike,
)
from rich import box
from rich.console import Console
from rich.table import Table

TRAVELLED = ("halo_bytes", "gradient_bytes")
HEADER = ("", "seeds", "test %", "difference [95 %]", f"±{GOAL:g}", "epochs", "s", "halo MB", "grad. MB")


def cells(runs: Runs, row: str, column: str) -> list[str] | None:
    """A line of a row's table."""
    pairs = pairs_of(runs, row, column)
    if not pairs:
        return None
    tests = [100 * run["test"] for _, run in pairs]
    spread = f" ± {statistics.stdev(tests):.1f}" if len(tests) > 1 else ""
    interval = points_between(pairs)
    epochs, seconds, never = time_to_accuracy(pairs)
    halo, gradients = megabytes_of(pairs)
    is_plain = column == BASELINE
    return [
        column,
        str(len(pairs)),
        f"{statistics.fmean(tests):.1f}{spread}",
        "" if is_plain else str(interval),
        "" if is_plain else interval.verdict,
        ("never" if epochs == math.inf else f"{epochs:g}")
        + (f" ({never} never)" if 0 < never and epochs < math.inf else ""),
        _or_dash(seconds, ".2g"),
        halo or "-",
        gradients,
    ]


def about(runs: Runs, row: str) -> str:
    """The title of a row's table."""
    first = next(run for (name, _, _), run in runs.items() if name == row)
    parts = first["part"]
    if "nodes" in parts[0]:
        nodes = [part["nodes"] for part in parts]
        halo = sum(part["halo_rows"] for part in parts) / sum(nodes)
        how = f"{' + '.join(f'{n:,}' for n in nodes)} nodes, halo rows {100 * halo:.0f} % of them"
    else:
        how = f"{' + '.join(str(part['batch_samples']) for part in parts)} samples of a batch"
    return f"{ROWS[row].title}: {how}; {_num_epochs(first)} epochs"


def _num_epochs(run: Mapping[str, Any]) -> int:
    return int(run["num_epochs"] if "num_epochs" in run else run["at"][-1])


def tables(runs: Runs) -> Iterator[tuple[str, list[list[str]]]]:
    """Title and lines of each row that has some."""
    for name, row in ROWS.items():
        lines = [line for column in row.columns if (line := cells(runs, name, column)) is not None]
        if lines:
            yield about(runs, name), lines


def difference_table(runs: Runs) -> list[list[str]]:
    """A head, then a line for each data set and column: seeds, accuracy, and its paired difference."""
    lines = [["", "", "seeds", "test, %", "difference in points (95 %)", f"within {GOAL:g}"]]
    for name, row in ROWS.items():
        for column in row.columns:
            if not (pairs := pairs_of(runs, name, column)):
                continue
            title = row.title if column == BASELINE else ""
            mean = f"{statistics.fmean(100 * run['test'] for _, run in pairs):.1f}"
            interval = points_between(pairs)
            verdict = {"within": "yes", "beyond": "**no**", "open": "not shown"}[interval.verdict]
            said = ["", ""] if column == BASELINE else [_in_markdown(interval), verdict]
            lines.append([title, column, str(len(pairs)), mean, *said])
    return lines


def _in_markdown(interval: Interval) -> str:
    return str(interval).replace("[", "(").replace("]", ")").replace(", ", " to ")


def cost_table(runs: Runs) -> list[list[str]]:
    """A head, then a line for each data set and column: time to an accuracy, and what travelled in a run."""
    beside = f"of {BASELINE}'s"
    epochs_to = f"epochs to {PART_OF_BASELINE:.0%}"
    lines = [["", "", "seeds", epochs_to, beside, "never", "seconds", beside, "halo rows, MB", "gradients, MB"]]
    for name, row in ROWS.items():
        for column in row.columns:
            if not (pairs := pairs_of(runs, name, column)):
                continue
            epochs, _, never = time_to_accuracy(pairs)
            timed = timed_alike(pairs)
            _, seconds, _ = time_to_accuracy(timed)
            both = beside_baseline(pairs)[0], beside_baseline(timed)[1]
            ratios = ["" if column == BASELINE else _or_dash(ratio, ".2f") for ratio in both]
            title = about(runs, name) if column == BASELINE else ""
            line = [title, column, str(len(pairs)), _or_dash(epochs, "g"), ratios[0], str(never or "")]
            lines.append([*line, _or_dash(seconds, ".2g"), ratios[1], *megabytes_of(pairs)])
    return lines


def _or_dash(value: float, how: str) -> str:
    return "-" if value == math.inf else format(value, how)


def megabytes_of(pairs: Sequence[Pair]) -> tuple[str, str]:
    """Of a run's halo rows and gradients: to three digits, or whole; nothing where nothing travelled."""
    halo, gradients = (_megabytes(statistics.fmean(run[what] for _, run in pairs) / 1e6) for what in TRAVELLED)
    return halo, gradients


def _megabytes(value: float) -> str:
    return "" if value == 0 else format(value, ",.0f" if value >= 100 else ".3g")


def targets(runs: Runs) -> list[str]:
    """A sentence for each target and row."""
    said = []
    for column in TARGETS:
        for name, row in ROWS.items():
            if column not in row.columns or not (pairs := pairs_of(runs, name, column)):
                continue
            found = points_between(pairs)
            said.append(
                f"{column}, {row.title}: {found} points over {found.num_pairs} seeds, {found.verdict} ±{GOAL:g}"
            )
    return said


NOTE = f"""\
Test accuracy at the best validation epoch. Epochs, and seconds of training in them: medians until
{PART_OF_BASELINE:.0%} of the validation accuracy that the same seed's fp32 run ended with. MB: of a run, both workers
together. Seconds are of processes that share a machine with many others, and talk through its loopback interface; of
seeds that were run as the first one was, one at a time or several."""


def show(runs: Runs) -> None:
    """Print all tables."""
    check_pairs(runs)
    console = Console(width=120, highlight=False)
    for title, lines in tables(runs):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, name in enumerate(HEADER):
            table.add_column(name, no_wrap=True, justify="left" if place == 0 else "right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(NOTE)
    for line in targets(runs):
        console.print(line)
