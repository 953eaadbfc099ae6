"""nugnn check on samples: exact models pass, and of others the first module whose rows depend on the batch is named."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset, TensorDataset, default_collate

import nugnn
from exactness import make_graph
from nugnn import cli
from nugnn.batches import Batch
from nugnn.check_samples import check_samples, compare_batch, compare_collation, first_batch
from nugnn.datasets.samples import load_samples
from nugnn.kernels.interceptor import Interceptor
from nugnn.module_traces import ModelDiffers, ModelFails
from nugnn.networks import MLP
from nugnn.sample_task import SampleTask
from sample_cases import NUM_CLASSES, RECURRENT, make_data, make_model

# Twelve samples in float64: sums of a few hundred terms in another order, through a few layers and norms of a batch.
# What depends on the division differs by percents.
ROUNDING = 1e-10


def _data(name: str) -> TensorDataset:
    return make_data("images" if name in ("mlp", "cnn", "instance-norm") else "tokens", 20, torch.float32)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "transformer-max", "torch-attention", "instance-norm"])
def test_exact_models_pass_with_a_single_sample_and_with_none(name: str) -> None:
    report = check_samples(make_model(name).float(), _data(name))
    assert (report.num_samples, report.num_parts, report.notes) == (12, 3, ())
    assert report.num_modules > 10 and report.largest_difference <= ROUNDING


@pytest.mark.parametrize("name", RECURRENT)
def test_states_of_recurrent_networks_belong_to_samples(name: str) -> None:
    """Dropout of states, of every step, and of packed steps, on unequal parts that pad to lengths of their own."""
    batch = first_batch(_data(name), 12)
    report = compare_batch(make_model(name), batch, (7, 4, 1))
    assert report.notes == () and report.num_modules > 5 and report.largest_difference <= ROUNDING


class _Net(nn.Module):
    """A perceptron with something of the user's in the middle."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(72, 8), nn.BatchNorm1d(8), nn.Linear(8, NUM_CLASSES)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.middle(self.norm(self.first(x.flatten(1))))))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over the batch": lambda x: x - x.mean(0),
    "mean over all": lambda x: x - x.mean(),
    "standard deviation": lambda x: x / (1 + x.std(0)),
    "softmax over the batch": lambda x: x.softmax(0),
    "norm over the batch": lambda x: F.normalize(x, dim=0),
    "sum": lambda x: x + x.sum(),
    "similarities": lambda x: (x @ x.T).softmax(1) @ x,
    "order": lambda x: x.sort(0).values,
    "neighbours": lambda x: x + x.roll(1, 0),
    "first sample": lambda x: x + x[:1],
    "size of the batch": lambda x: x / (1 + len(x)),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_module_that_mixes_samples_is_named(name: str) -> None:
    """As the module of the middle, and as code between two modules."""
    with pytest.raises(ModelDiffers, match=r"^middle \(_Block\) gives another result on a batch in parts of "):
        check_samples(_Net(_Block(MIXING[name])), _data("mlp"))
    with pytest.raises(ModelDiffers, match=r"^the model itself gives .* in its own code, before it calls last \(Linea"):
        check_samples(_Net(MIXING[name]), _data("mlp"))


