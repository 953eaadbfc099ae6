"""What a run reports of its halo exchanges: the same names and counts on all ranks, bytes and seconds that add up."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph, make_parts
from mocked_link import mocked_link
from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.halo_traffic import DIRECTIONS, ExchangeTraffic
from nugnn.config import TrainConfig
from nugnn.history import Epoch, History
from nugnn.models import GNN
from nugnn.run import run_from_config
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore
from shard_calls import make_data, shard_of
from trainers import graph_trainer

WIDTH = 24
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, overlapping": {"overlap": "on"},
    "int4": {"halo_wire": "int4", "overlap": "off"},
    "int2, overlapping, again": {"halo_wire": "int2", "overlap": "backward", "activations": "recompute"},
    "kept": {"halo_wire": "int4", "halo_feedback": True},
    "bf16, late": {"halo_wire": "bf16", "halo_mode": "stale"},
    "int8, some": {"halo_wire": "int8", "halo_mode": "sampled:0.5"},
    "auto": {"halo_wire": "auto", "halo_target": "0.001s"},
}


def _trainer(ranks: Ranks, model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or GNN("gin", NUM_FEATURES, NUM_CLASSES, hidden=WIDTH, layers=3, dropout=0.3).float()
    data = make_graph(dtype=torch.float32)
    graph = shard_of(ranks, data, make_parts(data, ranks.world_size, "metis_unequal"))
    ids = graph.global_node_ids
    splits = {"train": data.train_nodes, "val": data.val_nodes, "test": data.test_nodes}
    rows = {split: torch.isin(ids, nodes).nonzero().flatten() for split, nodes in splits.items()}
    make = functools.partial(torch.optim.Adam, lr=0.02, eps=1e-5)
    return graph_trainer(model, graph, rows, seed=7, make_optimizer=lambda m: make(m.parameters()), **options)


EPOCHS = 6
_BITS = {"int8": 8, "int4": 4, "int2": 2, "auto": 2}


def _report(ranks: Ranks, way: str) -> tuple[dict[str, Any], list[Epoch]]:
    with mocked_link(ranks):
        trainer = _trainer(ranks, **WAYS[way])
        epochs = trainer.fit(EPOCHS).epochs
    return trainer.family.report()["halo"], epochs


@pytest.mark.parametrize("way", WAYS)
def test_names_and_counts_are_those_of_all_ranks_and_bytes_and_seconds_add_up(ranks: Any, way: str) -> None:
    results = ranks.run(3, _report, way)
    counts = [
        {direction: {name: each["count"] for name, each in of.items()} for direction, of in report["exchanges"].items()}
        for report, _ in results
    ]
    assert counts[0] == counts[1] == counts[2]
    assert set(counts[0]) == set(DIRECTIONS)
    names = [f"layers.{layer}/spmm" for layer in (1, 2)]
    runs_again = EPOCHS * (2 if "again" in way else 1)
    for name in names:
        assert counts[0]["gradient"][f"gradient of halo of {name}"] == EPOCHS
        assert EPOCHS <= counts[0]["forward"][f"halo of {name}"] <= runs_again
        assert counts[0]["evaluation"][f"halo of {name}"] == EPOCHS
    for report, epochs in results:
        for direction, of in report["exchanges"].items():
            assert sum(each["bytes"] for each in of.values()) == report[f"{direction}_bytes"] > 0
            assert all(each["seconds"] > 0 for each in of.values())
        in_training = [each for name in ("forward", "gradient") for each in report["exchanges"][name].values()]
        waited = sum(each["seconds"] for each in in_training)
        assert waited <= sum(epoch.seconds["epoch"] for epoch in epochs)
        if "some" not in way:  # which asks once for the ids of halo rows
            # the clock adds the same numbers in another order: some 100 of them
            assert waited == pytest.approx(sum(epoch.seconds["halo"] for epoch in epochs), rel=1e-12)
        assert all(each["error"] == 0 for each in report["exchanges"]["evaluation"].values())
        if report["wire"] == "fp32":
            assert all(each["error"] == 0 for each in in_training)
    wire = results[0][0]["wire"]
    if wire == "fp32":
        return
    # a step of a row is its range / (2**bits - 1), and its norm at least range / sqrt(2)
    largest = 2.0**-8 if wire == "bf16" else math.sqrt(2 * WIDTH) / (2 ** _BITS[wire] - 1)
    for direction, label in (("forward", "halo"), ("gradient", "gradient of halo")):
        for name in names:
            errors = [report["exchanges"][direction][f"{label} of {name}"]["error"] for report, _ in results]
            assert all(0 <= error <= largest for error in errors)
            # a rank may have no gradient; `auto` may leave gradients as they are
            assert max(errors) > 0 or (wire, direction) == ("auto", "gradient")


def _bits_of_a_run(ranks: Ranks, way: str, looks: bool) -> tuple[list[float], list[Tensor], int]:
    with (
        mocked_link(ranks),
        mock.patch.object(ExchangeTraffic, "is_due", lambda *_: looks),
    ):
        trainer = _trainer(ranks, **WAYS[way])
        losses = [trainer.train_epoch() for _ in range(EPOCHS)]
    report = trainer.family.report()["halo"]["exchanges"]
    unknown = sum(each["error"] is None for of in report.values() for each in of.values())
    return losses, [p.detach().clone() for p in trainer.model.state_dict().values()], unknown


@pytest.mark.parametrize("way", [way for way in WAYS if "halo_wire" in WAYS[way]])
def test_measuring_changes_no_bit(ranks: Any, way: str) -> None:
    always, never = (ranks.run(2, _bits_of_a_run, way, looks) for looks in (True, False))
    for (losses, weights, known), (others, same, unknown) in zip(always, never, strict=True):
        assert losses == others and all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
        assert known == 0 and (unknown > 0 or way == "auto")


def _resumed(ranks: Ranks, folder: Path) -> list[tuple[int, float | None]]:
    """Counts and errors of a layer: before a checkpoint, and of a trainer that goes on from it."""

    def seen(trainer: Trainer) -> tuple[int, float | None]:
        each = trainer.family.report()["halo"]["exchanges"]["forward"].get("halo of layers.1/spmm")
        return (0, None) if each is None else (each["count"], each["error"])

    first = _trainer(ranks, halo_wire="int4")
    for _ in range(2):
        first.train_epoch()
    shared, own = capture(first, History())
    where = write_checkpoint(folder, ranks, epoch=2, shared=shared, own=own, identity={})
    second = _trainer(ranks, halo_wire="int4")
    restore(second, open_checkpoint(where))
    found = [seen(first), seen(second)]
    second.train_epoch()
    return [*found, seen(second)]


def test_a_resumed_run_reports_what_its_process_did(ranks: Any, tmp_path: Path) -> None:
    for first, before, after in ranks.run(2, _resumed, tmp_path):
        assert first[0] == 2 and before == (0, None) and after[0] == 1
        assert first[1] is not None and after[1] is not None and first[1] != after[1]


def _moved(ranks: Ranks) -> tuple[int, int, int]:
    """Exchanges of a layer before and after nodes have moved, and the bytes that were forgotten."""
    trainer = _trainer(ranks, halo_wire="int8")
    family = trainer.family
    trainer.train_epoch()
    before = family.report()["halo"]
    from nugnn.held_rows import HeldRows

    held = HeldRows(trainer.model, trainer.optimizer, family.graph, trusts_user=False)
    destination = torch.full((family.graph.num_nodes(),), ranks.rank)
    destination[0] = (ranks.rank + 1) % ranks.world_size
    family.move(destination, held)
    trainer.train_epoch()
    after = family.report()["halo"]
    counts = (report["exchanges"]["forward"]["halo of layers.1/spmm"]["count"] for report in (before, after))
    return *counts, max(0, before["forward_bytes"] - after["forward_bytes"])


def test_counts_go_on_where_nodes_have_moved(ranks: Any) -> None:
    assert ranks.run(2, _moved) == [(1, 2, 0)] * 2


def _own_loop(ranks: Ranks) -> dict[str, tuple[int, bool]]:
    graph = shard_of(ranks, make_data())
    interceptor = nugnn.intercept(nn.Identity(), graph, seed=1, halo_wire="int2")
    x = torch.randn(graph.num_nodes(), 30, generator=torch.Generator().manual_seed(ranks.rank)).requires_grad_()
    for step in range(41, 44):
        with interceptor.step(step):
            nugnn.halo(x, graph).sum().backward()
    report = interceptor.find(HaloHandler).traffic.report()["exchanges"]
    named = {**report["forward"], **report["gradient"]}
    return {name: (each["count"], each["error"] is not None) for name, each in named.items()}


def test_an_own_loop_finds_the_same_in_its_interceptor(ranks: Any) -> None:
    name = "halo of source rows of a user function"
    assert ranks.run(2, _own_loop) == [{name: (3, True), f"gradient of {name}": (3, True)}] * 2


@pytest.mark.slow
def test_result_json_has_each_exchange(tmp_path: Path) -> None:
    how: dict[str, Any] = {"dataset": "digits", "workers": 2, "seed": 1, "halo_wire": "int4", "epochs": 3}
    result = run_from_config(TrainConfig(**how, out=str(tmp_path)))
    for rank in result["ranks"]:
        of_layer = rank["halo"]["exchanges"]["gradient"]["gradient of halo of layers.1/spmm"]
        assert of_layer["count"] == 3 and 0 < of_layer["error"] < 0.2 and of_layer["seconds"] > 0
