"""How soon nuGNN answers: its help, its first epoch, its import and DGL's.

    python benchmarks/start_up.py                  # five rounds of each, in turn
    python benchmarks/start_up.py --rounds 15 --only help

Every measurement is a fresh process. Commands count from the start of the process: to its end, or to the line that
shows the first epoch; imports count inside of it, without the interpreter's own start. A first round is not counted: it
compiles kernels and byte code. A row has the median, the 20th and 80th percentile and the largest, all in seconds. The
exit code is 1 when a median is above its limit; on a machine that does other work too that says little, so the load is
printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

_NUGNN = (sys.executable, "-m", "nugnn")


@dataclass(frozen=True)
class Measurement:
    """What is timed.

    Args:
        name: For ``--only``.
        what: In words.
        seconds: Takes one measurement.
        limit_seconds: Of the median; None without one.
    """

    name: str
    what: str
    seconds: Callable[[], float]
    limit_seconds: float | None = None


def seconds_of_help() -> float:
    begin = time.perf_counter()
    subprocess.run([*_NUGNN, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def seconds_to_first_epoch(*options: str) -> float:
    """From the start of ``nugnn train --dataset digits`` to the line that shows epoch 1.

    Raises:
        RuntimeError: The run failed, or showed no epoch.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*_NUGNN, "train", "--dataset", "digits", "--epochs", "1", "--out", folder, *options]
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            seconds = None
            for line in process.stdout:
                if seconds is None and line.startswith("epoch 1/1 "):
                    seconds = time.perf_counter() - begin
        if process.returncode or seconds is None:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} and epoch 1 not shown")
    return seconds


def seconds_of_import(statement: str, before: str = "pass") -> float:
    """Of ``statement`` in a fresh interpreter, after ``before``."""
    code = (
        f"import time\n{before}\nbegin = time.perf_counter()\n{statement}\n"
        "print('seconds', time.perf_counter() - begin)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return float(run.stdout.split()[-1])


MEASUREMENTS = (
    Measurement("help", "nugnn --help", seconds_of_help, 0.5),
    Measurement("train", "nugnn train --dataset digits, to the first epoch", seconds_to_first_epoch, 8.0),
    Measurement("workers", "the same with --workers 2", lambda: seconds_to_first_epoch("--workers", "2")),
    Measurement("nugnn", "import nugnn", lambda: seconds_of_import("import nugnn")),
    Measurement("dgl", "import dgl, after import nugnn", lambda: seconds_of_import("import dgl", "import nugnn")),
)


def row_of(measurement: Measurement, seconds: list[float]) -> tuple[str, bool]:
    """One line of the table, and whether the median keeps the limit."""
    median = statistics.median(seconds)
    p20, p80 = _percentile(seconds, 0.2), _percentile(seconds, 0.8)
    limit = measurement.limit_seconds
    shown = "" if limit is None else f"{limit:.1f}"
    text = f"{measurement.what:<52}{median:>8.3f}{p20:>8.3f}{p80:>8.3f}{max(seconds):>8.3f}{shown:>7}"
    return text, limit is None or median <= limit


def _percentile(values: list[float], part: float) -> float:
    """By linear interpolation between the sorted values."""
    ordered, place = sorted(values), part * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _surroundings() -> str:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "dgl"))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"commit {commit.stdout.strip() or 'unknown'}; python {platform.python_version()}, {versions}; "
        f"{os.cpu_count()} cores, load {load}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--only", choices=[each.name for each in MEASUREMENTS], action="append", help="may be repeated")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds has to be at least 1")
    chosen = [each for each in MEASUREMENTS if options.only is None or each.name in options.only]
    taken: dict[str, list[float]] = {each.name: [] for each in chosen}
    print(_surroundings(), flush=True)
    for number in range(options.rounds + 1):
        for each in chosen:
            seconds = each.seconds()
            if number:
                taken[each.name].append(seconds)
    print(f"{'':<52}{'median':>8}{'p20':>8}{'p80':>8}{'max':>8}{'limit':>7}")
    rows = [row_of(each, taken[each.name]) for each in chosen]
    for text, _ in rows:
        print(text)
    return 0 if all(is_kept for _, is_kept in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
