"""What each rank of `unequal_gpus.py` does: makes graphs, keeps to its limit, trains the whole graph or its part."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from device_shards import by_clusters, device_shard
from gpu_epoch import MODELS, adam
from harness import free_memory, milliseconds, moment, synchronize, timing_of
from split_pool import keep_graph

from nugnn.datasets.synthetic_device import DeviceGraph, device_graph

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

WHOLE = 132
"""Multiprocessors that a CPU stands for."""
_EPOCHS_BEFORE = 4
"""They compile, allocate, and the last is recorded where steps are CUDA graphs."""
_TURN = 3
"""Epochs of a split in a row; the first follows another split's and does not count."""
_MOST_SHARDS = 8
_MEASURED_SECONDS = 0.2

_KEPT: dict[str, Any] = {"graphs": {}, "shards": {}, "streams": {}, "alone": {}, "trainers": {}}
"""What this rank has from one command to the next; also what slows it, on a CPU."""


def work(ranks: Any, item: dict[str, Any]) -> Any:
    """One command, on every rank."""
    arguments = {name: value for name, value in item.items() if name != "do"}
    commands = {
        "make": _make, "order": _order, "limit": _limit, "rates": _rates, "alone": _alone, "times": _times,
        "build": _build, "turns": _turns, "give": _give, "drop": _drop,
    }  # fmt: skip
    return commands[item["do"]](ranks, **arguments)


def _make(ranks: Any, family: str, nodes: int, arcs: int, seed: int) -> dict[str, int]:
    """The graph on this rank's device; its edges, features and classes."""
    graph = _KEPT["graphs"][family] = device_graph(family, nodes, arcs, seed, device=ranks.device)
    synchronize(ranks.device)
    return {"edges": graph.num_edges, "features": graph.features.shape[1], "classes": graph.num_classes}


def _order(ranks: Any, family: str, folder: str, threads: int) -> None:
    """Number nodes by nested clusters; rank 0 finds them and leaves the neighbour lists for the pool."""
    before = torch.get_num_threads()
    if ranks.rank == 0:
        torch.set_num_threads(threads)
    graph = by_clusters(_KEPT["graphs"].pop(family), ranks)
    torch.set_num_threads(before)
    if ranks.rank == 0:
        keep_graph(Path(folder), family, graph.indptr.cpu().numpy(), graph.indices.cpu().numpy())
    _KEPT["graphs"][family] = graph
    free_memory()


def _limit(ranks: Any, sms: int | None) -> int:
    """Limit rank 1, or nobody; how many multiprocessors this rank has from now on."""
    from nugnn.kernels.green_context import limit_multiprocessors, usable_multiprocessors
    from slowed import slow_down

    _drop(ranks)
    mine = sms if ranks.rank == 1 else None
    if ranks.device.type == "cuda":
        streams = _KEPT["streams"]  # a limit asked for twice must not make another context
        torch.cuda.set_stream(streams.get(mine, torch.cuda.default_stream(ranks.device)))
        if mine is not None and mine not in streams:
            limit_multiprocessors(ranks.device, mine)
            streams[mine] = torch.cuda.current_stream(ranks.device)
        _KEPT["granted"] = usable_multiprocessors(ranks.device)
        return int(_KEPT["granted"])
    if (before := _KEPT.pop("slower", None)) is not None:
        before.terminate()
        before.wait()
    _KEPT["granted"] = mine or WHOLE
    if _KEPT["granted"] < WHOLE:
        _KEPT["slower"] = slow_down(os.getpid(), WHOLE / _KEPT["granted"])
    return int(_KEPT["granted"])


def _rates(ranks: Any) -> dict[str, float]:
    """FLOP/s and bytes a second of this device under its limit: what static schemes go by."""
    from nugnn.planning.measure import copied
    from nugnn.planning.measure_products import formats_of, measured_product

    dtype = "bf16" if "bf16" in formats_of(ranks.device) else "fp32"
    is_cuda = ranks.device.type == "cuda"
    return {
        "multiprocessors": _KEPT["granted"],
        "flops": measured_product(dtype, ranks.device, _MEASURED_SECONDS, lambda _: None).per_second,
        "bandwidth": copied((256 if is_cuda else 32) << 20, ranks.device, _MEASURED_SECONDS).per_second,
    }


def network(model: str, features: int, classes: int, seed: int) -> Any:
    """The model that is trained."""
    import nugnn

    torch.manual_seed(seed)
    settings = MODELS[model] | ({"aggregator": "mean"} if model == "sage" else {})
    return nugnn.GNN(model, features, classes, layers=3, dropout=0.5, input_dropout=0.0, **settings)


def trainer_of(
    shard: Any, ranks: Any, how: tuple[str, str, int], *, overlap: str = "auto", cuda_graphs: str = "on"
) -> Any:
    """Trains a shard; ``how`` are model, precision and seed. On a CPU nothing is recorded."""
    import nugnn
    from nugnn.seam import install
    from nugnn.shard_graph import ShardGraph

    install()
    model, precision, seed = how
    graph = ShardGraph(shard, ranks, keep_edge_ids=False)
    made = network(model, shard.node_data["feat"].shape[1], shard.num_classes, seed).to(ranks.device)
    rows = torch.arange(graph.num_nodes(), device=ranks.device)
    splits = {"train": rows, "val": rows[:0], "test": rows[:0]}
    family = nugnn.GraphFamily(made, graph, splits, precision=precision, seed=seed, overlap=overlap)
    return nugnn.Trainer(
        family,
        make_optimizer=lambda model: adam(model.parameters(), ranks.device),
        cuda_graphs=cuda_graphs if ranks.device.type == "cuda" else "off",
    )


