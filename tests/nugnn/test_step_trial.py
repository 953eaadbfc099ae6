"""A run in which ways of gradients were tried goes on in the bits of one that was told which to take."""

from __future__ import annotations

import copy
import random
import threading
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from exactness import NUM_FEATURES, make_graph, make_parts
from nugnn.comm import backward_sums
from nugnn.comm.compression import gradient_sync
from nugnn.comm.compression.choice import CANDIDATES, Choice
from nugnn.comm.compression.step_trial import Timed
from nugnn.comm.groups import Ranks
from nugnn.comm.step_watch import StepWatch
from nugnn.history import History
from nugnn.models import GNN
from nugnn.networks import MLP
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture
from rank_pool import RankError
from sample_cases import NUM_CLASSES, make_data
from shard_calls import shard_of
from trainers import graph_trainer

_LONG_SECONDS = 1.0
SUMS = Choice("4bit", {"fp32": 4e-6, "bf16": 3e-6, "8bit": 2e-6, "4bit": 1e-6}, 7)
"""So short that steps hide any of them, on whatever machine."""


class _Counting(nn.Module):
    """Changes itself and its input and draws random numbers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(72, NUM_CLASSES, hidden=64, layers=3, norm="batch", dropout=0.3)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        random.random(), np.random.rand()
        with torch._C.DisableTorchFunction():  # what no mode sees
            torch.rand(())
        return self.net(x.mul_(1.5))  # type: ignore[no-any-return]


def _trainer(ranks: Ranks, grad_sync: str, model: nn.Module | None = None, **how: Any) -> Trainer:
    torch.manual_seed(0)
    random.seed(0), np.random.seed(0)
    model = _Counting() if model is None else model
    sizes = {1: (12,), 2: (9, 3)}[ranks.world_size]
    family = SampleFamily(model, make_data("images", 36, torch.float32), ranks, sizes=sizes, seed=3, **how)
    return Trainer(family, grad_sync=grad_sync)


def _taking(name: str, asked: list[str | None]) -> Any:
    """Sums alone choose `SUMS`; all ways are tried in real steps, and ``name`` is taken."""

    def tried(choice: Choice, timed: Timed, ranks: Ranks) -> Choice:
        for way in (None, *CANDIDATES, "4bit"):
            asked.append(way)
            assert timed(way) > 0
        return replace(choice, name=name, step_seconds=dict.fromkeys(CANDIDATES, 0.1), trial_seconds=1.0)

    return mock.patch.multiple(gradient_sync, choose=mock.Mock(return_value=SUMS), tried=tried)


def _all_of(trainer: Trainer) -> dict[str, Any]:
    """All that a checkpoint keeps and more, but for seconds and the choice itself."""
    shared, own = copy.deepcopy(capture(trainer, History()))
    (shared["grad_sync"] or {}).pop("choice", None)
    own.pop("seconds"), own["in_progress"].pop("seconds")
    report = trainer.grad_sync.report() or {}
    counts = {key: report.get(key) for key in ("steps", "sent_bytes", "arranged")}
    model = trainer.model
    return {
        "shared": shared | {"grad_sync": shared["grad_sync"] or None}, "own": own, "counts": counts,
        "calls": getattr(model, "calls", None), "random": (random.random(), np.random.rand(), torch.rand(()).item()),
        "attributes": {path: sorted(vars(module)) for path, module in model.named_modules()},
        "hooks": [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()],
    }  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def _num_lanes() -> int:
    return sum(thread.name == "nugnn-gradients" for thread in threading.enumerate())


def _against_forced(ranks: Ranks, name: str, how: dict[str, Any]) -> list[Any]:
    asked: list[str | None] = []
    with mock.patch.multiple(backward_sums, FIRST_BUCKET_BYTES=1, BUCKET_BYTES=20_000):
        forced = _trainer(ranks, name, **how)
        losses = [forced.train_epoch() for _ in range(2)]
        expected = _all_of(forced)
        threads = _num_lanes()
        auto = _trainer(ranks, "auto", **how)
        watch = StepWatch.of(ranks)
        with _taking(name, asked):
            found = [auto.train_epoch() for _ in range(2)]
        ranks.clock.watcher = None
    until = time.perf_counter() + 10
    while _num_lanes() > threads + (name != "fp32") and time.perf_counter() < until:
        time.sleep(0.01)
    assert _num_lanes() == threads + (name != "fp32")
    said = [auto.grad_sync.news(), auto.grad_sync.news()]
    by_step = [[what for what, *_ in step] for step in watch.steps()]
    names = [key for key in expected if not _same(expected[key], now[key])] if (now := _all_of(auto)) else []
    return [asked, found == losses, names, by_step, said, auto.grad_sync.report()]


@pytest.mark.parametrize("name", CANDIDATES)
def test_nothing_is_left_of_a_trial(ranks: Any, name: str) -> None:
    how = {"batch_norm": "local"} if name == "bf16" else {"micro_batches": 3} if name == "8bit" else {}
    for asked, same_losses, different, by_step, said, report in ranks.run(2, _against_forced, name, how):
        assert asked == [None, *CANDIDATES, "4bit"] and same_losses and different == []
        num_parts = how.get("micro_batches", 1)
        assert len(by_step) == 6 and all(step.count("forward") == num_parts for step in by_step)
        assert said[0].startswith(f"grad_sync auto: {name}, which ") and said[1] is None
        assert report["choice"]["name"] == report["wire"] == name and report["choice"]["trial_seconds"] == 1.0


def _on_a_graph(ranks: Ranks) -> Trainer:
    data = make_graph(dtype=torch.float32)
    graph = shard_of(ranks, data, make_parts(data, ranks.world_size, "metis_unequal"))
    rows = {"train": torch.isin(graph.global_node_ids, data.train_nodes).nonzero().flatten()}
    model = GNN("sage", NUM_FEATURES, int(data.num_classes), hidden=48, layers=2)
    return graph_trainer(model, graph, rows, grad_sync="auto")


def _not_tried(ranks: Ranks) -> list[list[str | None]]:
    found = []
    for begin in ("resumed", "open", "graph"):
        asked: list[str | None] = []
        trainer = _on_a_graph(ranks) if begin == "graph" else _trainer(ranks, "auto")
        if begin == "resumed":
            trainer.grad_sync.load({"choice": {"name": "fp32", "seconds": {}, "num_values": 7}}, {})
        with _taking("bf16", asked):
            if begin == "open":
                trainer.grad_sync.open(1.0)
            trainer.train_epoch()
        found.append(asked)
    return found


def test_who_has_chosen_or_hides_nothing_tries_nothing(ranks: Any) -> None:
    for num_ranks in (1, 2):
        assert ranks.run(num_ranks, _not_tried) == [[[], [], []]] * num_ranks


def _measured(ranks: Ranks) -> dict[str, Any]:
    trainer = _trainer(ranks, "auto")
    with mock.patch.object(gradient_sync, "choose", return_value=SUMS):
        trainer.step(next(iter(trainer.family.steps(0))))
    trainer.train_epoch()
    return trainer.grad_sync.report()["choice"]  # type: ignore[index, no-any-return]


def test_real_steps_decide_alike_on_all_ranks(ranks: Any) -> None:
    first, second = ranks.run(2, _measured)
    assert first == second and {*first["step_seconds"]} == {"fp32", "bf16", "4bit"} and first["trial_seconds"] > 0


def _epoch_seconds(ranks: Ranks) -> float:
    def tried(choice: Choice, timed: Timed, ranks: Ranks) -> Choice:
        time.sleep(_LONG_SECONDS)
        return choice

    with mock.patch.multiple(gradient_sync, choose=mock.Mock(return_value=SUMS), tried=tried):
        return _trainer(ranks, "auto").fit(1).epochs[0].seconds["epoch"]


def test_a_trial_is_no_time_of_an_epoch(ranks: Any) -> None:
    assert all(seconds < _LONG_SECONDS for seconds in ranks.run(2, _epoch_seconds))


class _Failing(_Counting):
    def __init__(self, on_call: int) -> None:
        super().__init__()
        self._on_call = on_call

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == self._on_call:
            raise ArithmeticError("of the model")
        return super().forward(x)


def _failing(ranks: Ranks) -> None:
    trainer = _trainer(ranks, "auto", _Failing(7 if ranks.rank else -1))
    with _taking("bf16", []):
        trainer.train_epoch()


@pytest.mark.slow
def test_an_error_in_a_trial_is_that_of_the_model(ranks: Any) -> None:
    with pytest.raises(RankError, match="of the model") as caught:
        ranks.run(2, _failing)
    assert caught.value.rank == 1
