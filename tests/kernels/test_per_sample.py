"""The law of the list of functions per sample: a batch gives what its parts give, put together, and knows its rows."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import get_overridable_functions

from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.per_sample import BATCH_AXES, SAMPLE_AXES, SAMPLE_AXES_OF_ALL
from nugnn.kernels.random_draws import draws
from nugnn.kernels.row_rule_table import RULES
from nugnn.kernels.rows import Rows, identity_of, rows_of, tag

NUM_SAMPLES, WIDE = 5, 72  # divided by every number of channels and places below


def _numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape).sin()


def _x(x: Tensor, *shape: int) -> Tensor:
    """``(n, 72)`` as ``(n, *shape)``, the first values of each sample."""
    return x[:, : torch.Size(shape).numel()].reshape(-1, *shape)


def _classes(x: Tensor) -> Tensor:
    return x[:, :3].argmax(1)


def _places(d: int) -> tuple[int, ...]:
    return (2, 6, 6) if d == 2 else (2, 36) if d == 1 else (2, 3, 4, 3)


def _by_places(name: str, **how: Any) -> dict[str, Callable[[Tensor], Any]]:
    return {name.format(d): _one(name.format(d), _places(d), **how) for d in (1, 2, 3)}


OF_ONE: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {}
"""What some of the functions below do with one sample, and its shape."""


def _one(name: str, shape: tuple[int, ...], *args: Any, **how: Any) -> Callable[[Tensor], Any]:
    OF_ONE[name] = (lambda x: getattr(F, name)(x, *args, **how), shape)
    return lambda x: getattr(F, name)(_x(x, *shape), *args, **how)


def _unpooled(d: int) -> Callable[[Tensor], Tensor]:
    pool, back = getattr(F, f"max_pool{d}d"), getattr(F, f"max_unpool{d}d")
    shape = (2, *[4] * d) if d < 3 else (1, 2, 4, 4)
    return lambda x: back(*pool(_x(x, *shape), 2, return_indices=True), 2)


def _losses(*names: str, **how: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions of a prediction and a target, a value for each entry."""
    return {
        name: lambda x, name=name: getattr(F, name)(x.sigmoid(), (3 * x).sigmoid(), reduction="none", **how)
        for name in names
    }


