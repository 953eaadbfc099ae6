r"""Steps in which operators compute in formats of their own, predicted from steps in one format, held against training.

    OMP_NUM_THREADS=1 python benchmarks/replay_mixed.py --clock thread --rows rows/cpu.jsonl    # 3 minutes
    python benchmarks/replay_mixed.py --device cuda --batch-scale 8 --rounds 4 --budget 60 --rows rows/h200.jsonl
    python benchmarks/replay_mixed.py --report rows/cpu.jsonl        # a table of kept rows

Configurations (model, widths, layers; float32 or bfloat16 for each linear layer and convolution) and the sizes that are
predicted are drawn by a seed before anything is measured; all are reported. Operators are timed inside steps of the
same model with all of them in float32, and all in bfloat16 (`nugnn.timed_place`); casts that neither makes are timed
by themselves. On a GPU, so are the bytes that each takes while it runs (`inside_bytes.py`). The mixed step is trained
(`mixed_steps.py`) and never looked into. It is predicted with the
neighbourhood rule of `nugnn.planning.casts.with_formats`, which is how it runs, and without: then whatever has no
format of its own computes in float32. A configuration whose step makes other casts than predicted with the rule has no
figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Recorder, brief, free_memory, markdown, read_rows
from inside_bytes import bytes_inside, table_of, with_bytes_inside
from mixed_steps import Mixed, casts_of, drawn_formats, is_cast, names_of, without_the_rule
from replay_accuracy import ladder_rows, laps_of_ladder, place_of, steps_one_by_one
from replay_cases import NUM_CLASSES, Case, Setting, Sizes, at, drawn, sample_model, sample_setting

from nugnn.measured_memory import peak_of_step
from nugnn.planning.casts import with_formats
from nugnn.planning.lone_step import alone_seconds
from nugnn.planning.measure_casts import measure_casts
from nugnn.planning.measure_operators import Now
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.step_laps import StepLaps
from nugnn.planning.timed_operators import TimedOperator
from nugnn.planning.times_of_steps import times_of
from nugnn.planning.trace import StepTrace
from nugnn.timed_place import time_in_turns
from nugnn.traced_step import run_steps, sample_trainer, trace_sample_step

_BATCH = {"mlp": 2048, "cnn": 32, "transformer": 64}
_WIDEST_ON_CPU = {"transformer": 64, "cnn": 64}
"""In wider transformers, dropout of bfloat16 takes other memory at other sizes, and steps are not traced; wider
convolutions take seconds."""
_DRAWS = 4
"""For each configuration: some are there already."""
_SECONDS_OF_CASTS, _MOST_VALUES_CAST = 1.0, 1 << 24
_COLUMNS = [
    (what, which, digits) for what, digits in (("seconds", 1), ("peak bytes", 2)) for which in ("with", "without")
]
"""What is in error, predicted with the rule or without, and digits of the percentage."""
_Ladder = list[tuple[PartSizes, StepLaps]]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A configuration, and the formats of its operators."""

    case: Case
    formats: dict[str, str]
    num_operators: int

    @property
    def name(self) -> str:
        return f"{self.case.name.rpartition(' ')[0]} {len(self.formats)}/{self.num_operators} in bf16"


def configurations(
    count: int, seed: int, tests: int, scale: float, device: str, batch: Mapping[str, int] = _BATCH
) -> list[Drawn]:
    """The first ``count`` of those that follow from the seed; ``scale`` of their batches changes nothing else."""
    sizes = Sizes(0, 0, 1, tests, False, {kind: int(n * scale) for kind, n in batch.items()})
    draw = random.Random(seed)
    found: list[Drawn] = []
    for case in drawn(_DRAWS * count, seed, ["samples"], ["fp32"], sizes):
        if len(found) == count:
            break
        options = dict(case.options)
        if case.kind == "mlp":
            options["norm"] = draw.choice(("none", "batch"))
        if case.kind in _WIDEST_ON_CPU and device == "cpu":
            options = {key: _at_most(_WIDEST_ON_CPU[case.kind], value) for key, value in options.items()}
        case = dataclasses.replace(case, options=options)
        model, _ = sample_model(case)
        one = Drawn(case, drawn_formats(model, draw), len(names_of(model)))
        if (one.name, one.formats) not in [(each.name, each.formats) for each in found]:
            found.append(one)
    return found


