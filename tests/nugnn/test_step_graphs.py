"""Steps as CUDA graphs have the bits of steps as usual, whatever changes from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.comm.compression.choice import Choice
from nugnn.comm.groups import Ranks
from nugnn.models import GNN
from nugnn.sample_family import SampleFamily
from nugnn.step_graphs import CaptureError, StepFacts, records_steps
from nugnn.trainer import Trainer
from sample_cases import make_data, make_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=model_is_on_gpu(model))


def model_is_on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def _family(model: nn.Module, ranks: Ranks, kind: str = "images", **options: Any) -> SampleFamily:
    data = make_data(kind, 50, torch.float32)
    return SampleFamily(model.to(ranks.device), data, ranks, sizes=(8,), seed=3, **options)


class _Counting(nn.Module):
    """Asks the GPU for a number in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(72, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flatten(1))
        return out * (2 if float(out.sum()) > 0 else 1)


def test_a_choice_that_is_not_to_be_had_is_refused() -> None:
    family = _family(make_model("mlp"), Ranks())
    assert not records_steps("auto", family) and not records_steps("off", family)
    with pytest.raises(ValueError, match="does not compute on a GPU; leave it at auto or off"):
        Trainer(family, cuda_graphs="on")
    with pytest.raises(ValueError, match="must be auto, on or off"):
        Trainer(family, cuda_graphs="yes")  # type: ignore[arg-type]


def test_auto_leaves_steps_alone_in_which_halo_rows_travel() -> None:
    facts: dict[str, Any] = {
        "is_known": True, "is_on_gpu": True, "carries_cuda": True, "compresses": False, "precision": "fp32",
        "why_not_family": None, "has_triton": True,
    }  # fmt: skip
    for choice, expected in (("auto", [True, True, False]), ("on", [True] * 3), ("off", [False] * 3)):
        cases = [(False, False), (True, False), (True, True)]
        found = [
            StepFacts(choice=choice, is_split=split, exchanges_rows=rows, **facts).is_recorded for split, rows in cases
        ]
        assert found == expected, choice


class _Watched:
    """Stands for recorded steps, of which a CPU has none: counts those that it is asked to run."""

    num_run = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).num_run = 0

    def aside(self) -> nullcontext[None]:
        return nullcontext()

    def run(self, works: Any, step: int, passes: Any, on_loss: Any = None) -> Any:
        type(self).num_run += 1
        return passes(works, on_loss)


def _steps_recorded(ranks: Ranks, grad_sync: str, chosen: str, is_prepared: bool) -> tuple[int, int]:
    """How many of a run's steps went to recorded ones, as if on GPUs with NCCL; and all of them."""

    def facts(**known: Any) -> StepFacts:
        return StepFacts(**{**known, "is_on_gpu": True, "carries_cuda": True, "has_triton": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nugnn.comm.compression.gradient_sync.choose", lambda *_: Choice(chosen, {}, 0))
        patch.setattr("nugnn.step_graphs.StepFacts", facts)
        patch.setattr("nugnn.trainer.StepGraphs", _Watched)
        data = make_data("images", 32, torch.float32)
        family = SampleFamily(make_model("mlp"), data, ranks, sizes=(8, 8), seed=3)
        trainer = Trainer(family, grad_sync=grad_sync)
        if is_prepared:  # as nugnn.fit does, which says what was chosen
            trainer.grad_sync.prepare()
        _Watched.num_run = 0
        trainer.train_epoch()
        trainer.step([next(iter(family.steps(1, 0)))[0]])
        return _Watched.num_run, trainer.num_steps


@pytest.mark.parametrize(
    ("grad_sync", "chosen", "is_recorded"), [("auto", "fp32", True), ("auto", "8bit", False), ("8bit", "", False)]
)
@pytest.mark.parametrize("is_prepared", [True, False])
def test_gradients_that_come_to_float32_by_themselves_leave_steps_to_be_recorded(
    ranks: Any, grad_sync: str, chosen: str, is_recorded: bool, is_prepared: bool
) -> None:
    for num_run, num_steps in ranks.run(2, _steps_recorded, grad_sync, chosen, is_prepared):
        assert num_steps == 3 and num_run == (num_steps if is_recorded else 0)


@pytest.mark.gpu
@needs_gpu
def test_auto_records_what_is_known_to_be_fit_for_it() -> None:
    ranks = Ranks(device=torch.device("cuda", 0))
    assert records_steps("auto", _family(make_model("mlp"), ranks))
    assert not records_steps("auto", _family(nn.Sequential(nn.Flatten(), nn.Linear(72, 5)), ranks))
    assert not records_steps("auto", _family(make_model("mlp"), ranks), has_regularizer=True)
    assert not records_steps("auto", _family(make_model("mlp"), ranks, loss=nn.CrossEntropyLoss(reduction="none")))
    hooked = make_model("mlp")
    hooked.register_forward_hook(lambda module, x, out: None)
    assert not records_steps("auto", _family(hooked, ranks))
    for options, why in (({"precision": "fp16"}, "depends on its gradients"), ({"micro_batches": 2}, "micro_batches")):
        assert not records_steps("auto", _family(make_model("mlp"), ranks, **options))
        with pytest.raises(ValueError, match=why):
            records_steps("on", _family(make_model("mlp"), ranks, **options))


def _losses_and_state(model: nn.Module, cuda_graphs: str, kind: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    ranks = Ranks(device=torch.device("cuda", 0))
    val = make_data(kind, 20, torch.float32)
    trainer = Trainer(
        _family(model, ranks, kind, val=val, **options), make_optimizer=_adamw, clip_norm=1.0,
        cuda_graphs=cuda_graphs, schedule=lambda step: 1 / (1 + step),  # type: ignore[arg-type]
    )  # fmt: skip
    history = trainer.fit(4)
    assert trainer._graphs is None or trainer._graphs.num_recorded == 2  # the last batch of an epoch has 2 samples
    return [(epoch.loss, epoch.val) for epoch in history.epochs], model.state_dict()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "transformer-max", "torch-attention"])
def test_samples_recorded_have_the_same_bits(name: str, precision: str) -> None:
    kind = "tokens" if "transformer" in name or "attention" in name else "images"
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1])
    options: dict[str, Any] = {"precision": precision, "class_weights": weights if precision == "amp" else None}
    usual = _losses_and_state(make_model(name), "off", kind, **options)
    recorded = _losses_and_state(make_model(name), "on", kind, **options)
    assert recorded[0] == usual[0]
    for key, value in usual[1].items():
        assert torch.equal(recorded[1][key], value), key


