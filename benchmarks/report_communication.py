"""Writes the tables of docs/communication-measured.md that stand between marks from the JSON rows of benchmarks.

    python benchmarks/report_communication.py

Rows are those of ``codec.py --speed cuda --out`` and ``gradient_sync.py --device cuda --out`` in
``benchmarks/rows/communication``, of ``links.py --json`` in ``links``, ``links_own_cores``, ``links_auto`` and
``links_auto_own_cores``, and of ``compression_accuracy.py --keep`` in ``accuracy``. Of rows that measure the same on
the same card the last one counts.
The text around the tables is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from codec import WORKS, rate_of
from compression_lines import runs_of
from compression_tables import cost_table, difference_table
from gradient_sync import WAYS
from harness import ROOT, markdown, read_rows
from link_tables import rows_by_model, said_of, step_table, verdict_table

Row = dict[str, Any]
KEPT = ROOT / "benchmarks" / "rows"
PAGE = ROOT / "docs" / "communication-measured.md"
IDENTITY = ("kind", "bits", "work", "bucket", "way", "link", "num_ranks", "num_hosts", "is_flat", "num_values")


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row for each measurement, in the order in which they first came; none that failed."""
    found = {(row["machine"]["card"], *(row.get(name) for name in IDENTITY)): row for row in rows}
    return [row for row in found.values() if "error" not in row]


def codec_tables(rows: list[Row]) -> str:
    """Bytes a second beside those of a copy, for each card."""
    tables = []
    of_kind = [row for row in rows if row["kind"] == "codec"]
    for card, num_values, bucket in dict.fromkeys(
        (row["machine"]["card"], row["num_values"], row["bucket"]) for row in of_kind
    ):
        here = {
            (row["bits"], row["work"]): row
            for row in of_kind
            if (row["machine"]["card"], row["num_values"], row["bucket"]) == (card, num_values, bucket)
        }
        lines = [
            [str(bits), *(_share(here.get((bits, work))) for work in WORKS)]
            for bits in sorted({bits for bits, _ in here}, reverse=True)
        ]
        copies = sorted({row["copy_bytes_per_second"] for row in here.values()})
        said = f"{card}, {num_values / 2**20:g} Mi values in buckets of {bucket:,}; a copy: "
        said += " to ".join(dict.fromkeys(f"{rate / 1e12:.2f}" for rate in (copies[0], copies[-1])))
        head = ["bits", "encoding, to nearest", "at random", "decoding"]
        tables.append(f"{said} TB/s; code: {_code(here.values())}.\n\n{markdown(head, lines)}")
    return "\n\n".join(tables)


def sync_tables(rows: list[Row]) -> str:
    """Milliseconds of a sum in each way, a line for each link, for each number of ranks and values."""
    tables = []
    of_kind = [row for row in rows if row["kind"] == "gradient_sync"]
    case = ("num_ranks", "num_hosts", "is_flat", "num_values")
    for card, *numbers in dict.fromkeys((row["machine"]["card"], *(row[name] for name in case)) for row in of_kind):
        here = {
            (row["link"], row["way"]): row
            for row in of_kind
            if (row["machine"]["card"], *(row[name] for name in case)) == (card, *numbers)
        }
        ways = [way for way in WAYS if any(way == other for _, other in here)]
        lines = [
            [link, *(_milliseconds(here.get((link, way))) for way in ways)]
            for link in dict.fromkeys(link for link, _ in here)
        ]
        num_ranks, num_hosts, is_flat, num_values = numbers
        said = f"{num_ranks} ranks, {card}, {num_values:,} values"
        said += f", on {num_hosts} hosts by name" + (", not by hosts" if is_flat else "") if num_hosts > 1 else ""
        tables.append(f"{said}; milliseconds; code: {_code(here.values())}.\n\n{markdown(['', *ways], lines)}")
    return "\n\n".join(tables)


def tables(folder: Path) -> dict[str, str]:
    """What stands between the marks of each name.

    Args:
        folder: Of the folders of rows.
    """
    rows = latest(read_rows(folder / "communication"))
    found = {"gradient_sync.py": sync_tables(rows), "codec.py": codec_tables(rows)}
    lines = read_rows(folder / "links")
    by_model = rows_by_model(lines)
    for (model, ranks), own in by_model.items():
        of_case = [line for line in lines if (line["model"], line["ranks"]) == (model, ranks)]
        head = f"torch {_code_of(of_case, 'torch')}; code: {_code_of(of_case, 'code')}."
        found[f"links.py {model} {ranks}"] = f"{head}\n\n{_markdown(step_table(own))}"
    found["links.py reached"] = _markdown(verdict_table(by_model))
    found["links.py crossings"] = _markdown(said_of(by_model))
    lines = read_rows(folder / "links_own_cores")
    head = f"torch {_code_of(lines, 'torch')}; code: {_code_of(lines, 'code')}."
    found["links.py reached, own cores"] = f"{head}\n\n{_markdown(verdict_table(rows_by_model(lines)))}"
    lines = read_rows(folder / "links_auto")
    for (model, ranks), own in rows_by_model(lines).items():
        of_case = [line for line in lines if (line["model"], line["ranks"]) == (model, ranks)]
        head = f"torch {_code_of(of_case, 'torch')}; code: {_code_of(of_case, 'code')}."
        found[f"links.py auto, {model} {ranks}"] = f"{head}\n\n{_markdown(step_table(own))}"
    lines = read_rows(folder / "links_auto_own_cores")
    head = f"torch {_code_of(lines, 'torch')}; code: {_code_of(lines, 'code')}."
    found["links.py auto, own cores"] = f"{head}\n\n{_markdown(verdict_table(rows_by_model(lines)))}"
    lines = read_rows(folder / "accuracy")
    runs = runs_of(lines)
    head = f"{len(runs)} runs; code: {_code_of(lines, 'code')}."
    found["compression_accuracy.py"] = f"{head}\n\n{_markdown(difference_table(runs))}"
    found["compression_accuracy.py costs"] = _markdown(cost_table(runs))
    return found


def page(text: str, made: Mapping[str, str]) -> str:
    """``text`` with what is between its marks made anew.

    Raises:
        ValueError: A mark is missing.
    """
    for name, table in made.items():
        marks = f"<!-- {name}: rows -->", f"<!-- {name}: end -->"
        pattern = f"{re.escape(marks[0])}.*?{re.escape(marks[1])}"
        text, count = re.subn(pattern, lambda _: f"{marks[0]}\n{table}\n{marks[1]}", text, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            raise ValueError(f"the page has {count} times the marks {marks[0]} and {marks[1]}, must have them once")
    return text


def _share(row: Row | None) -> str:
    return "-" if row is None else f"{rate_of(row) / row['copy_bytes_per_second']:.2f}"


def _milliseconds(row: Row | None) -> str:
    return "-" if row is None else f"{row['ms']:.{2 if row['ms'] < 10 else 1}f}"


def _code(rows: Iterable[Row]) -> str:
    return " and ".join(dict.fromkeys(str(row["machine"].get("code")) for row in rows))


def _code_of(lines: Iterable[Mapping[str, Any]], what: str) -> str:
    return " and ".join(dict.fromkeys(str(line[what]) for line in lines))


def _markdown(lines: list[list[str]]) -> str:
    return markdown(lines[0], lines[1:])


def main(given: list[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=KEPT, help="folder of the folders of rows")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args(given)
    made = tables(arguments.rows)
    arguments.page.write_text(page(arguments.page.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(f"{arguments.page}: {len(made)} tables")


if __name__ == "__main__":
    main()
