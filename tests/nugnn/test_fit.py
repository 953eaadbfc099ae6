"""nugnn.fit in one process and over real worker processes: the same result, and each error in one sentence."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import dgl
import pytest
import torch
from torch import nn

import nugnn
import user_models
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from launchers_time import PATIENCE_SECONDS
from nugnn.failure import WorkerFailed
from nugnn.fit_options import FitOptions
from nugnn.history import Epoch
from nugnn.models import GNN, WithNodeEmbedding

# Six steps in float64 on 61 nodes: as in test_exactness, sums in another order are off by 61 eps = 1e-14
# relative; 1e-10 leaves four orders of magnitude for what norm and softmax amplify.
FLOAT64_BOUND = 1e-10

for module in (user_models, sys.modules[__name__]):  # workers have neither on their path
    cloudpickle.register_pickle_by_value(module)


def make_model(kind: str = "gcn", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, **options).double()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max())


def test_two_workers_equal_one() -> None:
    data = make_graph()
    model = make_model(norm="batch")
    before = copy.deepcopy(model.state_dict())
    seen: list[Epoch] = []
    stages: list[str] = []
    # SGD: Adam would blow up the gradient of a bias before a batch norm, which is rounding noise around zero
    options: dict[str, Any] = dict(
        epochs=6, make_optimizer=_sgd, class_weights=torch.tensor([1.0, 2.0, 0.5, 1.0]), seed=3
    )
    one = nugnn.fit(model, data, **options)
    two = nugnn.fit(model, data, workers=2, shares=[0.7, 0.3], on_epoch=seen.append, on_stage=stages.append, **options)
    assert stages == ["start", "check", "partition", "train"]
    assert [epoch.number for epoch in seen] == [1, 2, 3, 4, 5, 6]
    assert [epoch.loss for epoch in seen] == [epoch.loss for epoch in two.history]
    for a, b in zip(one.history, two.history, strict=True):
        assert abs(a.loss - b.loss) <= FLOAT64_BOUND * abs(a.loss)
        assert (a.train, a.val, a.test) == (b.train, b.val, b.test)  # quotients of counts
    assert one.best.number == two.best.number
    assert one.logits.shape == (data.num_nodes, NUM_CLASSES)
    assert relative(one.logits, two.logits) <= FLOAT64_BOUND
    # on one scale: the bias before the norm is rounding noise
    scale = max(float(value.double().abs().max()) for value in one.model.state_dict().values())
    for name, value in one.model.state_dict().items():
        assert float((value - two.model.state_dict()[name]).abs().max()) <= FLOAT64_BOUND * scale, name
        assert torch.equal(model.state_dict()[name], before[name]), "fit changed the caller's model"
    assert sum(report["nodes"] for report in two.rank_reports) == data.num_nodes
    assert sum(report["edges"] for report in two.rank_reports) == data.num_edges
    assert all(report["halo_rows"] > 0 and report["peak_memory_bytes"] > 0 for report in two.rank_reports)
    assert two.epoch_seconds == max(report["epoch_seconds"] for report in two.rank_reports) > 0


@pytest.mark.usefixtures("forked_workers")
def test_node_embeddings_come_back_whole_and_in_order(tmp_path: Path) -> None:
    """And ``cache_folder`` keeps the shards."""
    data = make_graph(features=False, multilabel=True)
    torch.manual_seed(0)
    model = WithNodeEmbedding(data.num_nodes, 6, GNN("sage", 6, NUM_CLASSES, hidden=5)).double()
    one = nugnn.fit(model, data, epochs=4)
    two = nugnn.fit(model, data, workers=2, shares=[1, 3], epochs=4, check=False, cache_folder=tmp_path / "cache")
    rows = [result.model.state_dict()["embedding.weight"] for result in (one, two)]
    assert rows[0].shape == (data.num_nodes, 6)
    assert relative(*rows) <= FLOAT64_BOUND and relative(one.logits, two.logits) <= FLOAT64_BOUND
    assert list((tmp_path / "cache").rglob("*.safetensors"))


_SCRIPT = """
import json
import nugnn  # first: it lets DGL import
import dgl, torch
from dgl.nn import GraphConv

print("started", flush=True)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = GraphConv(5, 8), GraphConv(8, 3)
    def forward(self, graph, x):
        return self.b(graph, torch.dropout(self.a(graph, x).relu(), 0.5, self.training))