class _Frozen(nn.Module):
    """Its first layer can be frozen between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(72, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(1)).relu())  # type: ignore[no-any-return]


@pytest.mark.gpu
@needs_gpu
def test_a_layer_frozen_on_the_way_stays_as_it_is() -> None:
    results = []
    for cuda_graphs in ("off", "on"):
        torch.manual_seed(0)
        model = _Frozen()
        trainer = Trainer(
            _family(model, Ranks(device=torch.device("cuda", 0))), make_optimizer=_adamw, cuda_graphs=cuda_graphs
        )
        for epoch in range(4):
            trainer.train_epoch()
            model.first.requires_grad_(epoch != 1)
        results.append(model.state_dict())
    for key, value in results[0].items():
        assert torch.equal(results[1][key], value), key


@pytest.mark.gpu
@needs_gpu
def test_a_step_that_waits_for_a_number_is_refused_by_name() -> None:
    trainer = Trainer(_family(_Counting(), Ranks(device=torch.device("cuda", 0))), cuda_graphs="on")
    with pytest.raises(CaptureError, match=r"cannot be recorded as a CUDA graph.*cuda_graphs off"):
        trainer.train_epoch()
    usual = Trainer(_family(_Counting(), Ranks(device=torch.device("cuda", 0))))
    assert usual.train_epoch() > 0  # the process goes on


def _two_cards() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_samples_on_two_cards_have_the_bits_of_steps_as_usual(name: str) -> None:
    _two_cards()
    data = make_data("tokens" if name == "transformer" else "images", 50, torch.float32)
    options: dict[str, Any] = {"workers": 2, "device": "cuda", "epochs": 4, "batch_split": (5, 3), "seed": 3}
    usual, recorded = (nugnn.fit(make_model(name), data, cuda_graphs=choice, **options) for choice in ("off", "on"))
    assert [epoch.loss for epoch in recorded.history] == [epoch.loss for epoch in usual.history]
    for key, value in usual.model.state_dict().items():
        assert torch.equal(recorded.model.state_dict()[key], value), key


@pytest.fixture
def graph_options() -> Iterator[dict[str, Any]]:
    yield {"epochs": 8, "check": False, "seed": 3, "device": "cuda"}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gin"])
@pytest.mark.parametrize("workers", [1, 2])
def test_graphs_recorded_have_the_same_bits(kind: str, workers: int, graph_options: dict[str, Any]) -> None:
    if workers > 1:
        _two_cards()
    results = []
    for choice in ("off", "on"):
        torch.manual_seed(0)
        model = GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, norm="layer")
        results.append(nugnn.fit(model, make_graph(), workers=workers, cuda_graphs=choice, **graph_options))
    usual, recorded = results
    assert [epoch.loss for epoch in recorded.history] == [epoch.loss for epoch in usual.history]
    assert torch.equal(recorded.logits, usual.logits)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gin"])
def test_a_graph_on_one_card_is_recorded_unasked(kind: str, precision: str, activations: str) -> None:
    """Features that change in between, and a layer that is frozen, are seen."""
    found = []
    for choice in ("off", "auto"):
        torch.manual_seed(0)
        model = GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, norm="batch", dropout=0.5)
        ranks = Ranks(device=torch.device("cuda", 0))
        graph = nugnn.shard(make_graph(), ranks)
        rows = torch.arange(graph.num_nodes(), device=ranks.device)
        splits = {"train": rows[::2], "val": rows[1::2], "test": rows[1::2]}
        options = {"precision": precision, "activations": activations, "seed": 3}
        family = nugnn.GraphFamily(model.to(ranks.device), graph, splits, **options)  # type: ignore[arg-type]
        trainer = Trainer(family, make_optimizer=_adamw, cuda_graphs=choice)  # type: ignore[arg-type]
        losses, counts = [], []
        for epoch in range(15):
            losses.append(trainer.train_epoch())
            counts.append(trainer.num_recorded)
            if epoch == 4:
                graph.ndata["feat"].mul_(0.5)
            if epoch == 9:
                next(model.parameters()).requires_grad_(False)
        assert counts[4] == counts[14] == (choice == "auto")
        found.append((losses, family.predict(15), model.state_dict()))
    usual, recorded = found
    assert recorded[0] == usual[0] and torch.equal(recorded[1], usual[1])
    for key, value in usual[2].items():
        assert torch.equal(recorded[2][key], value), key
