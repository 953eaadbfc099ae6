"""nugnn check: good models pass, and of others the first module that depends on the split is named."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from dgl.nn import GraphConv
from torch import nn

import fresh_interpreters
import nugnn
import user_models
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn import cli
from nugnn.check import ModelDiffers, check_model, run_check
from nugnn.check_graphs import random_graph, small_piece
from nugnn.config import TrainConfig
from nugnn.datasets.graph_data import GraphData
from nugnn.graph_run import build_model
from nugnn.models import GNN, WithNodeEmbedding

USER_MODELS = Path(user_models.__file__)
# Float64, 120 nodes, in-degrees up to 120: sums in another order are off by 120 eps = 3e-14 relative, amplified by two
# layers and a norm. What depends on the split differs by percents.
ROUNDING = 1e-10


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gcn", {"layers": 3}),
        *(("sage", {"aggregator": name}) for name in ("mean", "gcn", "pool", "lstm")),
        ("gat", {"heads": 2, "attention_dropout": 0.3}),
        ("gatv2", {"heads": 2, "out_heads": 2, "attention_dropout": 0.3}),
        *(("gin", {"aggregator": name}) for name in ("sum", "mean", "max")),
    ],
    ids=str,
)
def test_built_in_models_pass(kind: str, options: dict[str, Any], norm: str) -> None:
    report = run_check(kind, norm=norm, residual=True, dropout=0.5, input_dropout=0.2, **options)
    assert report.num_parts == 3 and report.num_nodes == 120
    assert report.num_modules > 4
    assert report.largest_difference <= ROUNDING


@pytest.mark.parametrize("name", ["TwoLayers", "Functions", "Wide"])
def test_user_models_that_are_exact_pass(name: str) -> None:
    """Constructors with two parameters, whatever their names, and message, reduce and apply functions."""
    assert run_check(f"{USER_MODELS}:{name}").largest_difference <= ROUNDING


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WithPairNorm", r"^norm \(PairNorm\) gives another result on 3 parts than on one"),
        ("Nested", r"^block\.norm \(PairNorm\) gives another result"),
        ("CenteredInline", r"^the model itself gives .* in its own code, before it calls layers\.1 \(GraphConv\)"),
        ("SoftmaxOverNodes", r"^the model itself gives another result .* although its input is the same"),
        ("WithNoise", "runs on one part but not on 3 parts: norm/random: rand_like draws random numbers by position"),
        ("WithForeignNoise", r"^norm \(_AddForeignNoise\) draws random numbers that nothing keeps equal"),
        ("ReadsEdges", "runs on one part but not on 3 parts: .*all_edges"),
    ],
)
def test_the_first_module_that_differs_is_named(name: str, words: str) -> None:
    with pytest.raises(ModelDiffers, match=words):
        run_check(f"{USER_MODELS}:{name}")


class _WrongBackward(torch.autograd.Function):
    """Right forward; the backward takes the mean over this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] - grads[0].mean(0)


def test_a_gradient_that_differs_is_named_although_outputs_agree() -> None:
    class Net(user_models.TwoLayers):
        def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
            return _WrongBackward.apply(super().forward(graph, x))

    with pytest.raises(ModelDiffers, match=r"gradient of \S+ gives another result"):
        check_model(Net(8, 4), random_graph())


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("multilabel", [True, False])
def test_every_kind_of_data(features: bool, multilabel: bool) -> None:
    """Parallel edges, isolated nodes, edge data; learnable rows where there are no features."""
    data = make_graph(features=features, multilabel=multilabel, dtype=torch.float32)
    model: nn.Module = GNN("sage", NUM_FEATURES, NUM_CLASSES)
    if not features:
        model = WithNodeEmbedding(data.num_nodes, NUM_FEATURES, model)
    assert check_model(model, data, max_nodes=40).largest_difference <= ROUNDING


def test_the_model_is_left_as_it_was() -> None:
    model = user_models.TwoLayers(8, 4).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_model(model, random_graph())
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("seed", range(5))
def test_a_piece_keeps_in_edges(seed: int) -> None:
    """Layers that refuse nodes without in-edges have to run on the piece if they run on the whole."""
    data = make_graph(seed, num_nodes=200, self_loops=False)
    piece = small_piece(data, 50)
    assert piece.num_nodes == 50 and len(piece.train_nodes) == 50
    # node_data would travel with its rows: find the piece's nodes in the whole by their features
    assert data.features is not None and piece.features is not None
    whole_id = (piece.features[:, None, :] == data.features[None]).all(2).nonzero()[:, 1]
    has_in_edge = torch.bincount(data.dst.long(), minlength=200)[whole_id] > 0
    assert torch.equal(torch.bincount(piece.dst.long(), minlength=50) > 0, has_in_edge)
    # edges are edges of the whole, or self-loops that stand for one
    src, dst = piece.src.long(), piece.dst.long()
    real = set(zip(data.src.tolist(), data.dst.tolist(), strict=True))
    pairs = zip(whole_id[src].tolist(), whole_id[dst].tolist(), strict=True)
    assert all(u == v or (u, v) in real for u, v in pairs)