def _alone(ranks: Any, family: str, model: str, precision: str, seed: int, epochs: int) -> dict[str, Any]:
    """Median milliseconds of an epoch of the whole graph on this device by itself, and first losses.

    What was measured under the same limit before is given again.
    """
    known = _KEPT["alone"]
    key = (family, model, _KEPT["granted"])
    if key not in known:
        whole = _timed_alone(ranks, _KEPT["graphs"][family], (model, precision, seed), _EPOCHS_BEFORE, epochs)
        known[key] = {"whole": whole[0], "losses": whole[1]}
    return dict(known[key])


def _timed_alone(
    ranks: Any, graph: DeviceGraph, how: tuple[str, str, int], before: int, epochs: int
) -> tuple[float, list[float]]:
    from nugnn.comm.groups import Ranks

    part = torch.zeros(graph.num_nodes, dtype=torch.int8, device=ranks.device)
    trainer = trainer_of(device_shard(graph, part, 0, 1), Ranks(device=ranks.device), how)
    losses = [trainer.train_epoch() for _ in range(before)]
    laps = laps_of(trainer, ranks.device, epochs)
    del trainer
    free_memory()
    return timing_of(laps).median_ms, losses


def _times(ranks: Any, how: bytes, family: str, path: str, travel: Any) -> Any:
    """Times of a model's operators on this rank's part, and the ways of all: both within the limits."""
    from nugnn.own_times import measured_here
    from nugnn.timed_parts import places_of, real_part

    measures, traces, by_rates = cloudpickle.loads(how)
    part = torch.from_numpy(np.load(path)).to(ranks.device)
    shard = device_shard(_KEPT["graphs"][family], part, ranks.rank, ranks.world_size)
    every_row = torch.arange(shard.num_inner, device=ranks.device)  # counts in the loss, as in `trainer_of`
    shard = dataclasses.replace(shard, train_rows=every_row)
    timed = real_part(shard, traces[ranks.rank], functools.partial(by_rates.seconds, ranks.rank))
    found = measured_here(ranks, lambda: measures[ranks.rank](places_of(timed)), travel)
    free_memory()
    return found


def laps_of(trainer: Any, device: torch.device, epochs: int) -> list[float]:
    """Milliseconds of each of so many epochs."""
    synchronize(device)
    ends = [moment(device)]
    for _ in range(epochs):
        trainer.train_epoch()
        ends.append(moment(device))
    synchronize(device)
    return [milliseconds(*pair) for pair in itertools.pairwise(ends)]


def _build(ranks: Any, name: str, family: str, model: str, precision: str, seed: int, path: str) -> dict[str, Any]:
    """A trainer of a split, ready to be timed; the seconds of what that takes."""
    begin = time.perf_counter()
    shards = _KEPT["shards"]
    if path not in shards:
        part = torch.from_numpy(np.load(path)).to(ranks.device)
        shards[path] = device_shard(_KEPT["graphs"][family], part, ranks.rank, ranks.world_size)
        if len(shards) > _MOST_SHARDS:
            del shards[next(iter(shards))]
    synchronize(ranks.device)
    cut = time.perf_counter()
    trainer = trainer_of(shards[path], ranks, (model, precision, seed))
    synchronize(ranks.device)
    made = time.perf_counter()
    losses = [trainer.train_epoch() for _ in range(_EPOCHS_BEFORE)]
    synchronize(ranks.device)
    _KEPT["trainers"][name] = trainer
    seconds = {"shard": cut - begin, "trainer": made - cut, "epochs": time.perf_counter() - made}
    return {"losses": losses, "seconds": seconds, "recorded": trainer.num_recorded > 0}


def _turns(ranks: Any, names: list[str], turns: int) -> dict[str, Any]:
    """Epochs of the trainers in turns: milliseconds of each that counts, and the share in which this rank waits."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    waited, elapsed = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for name in names * turns:
        ranks.clock.take()
        laps = laps_of(_KEPT["trainers"][name], ranks.device, _TURN)
        samples[name] += laps[1:]
        waited[name] += 1e3 * sum(ranks.clock.take())
        elapsed[name] += sum(laps)
    return {name: {"samples_ms": samples[name], "waits": waited[name] / elapsed[name]} for name in names}


def _give(
    ranks: Any, path: str, amounts: list[dict[int, float]], node_work: tuple[float, ...]
) -> tuple[npt.NDArray, npt.NDArray]:
    """Ids of nodes that leave this rank's part of a split, chosen as re-balancing does, and where they go."""
    from nugnn.partition.growth import nodes_to_give

    shard, rank = _KEPT["shards"][path], ranks.rank
    to = nodes_to_give(
        shard.indptr.cpu(), shard.indices.cpu(), shard.recv_splits, shard.send_rows.cpu(), shard.send_splits,
        own=rank, amounts=amounts[rank], node_work=node_work[rank],
    )  # fmt: skip
    leaving = to != rank
    return shard.global_node_ids.cpu()[leaving].numpy(), to[leaving].numpy()


def _drop(ranks: Any) -> None:
    """Give trainers up."""
    synchronize(ranks.device)
    _KEPT["trainers"].clear()
    gc.collect()
    free_memory()