def _plain(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    return {name: lambda x, name=name: getattr(F, name)(x) for name in names}


# x is (n, 72): rows of samples
CASES: dict[str, Callable[[Tensor], Any]] = {
    **{f"conv{d}d": _one(f"conv{d}d", _places(d), _numbers(2, 2, *[2] * d)) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _one(f"conv_transpose{d}d", _places(d), _numbers(2, 2, *[2] * d)) for d in (1, 2, 3)},
    "conv_tbc": lambda x: F.conv_tbc(_x(x, 6, 4).transpose(0, 1).contiguous(), _numbers(3, 4, 2), _numbers(2), 1),
    **_by_places("max_pool{}d", kernel_size=2),
    **_by_places("max_pool{}d_with_indices", kernel_size=2),
    **_by_places("avg_pool{}d", kernel_size=2),
    **_by_places("lp_pool{}d", norm_type=2, kernel_size=2),
    **_by_places("adaptive_avg_pool{}d", output_size=2),
    **_by_places("adaptive_max_pool{}d", output_size=2),
    **_by_places("adaptive_max_pool{}d_with_indices", output_size=2),
    **{f"max_unpool{d}d": _unpooled(d) for d in (1, 2, 3)},
    "unfold": _one("unfold", (2, 6, 6), 2),
    "fold": _one("fold", (8, 9), (4, 4), 2),
    "pixel_shuffle": _one("pixel_shuffle", (4, 3, 6), 2),
    "pixel_unshuffle": _one("pixel_unshuffle", (2, 6, 6), 2),
    "channel_shuffle": _one("channel_shuffle", (4, 3, 6), 2),
    "native_channel_shuffle": lambda x: F.native_channel_shuffle(_x(x, 4, 3, 6), 2),
    "interpolate": _one("interpolate", (2, 6, 6), scale_factor=2.0, mode="bilinear"),
    "upsample": _one("upsample", (2, 36), scale_factor=2.0),
    "upsample_bilinear": _one("upsample_bilinear", (2, 6, 6), scale_factor=2),
    "upsample_nearest": _one("upsample_nearest", (2, 6, 6), scale_factor=2),
    "affine_grid": lambda x: F.affine_grid(_x(x, 2, 3), [len(x), 1, 4, 4], align_corners=False),
    "grid_sample": lambda x: F.grid_sample(_x(x, 2, 6, 6), _x(x, 3, 4, 2), align_corners=False),
    "pad": _one("pad", (2, 6, 6), (1, 2, 1, 1), mode="reflect"),
    "linear": _one("linear", (72,), _numbers(3, 72)),
    "bilinear": lambda x: F.bilinear(x[:, :4], x[:, 4:7], _numbers(2, 4, 3)),
    "embedding": lambda x: F.embedding(_x(x, 6, 12).argmax(2), _numbers(12, 4)),
    "embedding_bag": lambda x: F.embedding_bag(_x(x, 6, 12).argmax(2), _numbers(12, 4), mode="mean"),
    "one_hot": lambda x: F.one_hot(_classes(x), 3),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(*[_x(x, 2, 6, 6)] * 3),
    "batch_norm": _one("batch_norm", (2, 36), _numbers(2), _numbers(2).square() + 1),
    "group_norm": _one("group_norm", (6, 12), 3),
    "instance_norm": _one("instance_norm", (6, 12)),
    "layer_norm": _one("layer_norm", (6, 12), (12,)),
    "rms_norm": _one("rms_norm", (6, 12), (6, 12)),
    "local_response_norm": _one("local_response_norm", (6, 12), 3),
    "normalize": _plain("normalize")["normalize"],
    "softmax": _one("softmax", (72,), dim=1),
    "log_softmax": _one("log_softmax", (72,), dim=-1),
    "softmin": _one("softmin", (72,), dim=1),
    "glu": _plain("glu")["glu"],
    "prelu": _one("prelu", (72,), _numbers(1)),
    "threshold": _one("threshold", (72,), 0.1, 0.2),
    "rrelu": _one("rrelu", (72,), training=False),
    **_plain(*"celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6".split()),
    **_plain(*"selu sigmoid silu softplus softshrink softsign tanh tanhshrink".split()),
    **{
        f"{name}_": lambda x, name=name: getattr(F, f"{name}_")(x.clone())
        for name in "celu elu hardtanh leaky_relu relu selu rrelu".split()
    },
    "threshold_": lambda x: F.threshold_(x.clone(), 0.1, 0.2),
    "dropout": _one("dropout", (72,), training=False),
    **{f"dropout{d}d": _one(f"dropout{d}d", _places(d), training=False) for d in (1, 2, 3)},
    "alpha_dropout": _one("alpha_dropout", (72,), training=False),
    "feature_alpha_dropout": _one("feature_alpha_dropout", (2, 36), training=False),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.exp()),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.exp()),
    **_losses(*"mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy poisson_nll_loss".split()),
    **_losses("binary_cross_entropy_with_logits", "soft_margin_loss", "hinge_embedding_loss"),
    **_losses("gaussian_nll_loss", var=0.5),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x.exp(), x.sign(), reduction="none"),
    "cross_entropy": lambda x: F.cross_entropy(x[:, :3], _classes(x), reduction="none"),
    "nll_loss": lambda x: F.nll_loss(_x(x, 3, 24), _x(x, 24, 3).argmax(2), reduction="none"),
    "linear_cross_entropy": lambda x: F.linear_cross_entropy(x, _numbers(3, 72), _classes(x), reduction="none"),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, _classes(x), reduction="none"),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, x.argsort(1), reduction="none"),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, (x > 0).double(), reduction="none"),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x.exp(), x[:, 0].sign(), reduction="none"),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x.exp(), x.cos(), reduction="none"),
    "triplet_margin_with_distance_loss": lambda x: F.triplet_margin_with_distance_loss(
        x, x.exp(), x.cos(), reduction="none"
    ),
    # no functions of torch.nn.functional
    "gru_cell": lambda x: torch.gru_cell(x, x[:, :2], _numbers(6, 72), _numbers(6, 2)),
    "lstm_cell": lambda x: torch.lstm_cell(x, (x[:, :2], x[:, 2:4]), _numbers(8, 72), _numbers(8, 2)),
    "rnn_tanh_cell": lambda x: torch.rnn_tanh_cell(x, x[:, :2], _numbers(2, 72), _numbers(2, 2)),
    "rnn_relu_cell": lambda x: torch.rnn_relu_cell(x, x[:, :2], _numbers(2, 72), _numbers(2, 2)),
    "tril": lambda x: _x(x, 6, 6).tril(),
    "triu": lambda x: _x(x, 6, 6).triu(),
}

