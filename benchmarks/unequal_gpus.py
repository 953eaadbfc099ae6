"""Two GPUs of one host, one of them limited: planned shares beside even, FLOP/s and bandwidth shares.

    python benchmarks/unequal_gpus.py --rows rows/unequal.jsonl             # two GPUs; 64, 32, 16 multiprocessors
    python benchmarks/unequal_gpus.py --models sage --limits 32 --families products-like
    python benchmarks/unequal_gpus.py --device cpu --nodes 3000 --arcs 40000 --limits 44 --epochs 4

Rank 1 keeps to so many multiprocessors, by streams of a green context; on a CPU it is slowed down in that proportion.
For each graph, limit and model the whole graph is trained on each device alone, T_i seconds an epoch: without a halo no
split would end before 1 / sum(1 / T_i). Then the four splits are trained in turns, so that whatever else the machine
does meets all of them. Losses of all splits have to agree, dropout included, or no time is given.

Rows: median, p20 and p80 of an epoch, shares, what parts hold, the share of an epoch in which each rank waits
(exchanges included), alone_ms, bound_ms, and how much of the way from even shares to the bound a split has come.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_shards import device_shard, thinned
from gpu_epoch import MODELS, adam
from harness import Recorder, Timing, free_memory, milliseconds, moment, synchronize, timing_of
from split_pool import Split, SplitPool, keep_graph
from worker_groups import Group

from nugnn.datasets.synthetic_device import FAMILIES, DeviceGraph, device_graph
from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.work_model import LinearCost, LinearWork

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

_WHOLE = 132
"""Multiprocessors that a CPU stands for."""
_EPOCHS_BEFORE = 5
"""They compile, allocate, and are recorded where steps are CUDA graphs."""
_TURN = 3
"""Epochs of a split in a row; the first follows another split's and does not count."""
_LOSS_RTOL = {"fp32": 1e-3, "bf16": 1e-2}


# -- in the ranks ------------------------------------------------------------------------------------------------------

_KEPT: dict[str, Any] = {}
"""What this rank has from one command to the next: graphs, trainers, and what slows it."""


def work(ranks: Any, item: dict[str, Any]) -> Any:
    """One command, on every rank."""
    arguments = {name: value for name, value in item.items() if name != "do"}
    return {"make": _make, "limit": _limit, "alone": _alone, "build": _build, "turns": _turns, "drop": _drop}[
        item["do"]
    ](ranks, **arguments)


def _make(ranks: Any, family: str, nodes: int, arcs: int, seed: int, folder: str) -> dict[str, Any]:
    """The graph on this rank's device, nodes numbered by nested clusters; rank 0 leaves its lists for the pool."""
    from nugnn.partition.clusters import unweighted_lists
    from nugnn.partition.order import locality_order, rows_in_cache

    begin = time.perf_counter()
    graph = device_graph(family, nodes, arcs, seed, device=ranks.device)
    order = torch.zeros(graph.num_nodes, dtype=torch.int64)
    if ranks.rank == 0:
        lists = unweighted_lists(graph.indptr.cpu().numpy(), graph.indices.cpu().numpy())
        order = torch.from_numpy(locality_order(lists, rows_in_cache(400))[0])
    ranks.broadcast_(order)
    new_ids = torch.empty_like(order)
    new_ids[order] = torch.arange(len(order))
    graph = graph.renumbered(new_ids.to(ranks.device))
    if ranks.rank == 0:
        keep_graph(Path(folder), family, graph.indptr.cpu().numpy(), graph.indices.cpu().numpy())
    _KEPT[family] = graph
    free_memory()
    return {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges, "seconds": time.perf_counter() - begin}


def _limit(ranks: Any, sms: int | None) -> dict[str, Any]:
    """Limit rank 1, or nobody; what each device does in a second then."""
    from nugnn.kernels.green_context import limit_multiprocessors, usable_multiprocessors
    from nugnn.planning.measure import copied
    from nugnn.planning.measure_products import measure_products
    from slowed import slow_down

    _drop(ranks)
    if ranks.device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream(ranks.device))
        if ranks.rank == 1 and sms is not None:
            limit_multiprocessors(ranks.device, sms)
        granted = usable_multiprocessors(ranks.device)
    else:
        if (before := _KEPT.pop("slower", None)) is not None:
            before.terminate()
            before.wait()
        granted = sms if ranks.rank == 1 and sms is not None else _WHOLE
        if granted < _WHOLE:
            _KEPT["slower"] = slow_down(os.getpid(), _WHOLE / granted)
    products = measure_products(ranks.device, seconds=0.5, on_note=lambda _: None)
    flops = products["bf16" if "bf16" in products else "fp32"].per_second
    stream = copied((256 if ranks.device.type == "cuda" else 32) << 20, ranks.device, 0.2).per_second
    return {"multiprocessors": granted, "flops": flops, "bandwidth": stream}