class _Average(nn.Module):
    """A running mean of its own, over the samples that are here."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(x.mean(0).to(self.average.dtype), 0.1)
        return x


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] - grads[0].mean(0)


@torch.jit.script
def _scripted_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (_Average(), r"^the buffer middle\.average is not the same on a batch in parts of"),
        (_Block(_WrongBackward.apply), r"^the gradient of \S+ gives another result .* although all outputs agree"),
        (_Block(lambda x: x + random.random()), r"^middle \(_Block\) draws random numbers that nothing keeps equal"),
        (_Block(lambda x: x * np.random.rand()), r"^middle \(_Block\) draws random numbers that nothing keeps equal"),
        (_Block(lambda x: x if random.random() >= 0 else x * 2), r"^the model draws from Python's random"),
        (_Block(lambda x: x if np.random.rand() >= 0 else x * 2), r"^the model draws from numpy\.random"),
        (_Block(lambda x: 1 * _scripted_noise(x)), r"^middle \(_Block\) draws random numbers that nothing keeps equal"),
        (_Block(lambda x: x + torch.randn(x.shape)), r"middle/random: randn draws .*test_check_samples\.py, line \d+"),
        (_Block(nn.Dropout2d(0.5)), r"this kind of dropout .* F\.dropout\(torch\.ones_like\(x\[:, :, :1\]\)"),
    ],
    ids=["buffer", "backward", "random", "numpy", "seldom", "seldom, numpy", "script", "randn", "Dropout2d"],
)
def test_what_else_is_found(middle: nn.Module, words: str) -> None:
    with pytest.raises(ModelDiffers, match=words):
        check_samples(_Net(middle), _data("mlp"))


def _dropped_mean(x: Tensor) -> Tensor:
    mean = x.mean(0)  # the fault
    return x + F.dropout(mean.tanh() * 2, 0.5)


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (_dropped_mean, rf"line {_dropped_mean.__code__.co_firstlineno + 2}\)\. It was lost in mean \(\S+py, line "),
        (
            lambda x: nn.Dropout(0.5)(x.sort(0).values.relu()),
            r"It was lost in sort \(\S+test_check_samples\.py, line \d",
        ),
        (
            lambda x: F.dropout(torch.ones(len(x), 8), 0.5) * x,
            r"line \d+\)\. Where the tensor is made, nugnn\.as_rows_of",
        ),
    ],
    ids=["mean", "sort", "made here"],
)
def test_a_refused_dropout_says_which_function_lost_the_rows(middle: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(ModelDiffers, match=words) as caught:
        check_samples(_Net(middle), _data("mlp"))
    if middle is _dropped_mean:
        assert f"line {_dropped_mean.__code__.co_firstlineno + 1})" in str(caught.value)


class _Experts(nn.Module):
    """Each expert is called only if some sample is for it: ranks take other ways, and come to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = x.argmax(1) % 4, 0 * x
        for number, expert in enumerate(self.experts):
            if (rows := (chosen == number).nonzero()[:, 0]).numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_ranks_may_take_other_ways_to_the_same_end() -> None:
    assert check_samples(_Net(_Experts()), _data("mlp")).largest_difference <= ROUNDING


def test_a_model_that_cannot_run_without_samples_passes_with_a_note() -> None:
    report = check_samples(nn.Sequential(_Block(lambda x: x.reshape(len(x), -1)), nn.Linear(72, 5)), _data("mlp"))
    assert len(report.notes) == 1 and report.notes[0].startswith("a worker that has no samples in a batch would fail")
    assert "cannot reshape" in report.notes[0] and report.num_parts == 3


def test_a_model_bound_to_float32_is_compared_in_float32() -> None:
    bound = _Block(lambda x: F.linear(x, torch.eye(8)))
    report = check_samples(_Net(bound), _data("mlp"))
    assert report.largest_difference < 1e-5 and "does not run in float64" in report.notes[0]
    with pytest.raises(ModelDiffers, match=r"^middle"):
        check_samples(_Net(_Block(lambda x: F.linear(x - x.mean(0), torch.eye(8)))), _data("mlp"))


def test_nothing_is_left_behind() -> None:
    model = _Net().eval()
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    check_samples(model, _data("mlp"))
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2][1])  # type: ignore[index]


