"""Two GPUs of one host, one of them limited: planned shares beside even, FLOP/s and bandwidth shares.

    python benchmarks/unequal_gpus.py --rows rows/unequal.jsonl             # two GPUs; 64, 32, 16 multiprocessors
    python benchmarks/unequal_gpus.py --models sage --limits 32 --families products-like
    python benchmarks/unequal_gpus.py --device cpu --nodes 3000 --arcs 40000 --limits 44 --epochs 4

Rank 1 keeps to so many multiprocessors, by streams of a green context; on a CPU it is slowed down in that proportion.
For each graph, model and limit the whole graph is trained on each device alone, T_i seconds an epoch: without a halo no
split would end before 1 / sum(1 / T_i). ``auto`` is planned as `nugnn train --shares auto` plans: from a recorded step
whose operators, on parts that rates alone would make, and whose rows that travel both ranks time at once within their
limits. ``tuned`` is one correction of ``auto`` by computing alone, as re-balancing makes it where it knows nothing of
exchanges: by what each rank was busy with in some epochs, nodes go from one to the other, whatever that does to rows
that travel. A run that `nugnn train` has planned itself weighs these, too, and moves less, or nothing. Then all splits
are trained in turns, so that whatever else the machine does meets all of them. Losses of all splits have to agree,
dropout included, or no time is given. On a CPU the slowed rank stands still between operators rather than inside them,
so that many look as quick as the other's: the same order of things, and no figure of worth.

While one group (a graph and a model, all limits) is compared, processes split the graph for the next one. What does
not fit into ``--seconds`` is left out, and said. Where ranks say nothing for half a minute, all processes write their
stacks.

Rows: median, p20 and p80 of an epoch, shares, what parts hold, the share of an epoch in which each rank waits
(exchanges included), predicted_ms of each device by itself, forecast_ms of a step of both, alone_ms, bound_ms,
halo_bound_ms (the bound if each rank also spends what its halo rows take), how much of the way from even shares to the
bound a split has come, and which planner made ``auto`` (`unequal_figures.PLANNER`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import unequal_rank
from gpu_epoch import MODELS
from harness import Recorder, largest_difference, timing_of
from split_pool import Split, SplitPool, warm_kernels
from stages import Stages, show_stacks_when_asked
from unequal_figures import PLANNED, PLANNER, Alone, figures, halo_bound_ms, line_of, verdict
from unequal_steps import StepModels
from worker_groups import Group

from nugnn.datasets.synthetic_device import FAMILIES
from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES
from nugnn.planning.cluster import Cluster
from nugnn.planning.imbalance import Levelling, RankLoad, RebalanceRules, flows, levelled
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import DataFacts
from nugnn.planning.predicted_work import PredictedWork
from nugnn.planning.predictor import ReplayedSteps

_LOSS_RTOL = {"fp32": 1e-3, "bf16": 1e-2}
_STATIC = ("flops", "bandwidth")


def correction(work: PredictedWork, sizes: Sequence[PartSizes], busy_seconds: Sequence[float]) -> Levelling:
    """How much work goes from which rank to which so that both end their computing together; exchanges are left out."""
    loads = [RankLoad(seconds=busy, sizes=size) for busy, size in zip(busy_seconds, sizes, strict=True)]
    return levelled(loads, RebalanceRules(work=work.computing()))


@dataclass
class Prepared:
    """What a comparison needs.

    Args:
        family: Of the graph.
        model: Of the network.
        sms: Limit of rank 1.
        rates: Of each device.
        alone: Of each device.
        losses: Of the first epochs of the whole graph on one device.
        row_seconds: Of a row that travels.
        steps: What predicts a step on both devices.
        splits: Being found, by name.
    """

    family: str
    model: str
    sms: int
    rates: list[dict[str, Any]]
    alone: list[Alone]
    losses: list[float]
    row_seconds: float
    steps: ReplayedSteps
    splits: dict[str, Future[Split]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family} {self.model} {self.sms}"


class Benchmark:
    """Commands for the ranks and the pool, and the rows that come of them."""

    def __init__(self, arguments: argparse.Namespace, recorder: Recorder, folder: Path, stages: Stages) -> None:
        self._arguments, self._recorder, self._folder, self._stages = arguments, recorder, folder, stages
        self._ranks = Group(unequal_rank.work, 2, arguments.device, threads=arguments.threads)
        self._pool = SplitPool(folder, arguments.splitters, arguments.threads)
        self._models = StepModels(arguments, self._ranks, self._pool)
        self._even: dict[str, Future[Split]] = {}
        self._rates: dict[int, list[dict[str, Any]]] = {}
        self._static: dict[tuple[str, int, str], Future[Split]] = {}
        self._longest = {"prepare": 0.0, "compare": 0.0}

    def close(self) -> None:
        self._models.close()
        self._pool.close()
        self._ranks.stop()

    def run(self) -> None:
        """Group by group, each prepared before the one before it is compared."""
        given, left_out = self._arguments, list[str]()
        warming = threading.Thread(target=warm_kernels, daemon=True)
        warming.start()
        with self._stages.stage("ranks started, and made " + given.families[0]):
            self._make(given.families[0])
        with self._stages.stage("compiled what orders and splits graphs, beside that"):
            warming.join()
        ready: list[Prepared] = []
        for family, model in itertools.product(given.families, given.models):
            name = f"{family} {model}"
            if not self._has_time(len(ready), len(given.limits)):
                left_out += [f"{name} {sms}" for sms in given.limits]
                continue
            before, ready = ready, self._timed("prepare", lambda f=family, m=model: self._prepare(f, m))
            left_out += self._compare_all(before)
        left_out += self._compare_all(ready)
        self._stages.say(f"end; left out for want of time: {', '.join(left_out) or 'nothing'}")

    def _timed(self, what: str, call: Any) -> Any:
        begin = time.monotonic()
        found = call()
        self._longest[what] = max(self._longest[what], time.monotonic() - begin)
        return found

    def _has_time(self, waiting: int, more: int) -> bool:
        """Whether a group can be prepared, and a comparison of it made, after those that wait."""
        needed = self._longest["prepare"] * min(1, more) + self._longest["compare"] * (waiting + 1)
        return self._stages.seconds + needed < self._arguments.seconds

    def _all(self, do: str, **item: Any) -> list[Any]:
        return self._ranks.run({"do": do, **item})

    def _how(self, family: str, model: str) -> dict[str, Any]:
        given = self._arguments
        return {"family": family, "model": model, "precision": given.precision, "seed": given.seed}

    def _make(self, family: str) -> None:
        given = self._arguments
        made = self._all("make", family=family, nodes=given.nodes, arcs=given.arcs, seed=given.seed)[0]
        self._models.add(DataFacts(name=family, nodes=given.nodes, train=given.nodes, **made))

    def _prepare(self, family: str, model: str) -> list[Prepared]:
        """Everything of a graph and a model but the comparisons; splits are found by the pool from now on."""
        given, stages = self._arguments, self._stages
        if family not in self._even:
            if family != given.families[0]:
                with stages.stage(f"made {family}"):
                    self._make(family)
            with stages.stage(f"ordered {family}"):
                self._all("order", family=family, folder=str(self._folder), threads=os.cpu_count() or 1)
            self._even[family] = self._pool.by_shares(family, (1.0, 1.0))
        how = self._how(family, model)
        with stages.stage(f"{family} {model}: waited for a recorded step"):
            subject = self._models.subject(family, model)
        drafts = {sms: self._models.draft(subject, sms) for sms in given.limits}
        found: dict[int, list[dict[str, Any]]] = {}
        steps: dict[int, ReplayedSteps] = {}
        clusters: dict[int, Cluster] = {}
        for sms in given.limits:
            with stages.stage(f"{family} {model} {sms}: each device alone") as more:
                granted = self._all("limit", sms=sms)
                if sms not in self._rates:
                    self._rates[sms] = self._all("rates")
                for name in _STATIC:
                    if (family, sms, name) not in self._static:
                        shares = [rate[name] for rate in self._rates[sms]]
                        self._static[family, sms, name] = self._pool.by_shares(family, shares)
                found[sms] = self._all("alone", **how, epochs=given.alone)
                more.append("/".join(f"{each['whole']:.1f}" for each in found[sms]) + f" ms with {granted}")
            with stages.stage(f"{family} {model} {sms}: operators and rows that travel"):
                steps[sms], clusters[sms] = self._models.steps(subject, sms, drafts[sms])
        with stages.stage(f"{family}: waited for even parts"):
            even = self._pool.result(self._even[family])
        with stages.stage(f"{family} {model}: even parts on whole devices") as more:
            self._all("limit", sms=None)
            row_seconds = self._row_seconds(family, model, even)
            more.append(f"{1e9 * row_seconds:.2f} ns for a row that travels")
        ready = []
        for sms, ranks in found.items():
            alone = [Alone(each["whole"]) for each in ranks]
            splits = {"even": self._even[family], **{name: self._static[family, sms, name] for name in _STATIC}}
            how_planned = clusters[sms], subject.precision, subject.row_bytes
            splits["auto"] = self._pool.planned(family, steps[sms], *how_planned)
            measured = (self._rates[sms], alone, ranks[0]["losses"], row_seconds, steps[sms])
            ready.append(Prepared(family, model, sms, *measured, splits))
        return ready

    def _row_seconds(self, family: str, model: str, split: Split) -> float:
        """Of a row that travels, by an even split over whole devices, which hardly wait for each other."""
        self._all("build", name="even", **self._how(family, model), path=str(split.path))
        found = self._all("turns", names=["even"], turns=2)
        self._all("drop")
        median = timing_of(found[0]["even"]["samples_ms"]).median_ms
        waits = min(each["even"]["waits"] for each in found)
        return waits * median / 1e3 / max(1, *(size.halo + size.sent for size in split.sizes))

    def _tune(self, ready: Prepared) -> None:
        """Have nodes go where what ranks are busy with under ``auto`` says."""
        with self._stages.stage(f"{ready}: some epochs of auto, and a correction") as more:
            auto = self._pool.result(ready.splits["auto"])
            self._all("limit", sms=ready.sms)
            self._all("build", name="auto", **self._how(ready.family, ready.model), path=str(auto.path))
            found = self._all("turns", names=["auto"], turns=2)
            median = timing_of(found[0]["auto"]["samples_ms"]).median_ms / 1e3
            busy = [median * (1 - each["auto"]["waits"]) for each in found]
            level = correction(ready.steps.work, auto.sizes, busy)
            amounts = flows(level.given, [[0.0, 1.0], [1.0, 0.0]])
            moved = self._all("give", path=str(auto.path), amounts=amounts, node_work=level.node_work)
            self._all("drop")
            part = np.load(auto.path)
            for ids, to in moved:
                part[ids] = to
            more.append("busy for " + "/".join(f"{1e3 * seconds:.1f}" for seconds in busy) + " ms")
            more.append("moved " + " and ".join(f"{len(ids):,}" for ids, _ in moved))
        ready.splits["tuned"] = self._pool.given(ready.family, part, level.predicted)

    def _compare_all(self, ready: list[Prepared]) -> list[str]:
        """Compare as many as there is time for; names of the others."""
        left_out = []
        for each in ready:
            if self._stages.seconds + (len(ready) + 1) * self._longest["compare"] < self._arguments.seconds:
                self._tune(each)
        for each in ready:
            if self._stages.seconds + self._longest["compare"] > self._arguments.seconds:
                left_out.append(str(each))
                for name in PLANNED:
                    if name in each.splits:
                        each.splits[name].cancel()
            else:
                with self._stages.stage(f"{each}: waited for splits"):
                    splits = {name: self._pool.result(split) for name, split in each.splits.items()}
                self._timed("compare", lambda e=each, s=splits: self._compare(e, s))
        return left_out

    def _compare(self, ready: Prepared, splits: dict[str, Split]) -> None:
        """Train the splits in turns and record a row of each."""
        given, how = self._arguments, self._how(ready.family, ready.model)
        with self._stages.stage(f"{ready}: built") as more:
            self._all("limit", sms=ready.sms)
            built = {
                name: self._all("build", name=name, **how, path=str(split.path))[0] for name, split in splits.items()
            }
            parts = {what: sum(each["seconds"][what] for each in built.values()) for what in built["even"]["seconds"]}
            more.append(" ".join(f"{what} {seconds:.1f}" for what, seconds in parts.items()) + " s")
        with self._stages.stage(f"{ready}: turns"):
            found = self._all("turns", names=list(splits), turns=given.epochs)
            self._all("drop")
        timings = {name: timing_of(found[0][name]["samples_ms"]) for name in splits}
        alone, facts = ready.alone, self._models.facts[ready.family]
        for name, split in splits.items():
            bound = halo_bound_ms(alone, split.sizes, ready.row_seconds)
            row: dict[str, Any] = {
                "kind": "unequal", "planner": PLANNER, "system": name, "graph": ready.family, "model": ready.model,
                "dtype": given.precision, "shape": f"{ready.model} {ready.sms} sms", "sms": ready.sms,
                "seed": given.seed, "num_nodes": given.nodes, "num_edges": facts.edges, "rates": ready.rates,
                "sizes": [asdict(size) for size in split.sizes],
                "shares": [size.inner / given.nodes for size in split.sizes],
                "predicted_ms": [1e3 * seconds for seconds in split.seconds],
                "forecast_ms": 1e3 * ready.steps.forecast(split.sizes).step_seconds,
                "row_seconds": ready.row_seconds, "halo_bound_ms": bound,
                "over_halo_bound": timings[name].median_ms / bound,
                "split_seconds": split.took_seconds, "build_seconds": built[name]["seconds"],
                "cuda_graphs": built[name]["recorded"], "losses": built[name]["losses"],
                "samples_ms": found[0][name]["samples_ms"], "waits": [rank[name]["waits"] for rank in found],
                **figures(timings, name, alone),
            }  # fmt: skip
            ours, expected = row["losses"][:3], ready.losses[:3]
            if not largest_difference(ours, expected) <= _LOSS_RTOL[given.precision]:
                self._recorder.add(row | {"error": f"wrong result: losses {ours}, of one device {expected}"})
            else:
                self._recorder.add(row, timings[name])
        print(f"  {verdict(found[0], timings)}", flush=True)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--limits", nargs="+", type=int, default=[64, 32, 16], help="multiprocessors of rank 1")
    parser.add_argument("--precision", choices=list(_LOSS_RTOL), default="bf16")
    parser.add_argument("--nodes", type=int, default=FULL_NODES)
    parser.add_argument("--arcs", type=int, default=FULL_ARCS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=5, help="turns of each split, of two epochs that count")
    parser.add_argument("--alone", type=int, default=3, help="timed epochs of the whole graph on each device")
    parser.add_argument("--seconds", type=float, default=360.0, help="what does not end in them is left out")
    parser.add_argument("--splitters", type=int, default=6, help="processes that split graphs")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 6), help="of each process")
    parser.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> Recorder:
    """Run what the options ask for."""
    arguments, stages = parse(given), Stages()
    show_stacks_when_asked()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended on the way out
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    recorder = Recorder(arguments.rows, torch.device("cuda:0" if arguments.device == "cuda" else "cpu"), line_of)
    memory, needed = Path("/dev/shm"), len(arguments.families) * 8 * arguments.arcs
    is_roomy = memory.is_dir() and shutil.disk_usage(memory).free > needed
    with tempfile.TemporaryDirectory(dir=memory if is_roomy else None) as folder:
        benchmark = Benchmark(arguments, recorder, Path(folder), stages)
        try:
            benchmark.run()
        finally:
            benchmark.close()
    return recorder


if __name__ == "__main__":
    main()