def _trainer(shard: Any, ranks: Any, model: str, precision: str, seed: int) -> Any:
    import nugnn
    from nugnn.seam import install
    from nugnn.shard_graph import ShardGraph

    install()
    classes, width = shard.num_classes, shard.node_data["feat"].shape[1]
    graph = ShardGraph(shard, ranks, keep_edge_ids=False)
    torch.manual_seed(seed)
    settings = MODELS[model] | ({"aggregator": "mean"} if model == "sage" else {})
    network = nugnn.GNN(model, width, classes, layers=3, dropout=0.5, input_dropout=0.0, **settings).to(ranks.device)
    rows = torch.arange(graph.num_nodes(), device=ranks.device)
    splits = {"train": rows, "val": rows[:0], "test": rows[:0]}
    family = nugnn.GraphFamily(network, graph, splits, precision=precision, seed=seed)
    return nugnn.Trainer(
        family,
        make_optimizer=lambda model: adam(model.parameters(), ranks.device),
        cuda_graphs="on" if ranks.device.type == "cuda" else "off",
    )


def _alone(ranks: Any, family: str, model: str, precision: str, seed: int, epochs: int) -> dict[str, Any]:
    """Median milliseconds of an epoch of the whole graph on this device by itself, and without half of its edges."""
    from nugnn.comm.groups import Ranks

    found: dict[str, Any] = {}
    for name in ("whole", "thin"):
        graph: DeviceGraph = _KEPT[family] if name == "whole" else thinned(_KEPT[family])
        part = torch.zeros(graph.num_nodes, dtype=torch.int8, device=ranks.device)
        alone = Ranks(device=ranks.device)
        trainer = _trainer(device_shard(graph, part, 0, 1), alone, model, precision, seed)
        losses = [trainer.train_epoch() for _ in range(_EPOCHS_BEFORE)]
        synchronize(ranks.device)
        ends = [moment(ranks.device)]
        for _ in range(epochs):
            losses.append(trainer.train_epoch())
            ends.append(moment(ranks.device))
        synchronize(ranks.device)
        found[name] = timing_of([milliseconds(*pair) for pair in itertools.pairwise(ends)]).median_ms
        found[f"{name}_edges"] = graph.num_edges
        if name == "whole":
            found["losses"] = losses
        del trainer, graph
        free_memory()
    return found


def _build(ranks: Any, name: str, family: str, model: str, precision: str, seed: int, path: str) -> dict[str, Any]:
    """A trainer of a split, ready to be timed."""
    begin = time.perf_counter()
    part = torch.from_numpy(np.load(path)).to(ranks.device)
    shard = device_shard(_KEPT[family], part, ranks.rank, ranks.world_size)
    trainer = _trainer(shard, ranks, model, precision, seed)
    del shard
    losses = [trainer.train_epoch() for _ in range(_EPOCHS_BEFORE)]
    synchronize(ranks.device)
    _KEPT.setdefault("trainers", {})[name] = trainer
    return {"losses": losses, "seconds": time.perf_counter() - begin, "recorded": trainer.num_recorded > 0}


