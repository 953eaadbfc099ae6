r"""Training steps predicted from measured operators, held against training steps: seconds and peak memory.

    python benchmarks/replay_accuracy.py --rows rows/replay.jsonl               # CPU: random graphs, and samples
    python benchmarks/replay_accuracy.py --graph cora --data-dir DATA            # a real graph
    python benchmarks/replay_accuracy.py --device cuda --graph products-like:600000 --precisions fp32,bf16 \
        --limits sms=32 --rows rows/replay.jsonl

Configurations (model, widths, layers, precision) and the sizes that are predicted are drawn by a seed before anything
is measured; all are reported. Of each configuration the operators are timed inside steps at a ladder of sizes
(`nugnn.measured_step`); its steps at other sizes are trained as ever, on a CPU in turns with the ladder's, and
predicted. Errors come without any correction, and with the one factor of all other configurations (leave one out).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Recorder, brief, free_memory
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nugnn.datasets.registry import load
from nugnn.limited import apply_limits
from nugnn.measured_step import Place, ladder
from nugnn.models import GNN
from nugnn.networks import CNN, MLP, TransformerClassifier
from nugnn.partition.assign import partition_nodes
from nugnn.partition.pieces import piece_of
from nugnn.partition.shard import Shard, build_shard
from nugnn.planning.calibration import alone_seconds
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.measure_operators import Now
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.operator_costs import storage_bytes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.step_laps import StepLaps
from nugnn.planning.times_of_steps import times_of
from nugnn.planning.trace import StepTrace
from nugnn.traced_step import (
    LonePart,
    graph_trainer,
    lone_part,
    run_steps,
    sample_trainer,
    sizes_of,
    trace_graph_step,
    trace_sample_step,
)
from nugnn.trainer import Trainer

_TOKENS, _IMAGE = 64, 32
_WIDTHS = (32, 64, 128, 256)
_DEGREES = (0.7, 0.85, 1.0, 1.0, 1.15, 1.3)
"""Edges for a node of a random graph that is predicted, beside those of the ladder."""
_SHARES = (1.0, 0.5, 0.25, 0.125, 1 / 64)
"""Pieces of a real graph whose operators are timed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration.

    Args:
        family: ``graph`` or ``samples``.
        kind: Of the model.
        options: Of its class.
        precision: Of training.
        largest: Sizes of the ladder's end; None where the graph has its own.
        tests: What is predicted: shares of the largest, and how many edges a node has beside it.
    """

    family: str
    kind: str
    options: dict[str, Any]
    precision: str
    largest: PartSizes | None
    tests: tuple[tuple[float, float], ...]

    @property
    def name(self) -> str:
        words = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.kind} {words} {self.precision}"


def drawn(count: int, seed: int, families: Sequence[str], precisions: Sequence[str], sizes: _Sizes) -> list[Case]:
    """``count`` configurations of each family."""
    draw = random.Random(seed)
    cases = []
    for family, _ in itertools.product(families, range(count)):
        precision = draw.choice(list(precisions))
        tests = tuple((draw.uniform(0.15, 1.0), draw.choice(_DEGREES)) for _ in range(sizes.tests))
        if family == "graph":
            kind, hidden = draw.choice(("gcn", "sage", "gat", "gin")), draw.choice(_WIDTHS)
            options: dict[str, Any] = {"hidden": hidden, "layers": draw.choice((2, 3))}
            if kind == "gat":
                options |= {"heads": 4, "hidden": hidden // 4}
            elif draw.random() < 0.5:
                options["norm"] = draw.choice(("layer", "batch"))
            edges = int(sizes.edges * draw.choice((0.3, 0.6, 1.0)))
            nodes = min(int(sizes.nodes * draw.choice((0.3, 0.6, 1.0))), edges // 3)
            largest = PartSizes(inner=nodes, edges=edges, train=nodes // 10) if sizes.is_random else None
            if largest is not None and sizes.parts > 1:
                largest = dataclasses.replace(largest, halo=nodes // 4, sent=nodes // 5)
        else:
            kind = draw.choice(("mlp", "cnn", "transformer"))
            width, layers = draw.choice(_WIDTHS), draw.choice((2, 3))
            options = {"mlp": {"hidden": 4 * width, "layers": layers}, "cnn": {"widths": (width // 2, width)},
                       "transformer": {"width": width, "layers": layers}}[kind]  # fmt: skip
            largest = PartSizes(batch=int(sizes.batch[kind] * draw.choice((0.5, 1.0))))
        cases.append(Case(family, kind, options, precision, largest, tests))
    return cases


@dataclasses.dataclass(frozen=True)
class _Sizes:
    nodes: int
    edges: int
    parts: int
    tests: int
    is_random: bool
    batch: dict[str, int]


@dataclasses.dataclass(eq=False)
class Setting:
    """Where the trainers of a case come from.

    Args:
        trace: Of its step, in formulas.
        trainer: Makes one at a place.
        ladder: Places to time operators at.
        tests: Places to predict.
    """

    trace: StepTrace
    trainer: Callable[..., Trainer]
    ladder: Sequence[Any]
    tests: Sequence[Any]


def graph_setting(case: Case, device: str, parts: int, real: RealGraph | None) -> Setting:
    in_features, classes = (100, 47) if real is None else (real.in_features, real.num_classes)
    torch.manual_seed(0)
    model = GNN(case.kind, in_features, classes, **case.options)
    how: dict[str, Any] = {"in_features": in_features, "num_classes": classes, "ranks": parts, "device": device}
    how |= {"multilabel": real is not None and real.shard.multilabel, "precision": case.precision}
    trace = trace_graph_step(model, **how)
    make = functools.partial(graph_trainer, model, **how)
    if real is not None:
        return Setting(trace, make, real.ladder, [real.piece(share) for share, _ in case.tests])
    assert case.largest is not None
    largest = case.largest
    tests = []
    for share, degree in case.tests:
        inner, halo = (int(n * share) for n in (largest.inner, largest.halo))
        edges = max(int(largest.edges * share * degree), inner, halo)
        train, sent = int(largest.train * share), int(largest.sent * share)
        tests.append(PartSizes(inner=inner, halo=halo, edges=edges, train=train, sent=sent))
    return Setting(trace, make, ladder(largest, trace), tests)


def sample_setting(case: Case, device: str) -> Setting:
    torch.manual_seed(0)
    model: nn.Module
    sample: list[Tensor]
    if case.kind == "mlp":
        model, sample = MLP(784, 10, norm="batch", dropout=0.3, **case.options), [torch.zeros(784)]
    elif case.kind == "cnn":
        model, sample = CNN(3, 10, **case.options), [torch.zeros(3, _IMAGE, _IMAGE)]
    else:
        model = TransformerClassifier(1000, 10, max_length=_TOKENS, **case.options)
        sample = [torch.full((_TOKENS,), 999)]
    how: dict[str, Any] = {"num_classes": 10, "device": device, "precision": case.precision}
    trace = trace_sample_step(model, sample, **how)
    assert case.largest is not None
    tests = [PartSizes(batch=max(2, int(case.largest.batch * share))) for share, _ in case.tests]
    return Setting(trace, functools.partial(sample_trainer, model, sample, **how), ladder(case.largest), tests)


class RealGraph:
    """A graph that is there, cut into pieces: on the device, made once for all cases."""

    def __init__(self, name: str, data_dir: str | None, parts: int, device: str) -> None:
        data = load(name, data_dir)
        assignment = partition_nodes(data.num_nodes, data.src, data.dst, [1 / parts] * parts)
        shard = build_shard(data, assignment, 0, order="auto")
        features = shard.node_data.get("feat")
        if features is None or features.layout is not torch.strided:  # how many values it has is no count of a part
            width = 128 if features is None else min(int(features.shape[1]), 256)
            random_ones = {"feat": torch.randn(shard.num_inner, width)}
            shard = dataclasses.replace(shard, node_data=shard.node_data | random_ones)
        labels = shard.node_data["label"]
        rows = (torch.ones(len(labels)) if labels.dim() > 1 else labels >= 0).nonzero().flatten()[::10]
        self.shard = dataclasses.replace(shard, train_rows=rows, num_train_global=len(rows) * parts)
        self._device = device
        self.in_features, self.num_classes = shard.node_data["feat"].shape[1], shard.num_classes
        self._made: dict[float, LonePart] = {}
        self.ladder = [self.piece(share) for share in _SHARES if share * shard.num_inner >= 32]

    def piece(self, share: float) -> LonePart:
        if share not in self._made:
            piece: Shard = piece_of(self.shard, share)
            self._made[share] = lone_part(piece, self._device)
        return self._made[share]


# -- seconds -----------------------------------------------------------------------------------------------------------


def at(setting: Setting, place: Any) -> StepTrace:
    return setting.trace.at(place if isinstance(place, PartSizes) else sizes_of(place))


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

    def ladder_rows(self) -> list[dict[str, Any]]:
        """Of each place: its operators' laps as they came, whole steps, and the host's part of these."""
        return [
            {
                "sizes": dataclasses.asdict(sizes),
                "laps_seconds": sum(laps.median_laps),
                "step_seconds": laps.median_seconds,
                "host_seconds": statistics.median(laps.host_seconds),
                "least_host_seconds": min(laps.host_seconds),
            }
            for sizes, laps in self.ladder
        ]


def measured(setting: Setting, rounds: int, now: Now, label: str) -> Measured:
    ladder_of, tests = list(setting.ladder), list(setting.tests)

    def place(each: Any, **options: Any) -> Place:
        sizes = each if isinstance(each, PartSizes) else sizes_of(each)
        return Place(setting.trainer(each, **options), sizes, now)

    if setting.trace.device == "cpu":
        timed, plain = [place(each) for each in ladder_of], [place(each) for each in tests]
        for each in (*timed, *plain):
            each.warm_up()
        for _ in range(rounds):
            for each in timed:
                each.time_whole()
                each.time_inside()
            for each in plain:
                each.time_whole()
        found = [(p.sizes, p.laps) for p in timed]
        table = times_of(setting.trace, found, timed[0].device, limits=label)
        return Measured(table, found, [p.laps.median_seconds for p in plain], [False] * len(plain))
    found = []
    for each in ladder_of:
        one = place(each, cuda_graphs="off")
        one.warm_up()
        for _ in range(rounds):
            one.time_whole()
            one.time_inside()
        found.append((one.sizes, one.laps))
        device = one.device
        del one
        free_memory()
    seconds, are_captured = [], []
    for each in tests:
        one = place(each)
        for _ in range(2):  # steps are recorded from the fourth on
            one.time_whole()
        warm = len(one.laps.seconds)
        for _ in range(rounds):
            one.time_whole()
        seconds.append(statistics.median(one.laps.seconds[warm:]))
        are_captured.append(one.trainer.num_recorded > 0)
        del one
        free_memory()
    return Measured(times_of(setting.trace, found, device, limits=label), found, seconds, are_captured)


# -- memory ------------------------------------------------------------------------------------------------------------


def peaks(setting: Setting, place: Any) -> tuple[int, int]:
    """Bytes at the peak of a step that runs as ever but for CUDA graphs: predicted, and by torch's allocator.

    What is held before the step is the trace's in both; what was kept besides (transposed lists of edges) in neither.
    """
    trace = at(setting, place)
    first = next(i for i, o in enumerate(trace.operators) if o.kind in ("product", "exchange", "spmm", "rows"))
    there = [s for s in trace.storages if s.made_by == -1]
    before = sum(storage_bytes(s) for s in there if s.freed_by is None or s.freed_by >= first)
    trainer = setting.trainer(place, cuda_graphs="off")
    run_steps(trainer, 2)
    works = next(iter(trainer.family.steps(0)))
    trainer.optimizer.zero_grad(set_to_none=True)  # as the step does first
    gc.collect()
    if setting.trace.device == "cuda":
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.step(works)
        torch.cuda.synchronize()
        return trace.peak_bytes(), before + torch.cuda.max_memory_allocated() - held
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            trainer.step(works)
    finally:
        gc.enable()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return trace.peak_bytes(), before + max(itertools.accumulate(change for _, change in changes))


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
        row |= {"ladder": found.ladder_rows()}
        if not options.no_memory:
            row["predicted_peak_bytes"], row["measured_peak_bytes"] = peaks(setting, place)
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
    sizes = _Sizes(
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