class _Pairs(Dataset[Any]):
    """Two inputs, and a target for a loss of one's own; each reading gives others, as augmentation does."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        return {"a": torch.randn(3), "b": torch.tensor([number])}, torch.randn(2)


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.table = nn.Linear(3, 2), nn.Embedding(6, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.line(a) + self.table(b[:, 0])  # type: ignore[no-any-return]


def _squares(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - labels).square()


def _centred(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, labels = default_collate(samples)
    return x - x.mean(0), labels


def _padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.stack([y for _, y in samples])


def test_a_collate_function_that_sees_the_batch_is_refused() -> None:
    """The parts are joined one by one, as workers join them, or what they are padded to would be that of the whole."""
    images = make_data("images", 20, torch.float32)
    texts = [(torch.ones(5 if number < 19 else 9, 72), torch.tensor(0)) for number in range(20)]
    for samples, collate_fn, words in (
        (images, _centred, "collate_fn makes other values of 14 samples than where they are in a batch of 20"),
        (texts, _padded, r"shape \(14, 5, 72\) of 14 samples, which is \(14, 9, 72\) where they are in a batch of 20"),
    ):
        with pytest.raises(ModelDiffers, match=words):
            check_samples(_Net(), samples, collate_fn=collate_fn)  # type: ignore[arg-type]
        with pytest.raises(ModelDiffers, match=words):
            nugnn.fit(_Net(), samples, workers=2, batch_size=6, epochs=1, collate_fn=collate_fn)  # type: ignore[arg-type]
    compare_collation(images, default_collate)


def test_inputs_losses_and_numbers_of_parts_as_fit_takes_them() -> None:
    report = nugnn.check(_TwoInputs(), _Pairs(), loss=_squares)
    assert (report.num_samples, report.num_parts) == (6, 3) and report.largest_difference <= ROUNDING
    for num_parts in (2, 5):
        assert nugnn.check(_TwoInputs(), _Pairs(), loss=_squares, num_parts=num_parts).num_parts == num_parts
    assert nugnn.check(MLP(64, 10, hidden=8), "digits-images").num_samples == 12
    with pytest.raises(ModelDiffers, match="gradient of"):
        nugnn.check(_TwoInputs(), _Pairs(), loss=lambda x, y: _squares(x, y) * _squares(x, y).detach().mean())


def test_what_nugnn_check_refuses() -> None:
    data, model = _data("mlp"), _Net()
    for change, words in (
        ({"num_parts": 1}, "num_parts is 1"),
        ({"max_samples": 3}, "max_samples is 3 and there are 20 samples; 3 parts need 4 at least"),
        ({"max_nodes": 3}, "belong to graphs, not to samples"),
    ):
        with pytest.raises(ValueError, match=words):
            nugnn.check(model, data, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="belong to samples, not to graphs"):
        nugnn.check(model, make_graph(), max_samples=3)
    with pytest.raises(ModelFails, match="fails on one part already"):
        nugnn.check(nn.Sequential(nn.Flatten(), nn.Linear(3, 5)), data)


def test_long_rows_are_compared_by_sums_that_show_every_difference() -> None:
    """One value of many thousands, in one sample, and rows of several shapes; of empty parts too."""

    class Wide(nn.Module):
        def __init__(self, change: float) -> None:
            super().__init__()
            self.wide, self.last, self.change = nn.Linear(72, 9000), nn.Linear(9000, NUM_CLASSES), change
            self.block = _Block(self.changed)

        def changed(self, x: Tensor) -> Tensor:
            x = x.view(-1, 3, 3000)
            mark = torch.zeros_like(x[:1])
            mark[:, 1, 77] = self.change * (len(x) < 12)
            return torch.cat([x[:1] + mark, x[1:]]) if len(x) else x

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.block(self.wide(x.flatten(1))).flatten(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    assert check_samples(Wide(0.0), _data("mlp")).largest_difference <= ROUNDING
    with pytest.raises(ModelDiffers, match=r"^block \(_Block\) gives another result"):
        check_samples(Wide(1e-3), _data("mlp"))


# -- before training ------------------------------------------------------------------------------------------------


def _task(model: nn.Module, **changes: Any) -> SampleTask:
    given = {"workers": 2, "shares": None, "options": {}, "others": (), "check": True, "val": None, "test": None}
    return SampleTask(model, _data("mlp"), **(given | changes))  # type: ignore[arg-type]


def test_fit_compares_before_it_trains_over_several_workers() -> None:
    stages: list[str] = []
    with pytest.raises(nugnn.ModelDiffers, match=r"^middle .*nugnn\.fit\(check=False\) trains over several workers"):
        nugnn.fit(_Net(_Block(MIXING["sum"])), _data("mlp"), workers=2, epochs=1, on_stage=stages.append)
    assert stages == ["start", "check"]
    folder = Path()
    for quiet in (
        _task(_Net(_Block(MIXING["sum"])), check=False),
        _task(_Net(_Block(MIXING["sum"])), workers=1),
        _task(make_model("mlp").float()),  # its code is known
    ):
        stages.clear()
        quiet.stored(folder, stages.append)
        assert stages == []
    with pytest.raises(ModelDiffers) as caught:
        _task(_Net(_Block(torch.rand_like))).stored(folder, stages.append)
    assert "check=False" not in str(caught.value), "training would refuse it all the same"


def test_fit_says_why_it_did_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    _, notes = _task(_Net(_Block(lambda x: 1 / 0))).stored(Path(), lambda _: None)
    assert "were not compared with one before training: the model fails on one part already: ZeroDiv" in notes[-1]
    monkeypatch.setattr("nugnn.sample_task._MOST_PARAMETERS", 100)
    _, notes = _task(_Net()).stored(Path(), lambda _: None)
    assert "the model has 645 parameters; nugnn.check(model, data) does it" in notes[-1]
    monkeypatch.undo()
    monkeypatch.setattr("nugnn.sample_task._MOST_SECONDS", 0.0)
    _, notes = _task(_Net()).stored(Path(), lambda _: None)
    assert "a sample takes 0.0 s on the CPU" in notes[-1]


def test_comparing_takes_no_more_samples_than_a_usual_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step is three passes over 64 samples: forward, and backward for inputs and for weights."""
    seen = 0

    class Counting(_Net):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal seen
            seen += len(x) * (3 if torch.is_grad_enabled() else 1)
            return super().forward(x)

    monkeypatch.setattr(Counting, "__deepcopy__", lambda self, memo: _copy(self), raising=False)

    def _copy(model: nn.Module) -> nn.Module:
        other = Counting()
        other.load_state_dict(model.state_dict())
        return other.to(next(model.parameters()).dtype)

    _task(Counting()).stored(Path(), lambda _: None)
    assert 0 < seen <= 3 * 64