def test_a_piece_of_sparse_features_and_missing_labels() -> None:
    data = make_graph(num_nodes=100)
    assert data.features is not None and data.labels is not None
    labels = data.labels.clone()
    labels[::7] = -1
    sparse = GraphData(
        name="sparse",
        num_nodes=100,
        src=data.src,
        dst=data.dst,
        features=data.features.relu().to_sparse_csr(),
        labels=labels,
        num_classes=NUM_CLASSES,
        train_nodes=torch.tensor([1, 2]),
    )
    piece = small_piece(sparse, 30)
    assert piece.features is not None and piece.features.layout is torch.strided
    assert piece.labels is not None and int(piece.labels.min()) >= 0
    assert check_model(GNN("gcn", NUM_FEATURES, NUM_CLASSES), sparse).num_nodes == 100


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return int(caught.value.code or 0)


def test_exit_codes_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("check", f"{USER_MODELS}:TwoLayers") == 0
    assert "3 unequal parts equal one part on a graph of 120 nodes" in capsys.readouterr().out
    assert exit_code("check", f"{USER_MODELS}:TwoLayers", "--dataset", "digits") == 0
    assert "on a graph of 240 nodes" in capsys.readouterr().out
    assert exit_code("check", f"{USER_MODELS}:WithPairNorm") == 2
    assert capsys.readouterr().err.startswith("nugnn: error: norm (PairNorm)")
    assert exit_code("check", f"{USER_MODELS}:Missing") == 2
    assert "it defines: TwoLayers, " in capsys.readouterr().err


class _MovingAverage(nn.Module):
    """Keeps a mean over rows in a buffer; the first output does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = GraphConv(8, 4, allow_zero_in_degree=True)
        self.register_buffer("center", torch.zeros(4))

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(graph, x)
        out = h - self.center
        if self.training:
            self.center.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return out


class _BufferOnly(_MovingAverage):
    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        super().forward(graph, x)
        return self.layer(graph, x)


class _MixesInEvaluation(_MovingAverage):
    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(graph, x)
        return h if self.training else h - h.mean(0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (_MovingAverage, "the model itself gives another result"),
        (_BufferOnly, "the buffer center is not the same on 3 parts as on one"),
        (_MixesInEvaluation, "the model itself gives another result"),
    ],
)
def test_later_steps_evaluation_and_buffers_are_compared(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(ModelDiffers, match=words):
        check_model(kind(), random_graph())


def test_the_loss_and_the_regularizer_are_compared() -> None:
    net = GNN("gcn", 8, 4, dropout=0.0)

    def centred(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits - logits.mean(0), labels, reduction="none")

    with pytest.raises(ModelDiffers, match="the gradient of"):
        check_model(net, random_graph(), loss=centred)
    check_model(net, random_graph(), regularizer=lambda model: sum(p.square().sum() for p in model.parameters()))


_USERS_FILE = """
import json
from torch import nn
from dgl.nn import GraphConv

