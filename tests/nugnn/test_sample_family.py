"""The one trainer on batches of samples: any split trains as one process, and one process as a plain torch loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from nugnn.comm.groups import Ranks
from nugnn.history import History
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer
from sample_cases import FLOAT64_BOUND, make_data, make_model


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)


def _one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40, cycle_momentum=False)


def _fit(
    ranks: Ranks, name: str, sizes: tuple[int, ...], **options: Any
) -> tuple[list[Any], Tensor, dict[str, Tensor]]:
    kind = "tokens" if name == "transformer" else "images"
    data = {split: make_data(kind, num) for split, num in (("train", 50), ("val", 20), ("test", 17))}
    model = make_model(name).double()
    family = SampleFamily(model, data.pop("train"), ranks, sizes=sizes, seed=3, measure_train=True, **data, **options)
    trainer = Trainer(
        family, make_optimizer=_adamw, make_scheduler=_one_cycle, schedule_steps=True, clip_norm=0.5,
        regularizer=lambda m: 1e-3 * sum(p.square().sum() for p in m.parameters()),
    )  # fmt: skip
    history = trainer.fit(3)
    assert trainer.num_steps == 3 * family.steps_per_epoch
    epochs = [(epoch.loss, epoch.train, epoch.val, epoch.test) for epoch in history.epochs]
    return epochs, trainer.predict_all(), copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("sizes", [(8, 4), (12, 0), (7, 0, 3, 2)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_any_split_trains_as_one_process(ranks: Any, name: str, sizes: tuple[int, ...]) -> None:
    epochs, logits, state = _fit(Ranks(), name, (12,))
    for others, their_logits, their_state in ranks.run(len(sizes), _fit, name, sizes):
        torch.testing.assert_close(torch.tensor(others), torch.tensor(epochs), rtol=FLOAT64_BOUND, atol=0)
        scale = max(float(value.double().abs().max()) for value in state.values())
        for key, value in state.items():
            assert float((their_state[key].double() - value.double()).abs().max()) <= FLOAT64_BOUND * scale, key
        assert float((their_logits - logits).abs().max()) <= FLOAT64_BOUND * float(logits.abs().max())


def test_micro_batches_change_nothing_but_memory(ranks: Any) -> None:
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1], dtype=torch.float64)
    whole = _fit(Ranks(), "transformer", (12,), class_weights=weights)
    for run in (
        _fit(Ranks(), "transformer", (12,), class_weights=weights, micro_batches=5),
        *ranks.run(2, _fit, "transformer", (2, 10), class_weights=weights, micro_batches=3),
    ):
        torch.testing.assert_close(torch.tensor(run[0]), torch.tensor(whole[0]), rtol=FLOAT64_BOUND, atol=0)


def test_one_process_is_a_plain_torch_loop() -> None:
    train, test = make_data("images", 50), make_data("images", 17)
    model = make_model("cnn").double()
    model.dropout.p = 0.0
    plain = copy.deepcopy(model)
    family = SampleFamily(model, train, Ranks(), sizes=(12,), test=test, seed=3)
    trainer = Trainer(family, make_optimizer=_adamw)
    losses = [trainer.train_epoch() for _ in range(2)]
    optimizer = _adamw(plain)
    for epoch in range(2):
        total = 0.0
        for ids in family.sampler.order(epoch).split(12):
            x, labels = train[ids]
            loss = nn.functional.cross_entropy(plain(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(ids)
        assert losses[epoch] == pytest.approx(total / 50, rel=1e-12)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    plain.eval()
    x, labels = test[:]
    accuracy = float((plain(x).argmax(1) == labels).double().mean())
    assert trainer.evaluate()["test"] == pytest.approx(accuracy)
    torch.testing.assert_close(trainer.predict_all(), plain(x).detach(), rtol=1e-10, atol=1e-10)


class _Named(Dataset[Any]):
    """Samples whose inputs have names, or places."""

    def __init__(self, as_tuple: bool) -> None:
        self.as_tuple, (self.x, self.labels) = as_tuple, make_data("images", 10, torch.float32)[:]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        left, right = self.x[i, 0], self.x[i, 1]
        return (left, right) if self.as_tuple else {"left": left, "right": right}, self.labels[i]


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(72, 5)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(torch.cat([left, right], 1).flatten(1))  # type: ignore[no-any-return]


class _ByTake(Dataset[Any]):
    """Gives batches, not samples."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.labels[i]


