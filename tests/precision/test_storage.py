"""Precision by storage type: what is cast, what stays, where gradients arrive, and what a run learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.models import GNN
from nugnn.precision.loss_scale import LossScale
from nugnn.precision.storage import PRECISIONS, Storage
from trainers import fit_rank

CPU = torch.device("cpu")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.batch = nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)
        self.gru, self.shift = nn.GRU(4, 4), nn.Parameter(torch.ones(4))
        self.tied = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.batch(self.norm(self.linear(x)) + self.shift) @ self.tied
        return self.gru(h[:, None])[0][:, 0]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_everything_between_input_and_output_is_in_the_half_type(precision: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Small()
    masters = dict(model.named_parameters())
    seen: list[torch.dtype] = []
    for module in model.modules():
        module.register_forward_hook(
            lambda _, args, out: seen.append((out[0] if isinstance(out, tuple) else out).dtype)
        )
    with Storage(precision).casts(model, CPU):
        out = model(torch.randn(6, 4).to(dtype))
        out.float().square().sum().backward()
    assert set(seen) == {dtype}
    assert dict(model.named_parameters()).keys() == masters.keys()
    for name, p in model.named_parameters():
        assert p is masters[name] and p.dtype is torch.float32, name
        assert p.grad is not None and p.grad.dtype is torch.float32 and float(p.grad.abs().max()) > 0, name
    assert all(w is p for w, p in zip(model.gru._flat_weights, model.gru.parameters(), strict=True))


def test_masters_come_back_after_an_error() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="on purpose"), Storage("bf16").casts(model, CPU):
        raise RuntimeError("on purpose")
    assert all(isinstance(p, nn.Parameter) and p.dtype is torch.float32 for p in model.parameters())


def test_products_and_convolutions_of_float32_are_not_rounded_unless_asked() -> None:
    inside, before = {}, torch.backends.cudnn.allow_tf32
    for precision in ("fp32", "tf32"):
        with Storage(precision).casts(nn.Linear(1, 1), CPU):
            inside[precision] = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    assert inside == {"fp32": ("highest", False), "tf32": ("high", True)}
    assert torch.backends.cudnn.allow_tf32 is before


def test_unknown_precision_and_double_models_are_refused() -> None:
    with pytest.raises(ValueError, match="'int3' is not known; choose one of fp32, tf32"):
        Storage("int3")
    with pytest.raises(ValueError, match=r"bf16 needs a float32 model, this one is torch\.float64"):
        Storage("bf16").dtype_of(torch.float64)


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gin"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_model_trains_in_every_precision(kind: str, precision: str) -> None:
    torch.manual_seed(0)
    model = GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, norm="layer")
    losses = {}
    for each in ("fp32", precision):
        result = nugnn.fit(model, make_graph(), epochs=8, precision=each, device="cpu", check=False)
        losses[each] = [epoch.loss for epoch in result.history]
        assert result.logits.dtype is torch.float32
    assert losses[precision][-1] < losses[precision][0]
    # Eight steps of Adam at 0.01 move weights by at most 0.08; rounding of bfloat16 (2^-8) in a dozen operators on the
    # way changes a loss near log(4) by a few per cent. A wrong type or scale shows as a loss that does not fall.
    assert abs(losses[precision][0] - losses["fp32"][0]) <= 12 * 2**-8 * losses["fp32"][0]


def test_split_and_whole_agree_in_bfloat16(ranks: Any) -> None:
    torch.manual_seed(0)
    model = GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8)
    options = {"epochs": 4, "precision": "bf16"}
    one = nugnn.fit(model, make_graph(), device="cpu", check=False, **options)
    two = ranks.run(2, fit_rank, model, make_graph(), [0.7, 0.3], **options)[0]
    for a, b in zip(one.history, two["epochs"], strict=True):
        assert abs(a.loss - b["loss"]) <= 2**-8 * abs(a.loss)  # sums in another order, then one rounding to bfloat16


class TestLossScale:
    def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves(self) -> None:
        p = nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([65536.0, 131072.0])
        here = LossScale(is_on=True)
        assert here.unscale_([p]) and torch.equal(p.grad, torch.tensor([1.0, 2.0]))
        elsewhere = LossScale(is_on=True, largest=lambda x: x.fill_(1.0))
        assert not elsewhere.unscale_([p]) and elsewhere.scale == 2.0**15 and elsewhere.num_skipped == 1

    def test_it_grows_after_many_good_steps_and_never_below_one(self) -> None:
        p = nn.Parameter(torch.zeros(1))
        scale = LossScale(is_on=True)
        for _ in range(2000):
            p.grad = torch.ones(1)
            assert scale.unscale_([p])
        assert scale.scale == 2.0**17
        for _ in range(40):
            p.grad = torch.full((1,), math.inf)
            assert not scale.unscale_([p])
        assert scale.scale == 1.0

    def test_its_state_comes_back(self) -> None:
        scale, other = LossScale(is_on=True), LossScale(is_on=True)
        scale.scale, scale.num_good_steps, scale.num_skipped = 8.0, 5, 2
        other.load(scale.state())
        assert other.state() == scale.state()