def _turns(ranks: Any, names: list[str], turns: int) -> dict[str, Any]:
    """Epochs of the trainers in turns: milliseconds of each that counts, and the share in which this rank waits."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    waited, elapsed = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for name in names * turns:
        trainer = _KEPT["trainers"][name]
        ranks.clock.take()
        ends = [moment(ranks.device)]
        for _ in range(_TURN):
            trainer.train_epoch()
            ends.append(moment(ranks.device))
        synchronize(ranks.device)
        laps = [milliseconds(*pair) for pair in itertools.pairwise(ends)]
        samples[name] += laps[1:]
        waited[name] += 1e3 * sum(ranks.clock.take())
        elapsed[name] += sum(laps)
    return {name: {"samples_ms": samples[name], "waits": waited[name] / elapsed[name]} for name in names}


def _drop(ranks: Any) -> None:
    """Give trainers up."""
    synchronize(ranks.device)
    _KEPT.pop("trainers", None)
    gc.collect()
    free_memory()


# -- what follows from measurements ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """Of one device under one limit, for one graph and model.

    Args:
        whole_ms: An epoch of the whole graph.
        thin_ms: Without every second edge.
        num_nodes: N.
        num_edges: E.
        thin_edges: E of the thin graph.
    """

    whole_ms: float
    thin_ms: float
    num_nodes: int
    num_edges: int
    thin_edges: int

    def cost(self, row_seconds: float) -> LinearCost:
        """Seconds for a node and an edge from both epochs, and ``row_seconds`` for a row that travels."""
        edge = max(0.0, (self.whole_ms - self.thin_ms) / (self.num_edges - self.thin_edges))
        node = max(0.0, (self.whole_ms - edge * self.num_edges) / self.num_nodes)
        return LinearCost(inner=node / 1e3, edges=edge / 1e3, halo=row_seconds, sent=row_seconds)


def work_of(alone: list[Alone], row_seconds: float) -> LinearWork:
    """The work model behind ``auto``: the one place to put another predictor in."""
    return LinearWork(tuple(each.cost(row_seconds) for each in alone))


def bound_ms(alone: list[Alone]) -> float:
    """Of any split, if nothing had to travel: devices together do what each does alone."""
    return 1 / sum(1 / each.whole_ms for each in alone)


# -- the benchmark -----------------------------------------------------------------------------------------------------


class Benchmark:
    """Commands for the ranks and the pool, and the rows that come of them."""

    def __init__(self, arguments: argparse.Namespace, recorder: Recorder, folder: Path) -> None:
        self._arguments, self._recorder, self._folder = arguments, recorder, folder
        self._end = time.monotonic() + arguments.seconds
        self._ranks = Group(work, 2, arguments.device, threads=arguments.threads)
        self._pool = SplitPool(folder, arguments.splitters, arguments.threads)
        self._even: dict[str, Future[Split]] = {}

    def close(self) -> None:
        self._pool.close()
        self._ranks.stop()

    def run(self) -> None:
        """All graphs: made and calibrated first, then limit by limit, splits being found meanwhile."""
        given = self._arguments
        rows_of: dict[tuple[str, str], float] = {}
        halo_of: dict[str, float] = {}
        for family in given.families:
            counts = {"nodes": given.nodes, "arcs": given.arcs, "seed": given.seed}
            self._all("make", family=family, **counts, folder=str(self._folder))
            self._even[family] = self._pool.by_shares(family, (1.0, 1.0))
        self._all("limit", sms=None)
        for family in given.families:
            halo_of[family] = _halo_fraction(self._even[family].result().sizes)
            for model in given.models:
                rows_of[family, model] = self._row_seconds(family, model)
        for sms in given.limits:
            if time.monotonic() > self._end:
                print(f"out of time: {sms} multiprocessors were not run", flush=True)
                break
            rates = self._all("limit", sms=sms)
            static = {
                (family, name): self._pool.by_shares(family, [rate[name] for rate in rates])
                for family in given.families
                for name in ("flops", "bandwidth")
            }
            waiting = []
            for family, model in itertools.product(given.families, given.models):
                alone, losses = self._alone(family, model)
                auto = self._pool.by_work(family, work_of(alone, rows_of[family, model]), halo_of[family])
                waiting.append((family, model, alone, losses, auto))
            for family, model, alone, losses, auto in waiting:
                if time.monotonic() > self._end:
                    print(f"out of time: {family} {model} with {sms} multiprocessors was not run", flush=True)
                    auto.cancel()
                    continue
                splits = {
                    "even": self._even[family].result(),
                    **{name: static[family, name].result() for name in ("flops", "bandwidth")},
                    "auto": auto.result(),
                }
                self._compare(family, model, sms, rates, alone, losses, splits)

    def _all(self, do: str, **item: Any) -> list[Any]:
        return self._ranks.run({"do": do, **item})

    def _how(self, family: str, model: str) -> dict[str, Any]:
        given = self._arguments
        return {"family": family, "model": model, "precision": given.precision, "seed": given.seed}

    def _alone(self, family: str, model: str) -> tuple[list[Alone], list[float]]:
        found = self._all("alone", **self._how(family, model), epochs=self._arguments.alone)
        nodes = self._arguments.nodes
        alone = [Alone(f["whole"], f["thin"], nodes, f["whole_edges"], f["thin_edges"]) for f in found]
        return alone, found[0]["losses"]

    def _row_seconds(self, family: str, model: str) -> float:
        """Of a row that travels, by an even split over whole devices, which hardly wait for each other."""
        split = self._even[family].result()
        self._all("build", name="even", **self._how(family, model), path=str(split.path))
        found = self._all("turns", names=["even"], turns=2)
        self._all("drop")
        median = timing_of(found[0]["even"]["samples_ms"]).median_ms
        waits = min(each["even"]["waits"] for each in found)
        return waits * median / 1e3 / max(1, *(size.halo + size.sent for size in split.sizes))

    def _compare(
        self,
        family: str,
        model: str,
        sms: int,
        rates: list[dict[str, Any]],
        alone: list[Alone],
        losses: list[float],
        splits: dict[str, Split],
    ) -> None:
        """Train the splits in turns and record a row of each."""
        given = self._arguments
        built = {
            name: self._all("build", name=name, **self._how(family, model), path=str(split.path))
            for name, split in splits.items()
        }
        found = self._all("turns", names=list(splits), turns=given.epochs)
        self._all("drop")
        timings = {name: timing_of(found[0][name]["samples_ms"]) for name in splits}
        for name, split in splits.items():
            row: dict[str, Any] = {
                "kind": "unequal", "system": name, "graph": family, "model": model, "dtype": given.precision,
                "shape": f"{model} {sms} sms", "sms": sms, "seed": given.seed, "num_nodes": given.nodes,
                "num_edges": alone[0].num_edges, "rates": rates, "sizes": [asdict(size) for size in split.sizes],
                "shares": [size.inner / given.nodes for size in split.sizes],
                "predicted_ms": [1e3 * seconds for seconds in split.seconds],
                "split_seconds": split.took_seconds, "build_seconds": built[name][0]["seconds"],
                "cuda_graphs": built[name][0]["recorded"], "losses": built[name][0]["losses"],
                "samples_ms": found[0][name]["samples_ms"], "waits": [rank[name]["waits"] for rank in found],
                **figures(timings, name, alone),
            }  # fmt: skip
            ours = row["losses"][:3]
            worst = max(abs(a - b) / abs(b) for a, b in zip(ours, losses[:3], strict=True))
            if worst > _LOSS_RTOL[given.precision]:
                self._recorder.add(row | {"error": f"wrong result: losses {ours}, of one device {losses[:3]}"})
            else:
                self._recorder.add(row, timings[name])


def figures(timings: dict[str, Timing], name: str, alone: list[Alone]) -> dict[str, Any]:
    """How a split compares with the others and with the bound.

    Returns:
        ``alone_ms``, ``bound_ms``, ``over_bound`` (1: as the bound), ``gain_share`` (0: as even shares, 1: as the
        bound) and ``best_static_ratio`` (above 1: faster than the best of the static splits).
    """
    bound, own, even = bound_ms(alone), timings[name].median_ms, timings["even"].median_ms
    static = min(timing.median_ms for other, timing in timings.items() if other != "auto")
    return {
        "alone_ms": [each.whole_ms for each in alone],
        "bound_ms": bound,
        "over_bound": own / bound,
        "gain_share": (even - own) / (even - bound) if even > bound else None,
        "best_static_ratio": static / own,
    }


def _halo_fraction(sizes: tuple[PartSizes, ...]) -> float:
    return sum(size.halo for size in sizes) / sum(size.inner for size in sizes)


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    head = f"{row['graph'].removesuffix('-like')} {row['model']} {row['sms']} {row['system']}"
    if "error" in row:
        return f"{head:32} {row['error']}"[:120]
    shares, waits = ("/".join(f"{value:.2f}" for value in row[name]) for name in ("shares", "waits"))
    gain = "" if row["gain_share"] is None else f"{row['gain_share']:.0%}"
    return (
        f"{head:32}{row['median_ms']:9.2f} ms {row['p20_ms']:.2f}-{row['p80_ms']:.2f}  shares {shares}  waits {waits}  "
        f"bound x {row['over_bound']:.3f}  gain {gain}"
    )


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
    parser.add_argument("--alone", type=int, default=4, help="timed epochs of the whole graph on each device")
    parser.add_argument("--seconds", type=float, default=480.0, help="then no further comparison is begun")
    parser.add_argument("--splitters", type=int, default=6, help="processes that split graphs")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 6), help="of each process")
    parser.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> Recorder:
    """Run what the options ask for."""
    arguments = parse(given)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    recorder = Recorder(arguments.rows, torch.device("cuda:0" if arguments.device == "cuda" else "cpu"), line_of)
    memory, needed = Path("/dev/shm"), len(arguments.families) * 8 * arguments.arcs
    is_roomy = memory.is_dir() and shutil.disk_usage(memory).free > needed
    with tempfile.TemporaryDirectory(dir=memory if is_roomy else None) as folder:
        benchmark = Benchmark(arguments, recorder, Path(folder))
        try:
            benchmark.run()
        finally:
            benchmark.close()
    return recorder


if __name__ == "__main__":
    main()