generator = torch.Generator().manual_seed(0)
graph = dgl.graph(tuple(torch.randint(0, 40, (2, 160), generator=generator)), num_nodes=40)
graph = dgl.add_self_loop(graph)
graph.ndata["feat"] = torch.randn(40, 5, generator=generator).double()
graph.ndata["label"] = torch.randint(0, 3, (40,), generator=generator)
ids = torch.arange(40)
for split, low, high in (("train", 0, 20), ("val", 20, 30), ("test", 30, 40)):
    graph.ndata[f"{split}_mask"] = (ids >= low) & (ids < high)
torch.manual_seed(0)
model = Net().double()
rate = 0.2
results = [
    nugnn.fit(
        model, graph, workers=workers, epochs=5, log_folder=None,
        make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=rate),
        loss=lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels, reduction="none") * 2,
        regularizer=lambda net: rate * net.a.weight.square().sum(),
        patience=5,
    )
    for workers in (1, 2)
]
print(json.dumps([[epoch.loss for epoch in result.history] for result in results]))
"""


def test_a_script_without_main_guard_and_with_its_own_class_and_functions(tmp_path: Path) -> None:
    """A DGLGraph, a model class and closures of the script itself; the script's body runs once."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == "started"
    one, two = json.loads(lines[1])
    assert len(one) == len(two) == 5
    assert all(abs(a - b) <= FLOAT64_BOUND * abs(a) for a, b in zip(one, two, strict=True))


def test_weight_decay_of_the_first_layer_only() -> None:
    model = GNN("gcn", 4, 3, layers=3)
    decayed, plain = (
        FitOptions(weight_decay=0.1, weight_decay_first_layer_only=True).build_optimizer(model).param_groups
    )
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model.layers[0].parameters()}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))
    first, rest = (
        FitOptions(weight_decay_first_layer_only=True).build_optimizer(user_models.Functions(4, 3)).param_groups
    )  # no `layers`: the first child with parameters
    assert len(first["params"]) == 2 and len(rest["params"]) == 4


def test_options_are_used() -> None:
    data = make_graph()
    kept = nugnn.fit(make_model(), data, epochs=30, patience=2)
    assert len(kept.history) == kept.best.number + 2 < 30
    losses = {
        name: nugnn.fit(make_model(), data, epochs=3, **option).history[-1].loss
        for name, option in {
            "plain": {},
            "lr": {"lr": 0.1},
            "weight_decay": {"weight_decay": 0.5},
            "first": {"weight_decay": 0.5, "weight_decay_first_layer_only": True},
            "seed": {"seed": 1},
            "weights": {"class_weights": torch.tensor([9.0, 1.0, 1.0, 1.0])},
        }.items()
    }
    assert len(set(losses.values())) == len(losses), losses
    several = make_graph(multilabel=True)
    micro, area = (nugnn.fit(make_model(), several, epochs=1, metric=name).best.val for name in ("micro_f1", "roc_auc"))
    assert micro != area and 0 <= min(micro, area) <= max(micro, area) <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 2, "shares": [1.0]}, "shares: 1 number for 2 workers"),
        ({"workers": 0}, "^workers is 0, must be a whole number from 1 up"),
        ({"workers": 2.0, "shares": "auto"}, "^workers is 2.0, must be a whole number from 1 up"),
        ({"workers": True}, "^workers is True, must be"),
        ({"workers": 2, "shares": [1.0, -1.0]}, "share"),
        ({"class_weights": torch.ones(2)}, r"class_weights has shape \(2,\), the data 4 classes"),
        ({"metric": "micro_f1"}, "whose nodes have one label each; use accuracy"),
        ({"metric": "nice"}, "metric 'nice' is not known; choose one of"),
        ({"loss": nn.functional.cross_entropy}, "without a mean or sum"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        nugnn.fit(make_model(), make_graph(), check=False, epochs=2, **arguments)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="no option 'weight_decy'; did you mean 'weight_decay'"):
        nugnn.fit(make_model(), make_graph(), weight_decy=0.1)
    with pytest.raises(TypeError, match="no option 'learning_rate'; did you mean 'lr'"):
        nugnn.fit(make_model(), make_graph(), learning_rate=0.1)
    with pytest.raises(TypeError, match="no option 'zzz'; it has epochs, patience"):
        nugnn.fit(make_model(), make_graph(), zzz=1)