class Net(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.layer = GraphConv(width, num_classes, allow_zero_in_degree=True)
        self.made()
    def made(self):
        pass
    def forward(self, graph, x):
        self.before(graph)
        return self.layer(graph, x)
    def before(self, graph):
        pass

class InInit(Net):
    def made(self):
        {}["gone"]                                              # line 20

class InLibrary(Net):
    def before(self, graph):
        json.loads("{")                                         # line 24

class Refused(Net):
    def before(self, graph):
        if graph.is_split:
            graph.all_edges()                                   # line 29

class Silent(Net):
    def before(self, graph):
        assert not graph.is_split                               # line 33

class NoCopy(Net):
    def __deepcopy__(self, memo):
        raise RuntimeError("one only")                          # line 37
"""


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("InInit", "InInit cannot be made for 8 features and 4 classes: KeyError: 'gone'", 20),
        ("InLibrary", "fails on one part already: JSONDecodeError: Expecting property name", 24),
        ("Refused", "runs on one part but not on 3 parts: DGLGraph.all_edges has no exact meaning", 29),
        ("Silent", "runs on one part but not on 3 parts: AssertionError", 33),
        ("NoCopy", "the model cannot be copied, so it cannot be checked: RuntimeError: one only", 37),
    ],
)
@pytest.mark.parametrize("folder", ["", "nugnn_models"])
def test_errors_point_at_the_users_last_line(
    name: str, words: str, line: int, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever lies below it: nuGNN, torch, the standard library."""
    file = tmp_path / folder / "net.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(_USERS_FILE.strip() + "\n")
    assert exit_code("check", f"{file}:{name}") == 2
    err = capsys.readouterr().err
    assert err.startswith("nugnn: error: ") and words in err
    assert err.endswith(f" ({file}, line {line})\n")


def test_a_folder_beside_nugnn_with_a_name_that_begins_alike_is_the_users() -> None:
    from nugnn import error_place

    package = Path(error_place.__file__).resolve().parent
    assert error_place.is_library(package / "check.py")
    assert not error_place.is_library(package.with_name(package.name + "_of_mine") / "net.py")


@pytest.mark.parametrize(
    "command", [("check",), ("train", "--dataset", "digits", "--model"), ("train", "--dataset", "mnist", "--model")]
)
def test_a_model_file_that_names_no_class_says_which_there_are(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused as a name that is none of the built-in ones."""
    path = tmp_path / "mine.py"
    path.write_text("from torch import nn\nclass Net(nn.Module): ...\nclass Other(Net): ...\nclass NoModel: ...\n")
    flag = "--model " if len(command) > 1 else ""
    for given in (f"{path}", f"{path}:"):
        assert exit_code(*command, given) == 2
        said = (
            f"nugnn: error: {flag}{path} is a file: name the class in it, as in mine.py:Net; it defines: Net, Other\n"
        )
        assert capsys.readouterr().err.endswith(said)
    path.write_text("x = 1\n")
    assert exit_code(*command, str(path)) == 2
    assert "as in mine.py:Class; it defines no torch.nn.Module" in capsys.readouterr().err
    path.write_text("import nowhere_at_all\n")
    assert exit_code(*command, str(path)) == 2
    assert "cannot be imported: " in capsys.readouterr().err
    assert exit_code(*command, str(tmp_path / "absent.py")) == 2
    assert f"{tmp_path / 'absent.py'} is not allowed; allowed: " in capsys.readouterr().err


def test_a_model_file_without_the_class_suggests_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("check", f"{USER_MODELS}:TwoLayer") == 2
    assert "has no class 'TwoLayer' (did you mean 'TwoLayers'?); it defines: " in capsys.readouterr().err


def test_halo_05_features_of_width_0_are_refused_before_the_model_runs() -> None:
    """On any number of workers in the same words; GAT would even train on them."""
    data = replace(random_graph(), features=torch.zeros(120, 0))
    net = nn.Sequential(nn.Linear(1, 1))  # never called
    train = TrainConfig(dataset="any", model="gat")
    for check_it in (lambda: check_model(net, data), lambda: run_check("gat", data), lambda: build_model(train, data)):
        with pytest.raises(ValueError, match=r"^features of shape \(120, 0\) hold no value; leave them out, or give"):
            check_it()


def test_nugnn_check_takes_what_fit_takes() -> None:
    data = random_graph()
    graph = dgl.graph((data.src, data.dst), num_nodes=data.num_nodes)
    graph.ndata.update(feat=data.features, label=data.labels, train_mask=torch.ones(data.num_nodes, dtype=torch.bool))
    model = GNN("gcn", data.num_features, data.num_classes)
    before = copy.deepcopy(model.state_dict())
    for given in (data, graph):
        report = nugnn.check(model, given, regularizer=lambda m: sum((p**2).sum() for p in m.parameters()))
        assert isinstance(report, nugnn.CheckReport)
        assert report.num_parts == 3 and report.num_modules > 0 and report.largest_difference < 1e-8
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert nugnn.check(model, data, num_parts=2, max_nodes=50).num_parts == 2


def test_nugnn_check_raises_what_it_found() -> None:
    data = random_graph()

    class Centred(user_models.TwoLayers):
        def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
            return super().forward(graph, x - x.mean(0))

    with pytest.raises(nugnn.ModelDiffers, match="in its own code, before it calls"):
        nugnn.check(Centred(data.num_features, data.num_classes), data)
    with pytest.raises(nugnn.ModelFails, match="fails on one part already"):
        nugnn.check(GNN("gcn", data.num_features + 1, data.num_classes), data)

    def local_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return each * each.detach().mean()

    with pytest.raises(nugnn.ModelDiffers, match="gradient of"):
        nugnn.check(GNN("gcn", data.num_features, data.num_classes), data, loss=local_loss)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"model": GNN},
            TypeError,
            r"nugnn.check: the model is .*not a torch.nn.Module; give one of its instances, GNN",
        ),
        ({"data": "cora"}, TypeError, r"nugnn.check: the data is a name or path; give nugnn.datasets.load\('cora'\)"),
        ({"num_parts": 1}, ValueError, "num_parts is 1; one part is compared with at least 2"),
        ({"max_nodes": 2}, ValueError, "max_nodes is 2 and the graph has .* nodes; 3 parts need at least one each"),
    ],
)
def test_nugnn_check_refuses(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    data = random_graph()
    arguments: dict[str, Any] = {"model": GNN("gcn", data.num_features, data.num_classes), "data": data} | change
    with pytest.raises(kind, match=words):
        nugnn.check(arguments.pop("model"), arguments.pop("data"), **arguments)


@pytest.mark.parametrize(
    "first",
    [
        "import nugnn.check",
        "from nugnn.check import check_model",
        "import nugnn.fit",
        "nugnn.ModelDiffers",
        "nugnn.check",
    ],
)
def test_the_name_stays_callable_whatever_was_imported_before(first: str) -> None:
    code = (
        f"import nugnn, inspect, warnings\nwarnings.simplefilter('default')\n{first}\n"
        "assert list(inspect.signature(nugnn.check).parameters)[:2] == ['model', 'data']"
    )
    done = fresh_interpreters.run(code, dict(os.environ))
    assert done.returncode == 0, done.stderr
