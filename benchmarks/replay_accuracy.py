r"""Training steps predicted from measured operators, held against training steps: seconds and peak memory.

    python benchmarks/replay_accuracy.py --rows rows/replay.jsonl               # CPU: random graphs, and samples
    python benchmarks/replay_accuracy.py --graph cora --data-dir DATA            # a real graph
    python benchmarks/replay_accuracy.py --device cuda --graph products-like:600000 --precisions fp32,bf16 \
        --limits sms=32 --rows rows/replay.jsonl

Configurations (model, widths, layers, precision) and the sizes that are predicted are drawn by a seed before anything
is measured; all are reported. Of each configuration the operators are timed inside steps at a ladder of sizes
(`nugnn.timed_place`); its steps at other sizes are trained as ever, on a CPU in turns with the ladder's, and
predicted. Errors come without any correction, and with the one factor of all other configurations (leave one out).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from harness import Recorder, brief, free_memory
from replay_cases import Case, RealGraph, Setting, Sizes, at, drawn, graph_setting, sample_setting

from nugnn.limited import apply_limits
from nugnn.measured_memory import peak_of_step
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.lone_step import alone_seconds
from nugnn.planning.measure_operators import Now
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.step_laps import StepLaps
from nugnn.planning.times_of_steps import times_of
from nugnn.timed_place import Place, laps_one_by_one, time_in_turns
from nugnn.traced_step import run_steps, sizes_of

T = TypeVar("T")
_IN_A_ROW = 24
"""Steps of a GPU at a place that is predicted, timed as one: nobody waits for the last kernel of each in training."""

# -- seconds -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured for a case.

    Args:
        table: Of its operators.
        ladder: What the table was made from.
        seconds: Of steps at the test sizes.
        are_captured: Whether these ran as CUDA graphs.
    """

    table: MeasuredTimes
    ladder: Sequence[tuple[PartSizes, StepLaps]]
    seconds: Sequence[float]
    are_captured: Sequence[bool]


def ladder_rows(ladder: Sequence[tuple[PartSizes, StepLaps]]) -> list[dict[str, Any]]:
    """Of each place: its operators' laps as they came, whole steps, and the host's part of these."""
    return [
        {
            "sizes": dataclasses.asdict(sizes),
            "laps_seconds": sum(laps.median_laps),
            "step_seconds": laps.median_seconds,
            "host_seconds": statistics.median(laps.host_seconds),
            "least_host_seconds": min(laps.host_seconds),
        }
        for sizes, laps in ladder
    ]


def place_of(setting: Setting, each: Any, now: Now, in_a_row: int = 4, **options: Any) -> Place:
    """Where a setting's steps are timed; ``options`` of its trainer."""
    sizes = each if isinstance(each, PartSizes) else sizes_of(each)
    return Place(setting.trainer(each, **options), sizes, now, in_a_row)


def laps_of_ladder(
    setting: Setting, rounds: int, now: Now, look: Callable[[Place], T]
) -> tuple[list[tuple[PartSizes, StepLaps]], list[T]]:
    """Of a setting's ladder on a GPU, as `laps_one_by_one`."""

    def make(each: Any) -> Place:
        free_memory()
        return place_of(setting, each, now, cuda_graphs="off")

    found = laps_one_by_one([functools.partial(make, each) for each in setting.ladder], look, rounds=(rounds, rounds))
    free_memory()
    return found


def steps_one_by_one(setting: Setting, rounds: int, now: Now, **options: Any) -> tuple[list[float], list[bool]]:
    """Seconds of a step at a setting's tests on a GPU, and whether they ran as CUDA graphs; ``options`` of trainers."""
    seconds, are_captured = [], []
    for each in setting.tests:
        one = place_of(setting, each, now, _IN_A_ROW, **options)
        for _ in range(2):  # steps are recorded from the fourth on
            one.time_whole()
        warm = len(one.laps.seconds)
        for _ in range(rounds):
            one.time_whole()
        seconds.append(statistics.median(one.laps.seconds[warm:]))
        are_captured.append(one.trainer.num_recorded > 0)
        del one
        free_memory()
    return seconds, are_captured


def measured(setting: Setting, rounds: int, now: Now, label: str) -> Measured:
    if setting.trace.device == "cpu":
        timed, plain = (
            [place_of(setting, each, now) for each in each_of] for each_of in (setting.ladder, setting.tests)
        )
        time_in_turns(timed, plain, rounds=(rounds, rounds))
        found = [(p.sizes, p.laps) for p in timed]
        table = times_of(setting.trace, found, timed[0].device, limits=label)
        return Measured(table, found, [p.laps.median_seconds for p in plain], [False] * len(plain))
    found, peaks = laps_of_ladder(
        setting, rounds, now, lambda one: peak_of_step(one.trainer, setting.trace.at(one.sizes))
    )
    smallest = place_of(setting, setting.ladder[0], now)
    device, captured = smallest.device, smallest.captured_host_seconds()
    del smallest
    free_memory()
    seconds, are_captured = steps_one_by_one(setting, rounds, now)
    table = times_of(setting.trace, found, device, limits=label, captured_seconds=captured, peaks=peaks)
    return Measured(table, found, seconds, are_captured)


# -- memory ------------------------------------------------------------------------------------------------------------


def peaks(setting: Setting, place: Any, table: MeasuredTimes) -> tuple[int, int]:
    """Bytes at the peak of a step: predicted, and by torch's allocator."""
    trace = at(setting, place)
    trainer = setting.trainer(place, cuda_graphs="off")
    run_steps(trainer, 2)
    by_trace = trace.peak_bytes()
    return by_trace if table.peaks is None else table.peaks.bytes(by_trace), peak_of_step(trainer, trace)