def _at_most(width: int, value: int | tuple[int, int]) -> int | tuple[int, int]:
    return min(value, width) if isinstance(value, int) else (min(value[0], width // 2), min(value[1], width))


@dataclasses.dataclass(frozen=True)
class MixedStep:
    """A step in one format and in the other, as it trains mixed and is predicted with the rule, and without it."""

    single: Setting
    half: Setting
    mixed: Setting
    without: StepTrace


def settings_of(drawn_one: Drawn, device: str, ranks: int = 1) -> MixedStep:
    """Where the trainers of a configuration come from.

    Raises:
        ValueError: The mixed step makes other casts than are predicted with the rule.
    """
    plain = sample_setting(drawn_one.case, device, ranks)
    how: dict[str, Any] = {"num_classes": NUM_CLASSES, "device": device, "precision": "fp32", "ranks": ranks}

    def with_trainer(formats: dict[str, str], trace: StepTrace | None) -> Setting:
        model = Mixed(plain.model, formats)
        trace = trace or trace_sample_step(model, plain.sample, **how)
        make = functools.partial(sample_trainer, model, plain.sample, **how)
        return dataclasses.replace(plain, model=model, trace=trace, trainer=make)

    single = with_trainer({}, None)
    half = with_trainer(dict.fromkeys(names_of(plain.model), "bfloat16"), None)
    named = {f"model.{name}": dtype for name, dtype in drawn_one.formats.items()}  # as `Mixed` has it
    mixed = with_trainer(drawn_one.formats, with_formats(single.trace, named))
    recorded = trace_sample_step(mixed.model, plain.sample, **how)
    for place in plain.tests:
        ran, said = (casts_of(trace.at(place)) for trace in (recorded, mixed.trace))
        if ran != said:
            raise ValueError(f"the step makes other casts than predicted: {ran - said}, and not {said - ran}")
    without = with_formats(single.trace, without_the_rule(single.trace, named))
    return MixedStep(single, half, mixed, without)


@dataclasses.dataclass(frozen=True)
class _Found:
    """What was measured of a configuration.

    Args:
        table: Of operators, in both formats.
        inside: Bytes that they take while they run; None on a CPU.
        ladders: Laps in float32 and in bfloat16.
        seconds: Of mixed steps.
        are_captured: Whether these ran as CUDA graphs.
    """

    table: MeasuredTimes
    inside: MeasuredTimes | None
    ladders: Sequence[_Ladder]
    seconds: Sequence[float]
    are_captured: Sequence[bool]


def _measured(step: MixedStep, rounds: int, now: Now, device: torch.device) -> _Found:
    both = (step.single, step.half)
    if step.mixed.trace.device == "cuda":
        return _measured_on_gpu(step, rounds, now, device)
    timed = [[place_of(setting, each, now) for each in setting.ladder] for setting in both]
    places = [place_of(step.mixed, each, now) for each in step.mixed.tests]
    time_in_turns([*timed[0], *timed[1]], places, rounds=(rounds, rounds))
    ladders = [[(place.sizes, place.laps) for place in each] for each in timed]
    tables = [times_of(setting.trace, each, device) for setting, each in zip(both, ladders, strict=True)]
    seconds = [place.laps.median_seconds for place in places]
    return _Found(tables[0].joined(tables[1:]), None, ladders, seconds, [False] * len(places))


def _measured_on_gpu(step: MixedStep, rounds: int, now: Now, device: torch.device) -> _Found:
    both = (step.single, step.half)
    ladders, inside = [], []
    for setting in both:
        ladder, bytes_of = laps_of_ladder(setting, rounds, now, lambda one: bytes_inside(one.trainer))
        ladders.append(ladder)
        inside.append([(sizes, each) for (sizes, _), each in zip(ladder, bytes_of, strict=True)])
    try:
        smallest = place_of(step.single, step.single.ladder[0], now, cuda_graphs="on")
        captured = smallest.captured_host_seconds()
        del smallest
        free_memory()
        seconds, are_captured = steps_one_by_one(step.mixed, rounds, now, cuda_graphs="on")
    except ValueError as error:  # steps that cannot be recorded, which may be told before the first one
        print(error)
        captured = None
        seconds, are_captured = steps_one_by_one(step.mixed, rounds, now, cuda_graphs="off")
    tables = [
        times_of(setting.trace, ladder, device, captured_seconds=captured)
        for setting, ladder in zip(both, ladders, strict=True)
    ]
    table = tables[0].joined(tables[1:])
    of_bytes = table_of([setting.trace for setting in both], inside, table)
    return _Found(table, of_bytes, ladders, seconds, are_captured)


def run(drawn_one: Drawn, casts: Sequence[TimedOperator], options: argparse.Namespace, out: Recorder) -> None:
    """Measure and predict one configuration."""
    now = time.thread_time if options.clock == "thread" else time.perf_counter
    step = settings_of(drawn_one, options.device)
    found = _measured(step, options.rounds, now, torch.device(options.device, 0))
    table = found.table.with_operators([*found.table.operators, *casts])
    for place, taken, is_captured in zip(step.mixed.tests, found.seconds, found.are_captured, strict=True):
        row: dict[str, Any] = {"kind": "mixed step", "case": drawn_one.name, "model": drawn_one.case.kind}
        row |= {"formats": drawn_one.formats, "seed": options.seed, "clock": options.clock}
        row |= {"sizes": dataclasses.asdict(place), "is_captured": is_captured, "measured_seconds": taken}
        traces = {"with": at(step.mixed, place), "without": step.without.at(place)}
        traces |= {"fp32": at(step.single, place), "bf16": at(step.half, place)}
        for which, trace in traces.items():
            row[f"{which}_seconds"] = alone_seconds(trace, table, is_captured=is_captured)
            whole = trace if found.inside is None else with_bytes_inside(trace, found.inside)
            row[f"{which}_peak_bytes"], row[f"{which}_traced_bytes"] = whole.peak_bytes(), trace.peak_bytes()
            row[f"{which}_casts"] = sum(casts_of(trace).values())
            row[f"{which}_cast_bytes"] = sum(each[-1] * count for each, count in casts_of(trace).items())
        row["cast_seconds"] = _seconds_of_casts(traces["with"], table)
        row["fallbacks"] = table.fallbacks(traces["with"])
        row["launch_seconds"], row["captured_launch_seconds"] = table.launch_seconds, table.captured_launch_seconds
        row["ladders"] = dict(zip(("fp32", "bf16"), map(ladder_rows, found.ladders), strict=True))
        if not options.no_memory:
            trainer = step.mixed.trainer(place, cuda_graphs="off")
            run_steps(trainer, 2)
            row["measured_peak_bytes"] = peak_of_step(trainer, traces["with"])
        out.add(row)


def _seconds_of_casts(trace: StepTrace, table: MeasuredTimes) -> float:
    """Of all casts in the step that is predicted with the rule."""
    return sum(table.seconds(record, trace.storages) for record in trace.operators if is_cast(record))


def errors(rows: Sequence[dict[str, Any]], which: str, what: str = "seconds") -> list[float]:
    """Predicted over measured, less one, of each row that has figures.

    Args:
        rows: Of this script.
        which: ``with`` or ``without`` the rule; ``fp32`` for the step without formats.
        what: ``seconds`` or ``peak_bytes``.
    """
    own = [row for row in rows if "error" not in row and f"measured_{what}" in row]
    return [row[f"{which}_{what}"] / row[f"measured_{what}"] - 1 for row in own]


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case'][:48]:48} {row['error']}"
    text = f"{row['case'][:52]:52} {row['sizes']['batch']:6} {1e3 * row['measured_seconds']:8.2f} ms"
    for what in ("seconds", "peak_bytes"):
        for which in ("with", "without"):
            text += "".join(f" {error:+6.1%}" for error in errors([row], which, what))
    return text + ("  graph" if row["is_captured"] else "")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Mean absolute errors and the largest one by model and of all, in Markdown; what has no figures is counted."""
    head = ["model", "configurations", "steps", "without figures", *(f"{what}, {which}" for what, which, _ in _COLUMNS)]
    lines = []
    for kind in (*sorted({row["model"] for row in rows}), "all"):
        own = [row for row in rows if kind in (row["model"], "all")]
        good = [row for row in own if "error" not in row]
        cells = [kind, str(len({(row.get("seed"), row["case"], str(row["formats"])) for row in good})), str(len(good))]
        cells.append(str(len(own) - len(good)))
        for what, which, digits in _COLUMNS:
            each = [abs(error) for error in errors(good, which, what.replace(" ", "_"))]
            said = f"{statistics.fmean(each):.{digits}%}, {max(each):.{digits}%}" if each else "-"
            cells.append(said.replace("%", " %"))
        lines.append(cells)
    return markdown(head, lines)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--count", type=int, default=12, help="configurations")
    parser.add_argument("--begin", type=int, default=0, help="leave out so many before them, which another run has")
    parser.add_argument("--tests", type=int, default=2, help="sizes that are predicted of each")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps at each place")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="factor on the batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", default="wall", choices=("wall", "thread"), help="thread: seconds that one worked")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--report", type=Path, help="rows to print the table of; nothing is measured")
    options = parser.parse_args(arguments)
    if options.report is not None:
        rows = read_rows(options.report)
        print(summary(rows))
        return rows
    device = torch.device(options.device, 0)
    recorder = Recorder(options.rows, device, line)
    begin = time.perf_counter()
    casts = measure_casts(device, seconds=_SECONDS_OF_CASTS, most_values=_MOST_VALUES_CAST)
    count, tests = options.begin + options.count, options.tests
    for each in configurations(count, options.seed, tests, options.batch_scale, options.device)[options.begin :]:
        failed = {"kind": "mixed step", "case": each.name, "model": each.case.kind, "formats": each.formats}
        failed["seed"] = options.seed
        if time.perf_counter() - begin > options.budget:
            recorder.add(failed | {"error": f"not begun within {options.budget:g} s"})
            continue
        try:
            run(each, casts, options, recorder)
        except Exception as error:  # a configuration that cannot run is a row, too
            recorder.add(failed | {"error": brief(error)})
        free_memory()
    print(summary(recorder.rows))
    return recorder.rows


if __name__ == "__main__":
    main()