def test_a_step_of_the_comparison_is_one_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have numbers, so dropout draws other masks in each."""
    numbers: list[int] = []
    step = Interceptor.step

    def noted(self: Interceptor, number: int) -> Any:
        numbers.append(number)
        return step(self, number)

    monkeypatch.setattr(Interceptor, "step", noted)
    batch = first_batch(_data("mlp"), 5)
    assert isinstance(batch, Batch) and batch.ids.tolist() == [0, 1, 2, 3, 4]
    compare_batch(make_model("mlp"), batch, (3, 2))
    assert sorted(numbers) == [0] * 3 + [1] * 3 + [2] * 3


# -- at the shell ---------------------------------------------------------------------------------------------------

_FILE = """
import torch
from torch import nn

class Good(nn.Module):
    def __init__(self, width, num_classes, input_shape):
        super().__init__()
        self.line = nn.Linear(torch.Size(input_shape).numel(), num_classes)
    def forward(self, x):
        return self.line(x.flatten(1).float() if x.dtype == torch.int64 else x.flatten(1))

class Centred(Good):
    def forward(self, x):
        return super().forward(x - x.mean(0))

class DropPath(Good):
    def forward(self, x):
        return super().forward(x * x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.5))    # line 18
"""


def _exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(["check", *arguments])
    return int(left.value.code or 0)


def test_at_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(_FILE)
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "".join(f"{i},{i % 3},{'xy'[i % 2]}\n" for i in range(40)))
    for dataset in ("digits-images", f"csv:{tmp_path / 'rows.csv'}"):
        assert _exit_code(f"{file}:Good", "--dataset", dataset) == 0
        assert "Good: 3 unequal parts equal one part on a batch of 12 samples (6 module" in capsys.readouterr().out
    assert _exit_code("mlp", "--dataset", "digits-images") == 0
    for name, words in (
        ("Centred", "the model itself gives another result on a batch in parts of 9, 2 and 1 samples"),
        ("DropPath", f"random: bernoulli_ draws random numbers by position, so they would depend on the split ({file}"),
    ):
        capsys.readouterr()
        assert _exit_code(f"{file}:{name}", "--dataset", "digits-images") == 2
        assert words in capsys.readouterr().err
    for arguments, words in (
        (("mlp",), "mlp is not allowed; allowed: FILE.py:Class, or a built-in model (gcn"),
        (("gcn", "--dataset", "digits-images"), "--model gcn is not allowed"),
        (("mlp", "--dataset", "digits-images", "--num-nodes", "3"), "--num-nodes belongs to graphs"),
        (("gcn", "--image-size", "3"), "--image-size belongs to samples"),
        (("transformer", "--dataset", "digits-images"), "transformer takes texts"),
    ):
        assert _exit_code(*arguments) == 2
        assert words in capsys.readouterr().err


def test_a_model_of_samples_without_samples_is_told_to_name_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self, width, num_classes):\n"
        "        super().__init__(width, num_classes)\n"
    )
    assert _exit_code(f"{file}:Net") == 2
    assert "a model of samples is checked with --dataset, such as digits-images" in capsys.readouterr().err


def test_texts_too(tmp_path: Path) -> None:
    path = tmp_path / "texts.tsv"
    lines = (f"{'+-'[i % 2]}\t{'good bad'.split()[i % 2]} film {i}\n" for i in range(40))
    path.write_text("".join(["label\ttext\n", *lines]))
    data = load_samples(f"text:{path}")
    model = nn.Sequential(nn.Embedding(data.vocabulary_size, 4), _Block(lambda x: x.mean(1)), nn.Linear(4, 2))
    assert check_samples(model, data).largest_difference <= ROUNDING