class _Taking(_ByTake):
    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[ids], self.labels[ids]


@pytest.mark.parametrize("num_data_workers", [0, 2])
def test_batches_at_once_are_batches_of_samples(num_data_workers: int) -> None:
    tensors = make_data("images", 21).tensors
    losses = []
    for data in (_ByTake(*tensors), _Taking(*tensors), TensorDataset(*tensors)):
        family = SampleFamily(make_model("cnn").double(), data, Ranks(), sizes=(6,), num_data_workers=num_data_workers)
        losses.append(Trainer(family, make_optimizer=_adamw).train_epoch())
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("as_tuple", [True, False])
@pytest.mark.parametrize("num_data_workers", [0, 1])
def test_inputs_with_places_or_names(as_tuple: bool, num_data_workers: int) -> None:
    family = SampleFamily(_TwoInputs(), _Named(as_tuple), Ranks(), sizes=(4,), num_data_workers=num_data_workers)
    history: History = Trainer(family).fit(2)
    assert history.epochs[1].loss < history.epochs[0].loss


@pytest.mark.parametrize("precision", ["bf16", "fp16", "amp"])
def test_precisions_train_too(precision: str) -> None:
    data = make_data("images", 40, torch.float32)
    losses = {}
    for choice in ("fp32", precision):
        model = make_model("mlp")
        family = SampleFamily(model, data, Ranks(), sizes=(20,), precision=choice)
        losses[choice] = [Trainer(family, make_optimizer=_adamw).train_epoch() for _ in range(1)]
        assert all(p.dtype == torch.float32 for p in model.parameters())
    # inputs and activations rounded to 8 bits: each of three layers is off by some 2^-8 of its size
    assert losses[precision][0] == pytest.approx(losses["fp32"][0], rel=0.05)
    assert losses[precision] != losses["fp32"]


def test_gradients_of_what_no_optimizer_steps_do_not_grow() -> None:
    model, data = make_model("mlp").double(), make_data("images", 12)
    first, *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    family = SampleFamily(model, data, Ranks(), sizes=(12,))
    trainer = Trainer(family, make_optimizer=lambda _: torch.optim.SGD(last.parameters(), lr=0.0))
    grads = []
    for _ in range(2):
        trainer.train_epoch()
        assert first.weight.grad is not None
        grads.append(first.weight.grad.clone())
    assert float((grads[0] - grads[1]).abs().max()) <= FLOAT64_BOUND  # the same batch, in another order


def test_multi_label_targets() -> None:
    x = torch.randn(30, 72)
    data = TensorDataset(x, (x[:, :3] > 0).to(torch.float32))
    model = nn.Linear(72, 3)
    trainer = Trainer(SampleFamily(model, data, Ranks(), sizes=(10,), val=data, metric="micro_f1"))
    assert trainer.fit(40).epochs[-1].val > 0.8


def test_what_does_not_fit_is_refused() -> None:
    data = make_data("images", 10)
    with pytest.raises(ValueError, match="2 batch sizes for 1 worker"):
        SampleFamily(nn.Identity(), data, Ranks(), sizes=(4, 4))
    with pytest.raises(ValueError, match="micro_batches is 0"):
        SampleFamily(nn.Identity(), data, Ranks(), sizes=(4,), micro_batches=0)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ()

    with pytest.raises(ValueError, match="Stream has no length"):
        SampleFamily(nn.Identity(), Stream(), Ranks(), sizes=(4,))
    with pytest.raises(ValueError, match="no test samples"):
        Trainer(SampleFamily(nn.Linear(72, 5).double(), data, Ranks(), sizes=(4,))).predict_all()
    with pytest.raises(ValueError, match="clip_norm is -1"):
        Trainer(SampleFamily(nn.Linear(72, 5), data, Ranks(), sizes=(4,)), clip_norm=-1.0)
