"""Steps without the mode have the bits of steps with it, and whatever is not known brings the mode back."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from nugnn import known_rows
from nugnn.comm.groups import Ranks
from nugnn.kernels.interceptor import Interceptor
from nugnn.known_models import is_known
from nugnn.known_rows import KnownRows
from nugnn.networks import CNN, MLP
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer
from sample_cases import make_data, make_model


def _trained(
    model: nn.Module, ranks: Ranks, kind: str, *, is_known: bool, between: Callable[[nn.Module], Any] | None = None,
    regularizer: Callable[[nn.Module], Tensor] | None = None, **options: Any,
) -> tuple[list[float], dict[str, Tensor], int]:  # fmt: skip
    """Losses of two epochs, the state after them, and how many steps ran without the mode."""
    model = copy.deepcopy(model)
    data, sizes = make_data(kind, 22, torch.float32), (5, 3) if ranks.is_split else (8,)
    family = SampleFamily(model, data, ranks, sizes=sizes, seed=3, **options)
    if not is_known:
        family._known_rows._layout = []
    family._known_rows._last_seconds = 0.0  # else the first step takes the mode
    trainer = Trainer(family, regularizer=regularizer)
    with (
        mock.patch.object(known_rows, "_LONG_SECONDS", 1e6),  # on a busy machine a step may take a second
        mock.patch.object(KnownRows, "_draw_by_sample", autospec=True, side_effect=KnownRows._draw_by_sample) as opened,
    ):
        losses = [trainer.train_epoch()]
        if between is not None:
            between(model)
        losses.append(trainer.train_epoch())
    return losses, model.state_dict(), opened.call_count


def _same_bits(ranks: Ranks, name: str, options: dict[str, Any]) -> int:
    kind = "tokens" if "transformer" in name else "images"
    losses, state, _ = _trained(make_model(name), ranks, kind, is_known=False, **options)
    known, found, num_known = _trained(make_model(name), ranks, kind, is_known=True, **options)
    assert known == losses
    for key, value in state.items():
        assert torch.equal(found[key], value), key
    return num_known


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"micro_batches": 2}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_steps_without_the_mode_have_the_same_bits(name: str, options: dict[str, Any]) -> None:
    assert _same_bits(Ranks(), name, options) == 6 * options.get("micro_batches", 1)


def test_on_two_ranks_too(ranks: Any) -> None:
    assert ranks.run(2, _same_bits, "transformer", {}) == [6, 6]
    assert ranks.run(2, _same_bits, "cnn", {"batch_norm": "local"}) == [6, 6]
    assert ranks.run(2, _same_bits, "cnn", {}) == [0, 0]  # batch norm over all ranks needs the interceptor


class _Own(MLP):
    pass


def _hook(model: nn.Module) -> None:
    model.layers[1].register_forward_hook(lambda module, x, out: None)  # type: ignore[index, union-attr]


def _replace(model: nn.Module) -> None:
    model.layers[2] = nn.Tanh()  # type: ignore[index, operator]


def _forward(model: nn.Module) -> None:
    model.layers[1].forward = model.layers[1].forward  # type: ignore[index, union-attr, method-assign]


class _Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _another_class(model: nn.Module) -> None:
    next(module for module in model.modules() if type(module) is nn.Dropout).__class__ = _Dropout


@pytest.mark.parametrize("change", [_hook, _replace, _forward, _another_class])
def test_what_is_changed_between_steps_brings_the_mode_back(change: Callable[[nn.Module], Any]) -> None:
    model = MLP(72, 5, hidden=8, layers=3, dropout=0.5)
    expected = _trained(model, Ranks(), "images", is_known=False, between=change)
    found = _trained(model, Ranks(), "images", is_known=True, between=change)
    assert found[0] == expected[0] and found[2] == 3


def test_a_method_of_one_model_alone_brings_the_mode_back() -> None:
    def change(model: nn.Module) -> None:
        usual = CNN._means
        model._means = lambda x: torch.nn.functional.dropout(usual(model, x), 0.5)  # type: ignore[arg-type, assignment]

    model = CNN(2, 5, widths=(4, 4))
    expected = _trained(model, Ranks(), "images", is_known=False, between=change)
    found = _trained(model, Ranks(), "images", is_known=True, between=change)
    assert found[0] == expected[0] and found[2] == 3
    assert is_known(model)
    change(model)
    assert not is_known(model)


def test_another_dropout_for_everyone_brings_the_mode_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: 3 * x)
    model = MLP(72, 5, hidden=8, layers=3, dropout=0.5)
    expected = _trained(model, Ranks(), "images", is_known=False)
    assert _trained(model, Ranks(), "images", is_known=True) == (*expected[:1], mock.ANY, 0)


def test_whoever_looks_at_all_modules_makes_a_model_unknown() -> None:
    look = nn.modules.module.register_module_full_backward_pre_hook(lambda module, grads: None)
    try:
        assert not is_known(CNN(1, 2))
    finally:
        look.remove()
    assert is_known(CNN(1, 2))


def test_another_probability_counts_at_once() -> None:
    def change(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1

    model = MLP(72, 5, hidden=8, layers=3, dropout=0.5)
    expected = _trained(model, Ranks(), "images", is_known=False, between=change)
    found = _trained(model, Ranks(), "images", is_known=True, between=change)
    assert found[0] == expected[0] and found[2] == 6


def test_code_of_the_user_runs_under_the_mode() -> None:
    model = MLP(72, 5, hidden=8, dropout=0.5)
    for options in (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        {"regularizer": lambda model: model.layers[1].weight.square().sum()},
    ):
        assert _trained(model, Ranks(), "images", is_known=True, **options)[2] == 0
    unknown = [_Own(72, 5, dropout=0.5), nn.Sequential(nn.Flatten(), nn.Linear(72, 5))]
    assert all(_trained(own, Ranks(), "images", is_known=True)[2] == 0 for own in unknown)


def test_long_steps_tell_of_their_operators() -> None:
    model = MLP(72, 5, dropout=0.5).train()
    known = KnownRows(model, Interceptor((), model), Ranks(), batch_norm="all")
    x, ids = torch.rand(4, 72), torch.arange(4)
    with (
        mock.patch.object(known_rows, "_LONG_SECONDS", 1e6),
        mock.patch.object(KnownRows, "_draw_by_sample", autospec=True, side_effect=KnownRows._draw_by_sample) as opened,
    ):
        with known.step(0, x, ids):  # nobody knows yet how long it takes
            pass
        assert not opened.called
        with known.step(1, x, ids):
            pass
        assert opened.call_count == 1 and "forward" not in vars(model.layers[3])
        known._last_seconds = 2e6
        with known.step(2, x, ids):
            pass
        known._last_seconds = 0.0
        with known.step(3, x[:, :, None], ids):  # three axes: some layers read them as one sample
            pass
        assert opened.call_count == 1


def test_networks_of_torchvision_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = ("resnet", "vgg", "swin_transformer")
    for home in homes:
        monkeypatch.setitem(sys.modules, f"torchvision.models.{home}", types.ModuleType(home))
    resnet, vgg, swin = (type("Net", (nn.Sequential,), {"__module__": f"torchvision.models.{home}"}) for home in homes)
    norm = type("FrozenBatchNorm2d", (nn.Identity,), {"__module__": "torchvision.ops.misc"})
    derived = type("Mine", (resnet,), {"__module__": "mine", "forward": lambda self, x: x})
    block = type("BasicBlock", (nn.Sequential,), {"__module__": "torchvision.models.resnet"})
    parts = [nn.Conv2d(3, 4, 3), block(nn.ReLU()), norm(), nn.Dropout()]
    assert is_known(resnet(*parts)) and is_known(vgg(*parts)) and is_known(CNN(1, 2))
    assert not is_known(swin(*parts)) and not is_known(derived(*parts)) and not is_known(norm())
    assert not is_known(resnet(*parts, derived())) and not is_known(nn.Sequential(*parts))
    hooked = resnet(*copy.deepcopy(parts))
    hooked[0].register_forward_pre_hook(lambda module, x: None)
    assert not is_known(hooked)
    with_forward = vgg(*copy.deepcopy(parts))
    with_forward[1].forward = lambda x: x
    assert not is_known(with_forward)
    weighed = resnet(*copy.deepcopy(parts))
    weighed[0].weight.register_hook(lambda grad: None)
    assert not is_known(weighed)