NOT_LISTED = {
    "ctc_loss": "sequences first, and a loss",
    "pdist": "compares rows with each other",
    "multi_head_attention_forward": "answered by kernels/attention_handler.py",
    "gumbel_softmax": "draws",
    **dict.fromkeys(("grouped_mm", "scaled_mm", "scaled_grouped_mm"), "products of numbers of few bits, for kernels"),
    **{f"fractional_max_pool{d}d{end}": "draws" for d in (2, 3) for end in ("", "_with_indices")},
}


def _samples(ids: Tensor) -> Tensor:
    x = torch.cos(ids.double()[:, None] * torch.arange(1.0, WIDE + 1) + 1)
    return tag(x, Rows("sample", ids, split=True))


def _results(function: Callable[[Tensor], Any], ids: Tensor) -> list[Tensor]:
    with Interceptor(()).step(0):
        out = function(_samples(ids))
    return [out] if isinstance(out, Tensor) else list(out)


@pytest.mark.filterwarnings("ignore:`nn.functional.upsample", "ignore:reduction", "ignore:size_average")
@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_its_parts_put_together(name: str) -> None:
    ids = torch.tensor([30, 4, 17, 9, 2])
    whole = _results(CASES[name], ids)
    parts = [_results(CASES[name], part) for part in ids.split([3, 1, 1])]
    for number, out in enumerate(whole):
        rows = identity_of(out)
        assert rows is not None and rows.row_ids(NUM_SAMPLES).tolist() == ids.tolist()
        pieces = [part[number] for part in parts]
        assert all(identity_of(piece).axis == rows.axis for piece in pieces)  # type: ignore[union-attr]
        # the same sums, grouped otherwise by vector instructions: a few roundings of values below 100
        torch.testing.assert_close(torch.cat(pieces, rows.axis), out, rtol=1e-12, atol=1e-12)


def test_every_function_of_torch_nn_functional_is_tried_or_said_not_to_be() -> None:
    overridable = {function.__name__ for function in get_overridable_functions()[F]}
    named = {name for name in dir(F) if name[0] != "_" and not name.startswith("has_torch_function")}
    plain = (types.FunctionType, types.BuiltinFunctionType)
    public = {name for name in named if isinstance(getattr(F, name), plain)} | {n for n in overridable if n[0] != "_"}
    public -= {"boolean_dispatch", "handle_torch_function", "assert_int_or_pair", "log_sigmoid"}  # `logsigmoid`'s name
    assert len(public) > 120 and public == (public & CASES.keys()) | NOT_LISTED.keys(), public - CASES.keys()
    assert all(draws(getattr(F, name)) == (why == "draws") for name, why in NOT_LISTED.items())


def test_every_listed_name_is_tried() -> None:
    assert SAMPLE_AXES.keys() | SAMPLE_AXES_OF_ALL.keys() | BATCH_AXES.keys() <= CASES.keys() & RULES.keys()


def test_what_a_sample_has_is_not_taken_for_samples() -> None:
    """One sample, without a batch axis: wherever rows along an axis of it are kept, they are kept apart."""
    tried, lost = 0, 0
    for name in SAMPLE_AXES.keys() & OF_ONE.keys():
        function, shape = OF_ONE[name]
        for axis, size in enumerate(shape):
            x = tag(_numbers(*shape), Rows("sample", torch.arange(size), split=True, axis=axis))
            with Interceptor(()).step(0):
                out = function(x)
            tried += 1
            rows = identity_of(out)
            lost += rows is None
            if rows is not None:
                pieces = [function(piece) for piece in x.split(1, axis)]
                torch.testing.assert_close(torch.cat(pieces, rows.axis), out, rtol=1e-12, atol=1e-12)
    assert tried > 60 and lost > 60


def test_weights_that_differ_by_sample_are_no_weights() -> None:
    x = _samples(torch.arange(3))
    with Interceptor(()).step(0):
        assert rows_of(F.linear(x, x)) is None and rows_of(F.linear(x, _numbers(3, WIDE))) is not None
        assert rows_of(F.embedding_bag(torch.arange(3), _numbers(3, 4), tag(torch.arange(3), rows_of(x)))) is None