def test_what_is_no_model_no_graph_or_no_place_to_train_from_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module; give one of its instances, GNN\(\.\.\.\)"):
        nugnn.fit(GNN, make_graph())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"give nugnn\.datasets\.load\('digits'\)"):
        nugnn.fit(make_model(), "digits")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no option 'worker'; did you mean 'workers'"):
        nugnn.fit(make_model(), make_graph(), worker=2)
    with pytest.raises(ValueError, match="called with the model and returns an optimizer"):
        nugnn.fit(make_model(), make_graph(), make_optimizer=torch.optim.SGD, check=False)
    with pytest.raises(ValueError, match="the model returns 2 columns, but labels go up to 3: it needs 4 or more"):
        nugnn.fit(GNN("gcn", NUM_FEATURES, 2).double(), make_graph(), check=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="one of several that torchrun started"):
        nugnn.fit(make_model(), make_graph())


def test_a_graph_without_training_nodes_is_refused_before_anything_starts() -> None:
    data = dataclasses.replace(make_graph(), train_nodes=torch.empty(0, dtype=torch.int64))
    stages: list[str] = []
    with pytest.raises(ValueError, match=r"there are no training nodes.*ndata\['train_mask'\]"):
        nugnn.fit(make_model(), data, on_stage=stages.append)
    assert not stages


def test_wrong_data_is_refused() -> None:
    data = make_graph()
    graph = dgl.graph((data.src, data.dst), num_nodes=data.num_nodes)
    graph.ndata["feat"] = data.features
    with pytest.raises(ValueError, match="label"):
        nugnn.fit(make_model(), graph)
    with pytest.raises(ValueError, match="one row for each of the 61 nodes"):
        nugnn.fit(user_models.ForgetsRows(NUM_FEATURES, NUM_CLASSES).double(), data)


def test_a_loss_that_diverges_says_so() -> None:
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        nugnn.fit(
            make_model().float(),
            make_graph(dtype=torch.float32),
            epochs=50,
            make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=1e30),
        )


@pytest.mark.usefixtures("forked_workers")
def test_the_check_runs_before_training_and_ends_the_workers() -> None:
    start = time.monotonic()
    with pytest.raises(nugnn.ModelDiffers, match=r"norm \(PairNorm\)"):
        nugnn.fit(user_models.WithPairNorm(NUM_FEATURES, NUM_CLASSES), make_graph(), workers=2, epochs=10**6)
    assert time.monotonic() - start < PATIENCE_SECONDS


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Fussy", r"^Fussy wants 25 nodes, got \d+ \(\S*user_models.py, line \d+\)$"),
        ("ReadsEdges", "DGLGraph.all_edges has no exact meaning on one part of a split graph"),
        ("TwoLayers", "0-in-degree nodes"),
    ],
)
def test_what_is_wrong_in_one_worker_is_the_one_message(kind: str, words: str) -> None:
    """An error of the user's, a refusal, and what DGL says; the part without the cause would wait for its peer."""
    data = make_graph(self_loops=kind != "TwoLayers")
    model = getattr(user_models, kind)(NUM_FEATURES, NUM_CLASSES).double()
    with pytest.raises(WorkerFailed, match=words) as caught:
        nugnn.fit(model, data, workers=2, shares=[0.8, 0.2], check=False, epochs=3)
    assert caught.value.exit_code == 2
    assert "Traceback" not in str(caught.value)


@pytest.mark.usefixtures("forked_workers")
def test_comm_05_a_worker_that_dies_in_epoch_2_ends_all_and_is_named(tmp_path: Path) -> None:
    """comm-05 (b)."""
    start = time.monotonic()
    model = user_models.DiesInEpochTwo(NUM_FEATURES, NUM_CLASSES).double()
    seen: list[Epoch] = []
    with pytest.raises(WorkerFailed, match="worker 1 of 3 died: exit code 86") as caught:
        nugnn.fit(
            model, make_graph(), workers=3, check=False, timeout=600, on_epoch=seen.append, log_folder=tmp_path / "logs"
        )
    assert caught.value.exit_code == 3
    assert [epoch.number for epoch in seen] == [1]
    assert str(tmp_path / "logs" / "worker-1.log") in str(caught.value)
    assert time.monotonic() - start < PATIENCE_SECONDS