# -- rows --------------------------------------------------------------------------------------------------------------


def run(case: Case, setting: Setting, options: argparse.Namespace, recorder: Recorder) -> None:
    """Measure and predict one case."""
    now = time.thread_time if options.clock == "thread" else time.perf_counter
    found = measured(setting, options.rounds, now, options.label)
    table = found.table
    for place, taken, is_captured in zip(setting.tests, found.seconds, found.are_captured, strict=True):
        trace = at(setting, place)
        sizes = place if isinstance(place, PartSizes) else sizes_of(place)
        predicted = alone_seconds(trace, table, is_captured=is_captured)
        row: dict[str, Any] = {"kind": "step", "label": options.label, "graph": options.graph, "case": case.name}
        row |= {"family": case.family, "precision": case.precision, "seed": options.seed, "clock": options.clock}
        row |= {"sizes": dataclasses.asdict(sizes), "measured_seconds": taken, "predicted_seconds": predicted}
        row |= {"is_captured": is_captured, "launch_seconds": table.launch_seconds}
        row |= {"busy_seconds": sum(table.seconds(o, trace.storages) for o in trace.operators)}
        row |= {"ladder": ladder_rows(found.ladder)}
        if not options.no_memory:
            row["predicted_peak_bytes"], row["measured_peak_bytes"] = peaks(setting, place, table)
            row["traced_peak_bytes"] = trace.peak_bytes()
        recorder.add(row)


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case'][:48]:48} {row['error']}"
    error = row["predicted_seconds"] / row["measured_seconds"] - 1
    sizes = row["sizes"]
    text = f"{row['case'][:44]:44} {sizes['inner'] or sizes['batch']:8}"
    text += f" {1e3 * row['measured_seconds']:9.3f} ms {error:+6.1%}"
    if "measured_peak_bytes" in row:
        text += f"  memory {row['predicted_peak_bytes'] / row['measured_peak_bytes'] - 1:+6.1%}"
    return text + ("  graph" if row["is_captured"] else "")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Mean absolute errors of rows that have figures: as predicted, and by the factor of the other configurations."""
    found = []
    for family in ("graph", "samples"):
        own = [row for row in rows if row.get("family") == family and "error" not in row]
        if not own:
            continue
        ratios: dict[str, list[float]] = {}
        for row in own:
            ratios.setdefault(row["case"], []).append(row["measured_seconds"] / row["predicted_seconds"])
        errors = [abs(1 / ratio - 1) for each in ratios.values() for ratio in each]
        corrected = []
        for case, each in ratios.items():
            others = [ratio for name, list_ in ratios.items() if name != case for ratio in list_] or [1.0]
            corrected += [abs(statistics.median(others) / ratio - 1) for ratio in each]
        text = f"{family}: {len(ratios)} configurations, {len(errors)} steps: mean absolute error "
        text += f"{statistics.fmean(errors):.1%} (largest {max(errors):.1%}), "
        text += f"{statistics.fmean(corrected):.1%} with the factor of the others"
        if "measured_peak_bytes" in own[0]:
            memory = [abs(row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1) for row in own]
            text += f"; peak memory {statistics.fmean(memory):.2%} (largest {max(memory):.2%})"
        found.append(text)
    return "\n".join(found)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--family", default="graph,samples", help="graph, samples, or both with a comma between")
    parser.add_argument("--count", type=int, default=12, help="configurations of each family")
    parser.add_argument("--tests", type=int, default=2, help="sizes that are predicted of each")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps at each place")
    parser.add_argument("--graph", default="random", help="random, or what nugnn train --dataset takes")
    parser.add_argument("--data-dir")
    parser.add_argument("--parts", type=int, default=1, help="that share the graph; the first one's step is timed")
    parser.add_argument("--nodes", type=int, default=20_000, help="of a random graph, at most")
    parser.add_argument("--edges", type=int, default=200_000, help="likewise")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="factor on the batches")
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", default="wall", choices=("wall", "thread"), help="thread: seconds that one worked")
    parser.add_argument("--limits", default="none", help="of the device, as sms=32 or threads=1")
    parser.add_argument("--label", default="", help="for the rows; the limits unless given")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args(arguments)
    limits = DeviceLimits.parse(options.limits)
    if not limits.is_none:
        apply_limits(limits, torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu"))
        options.label = options.label or str(limits)
    recorder = Recorder(options.rows, torch.device(options.device), line)
    batch = {"mlp": 2048, "cnn": 256, "transformer": 128}
    sizes = Sizes(
        options.nodes, options.edges, options.parts, options.tests, options.graph == "random",
        {kind: int(n * options.batch_scale) for kind, n in batch.items()},
    )  # fmt: skip
    cases = drawn(options.count, options.seed, options.family.split(","), options.precisions.split(","), sizes)
    has_graphs = any(case.family == "graph" for case in cases)
    real = None
    if has_graphs and not sizes.is_random:
        real = RealGraph(options.graph, options.data_dir, options.parts, options.device)
    for case in cases:
        try:
            if case.family == "graph":
                setting = graph_setting(case, options.device, options.parts, real)
            else:
                setting = sample_setting(case, options.device)
            run(case, setting, options, recorder)
        except Exception as error:  # a configuration that cannot run is a row, too
            recorder.add({"kind": "step", "case": case.name, "family": case.family, "error": brief(error)})
        free_memory()
    print(summary(recorder.rows))
    return recorder.rows


if __name__ == "__main__":
    main()
