"""Attention in single steps computes what torch's does, before weights are dropped, and keeps the share it should."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.attention_handler import AttentionHandler
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.rows import Rows, rows_of, tag

TINY = 2.0**-40  # drops nothing: below one in 2**32 rounds to no word


def _samples() -> Tensor:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return tag(x, Rows("sample", torch.tensor([4, 0, 9]), split=True))


def _step(model: nn.Module) -> Interceptor:
    return Interceptor((AttentionHandler(is_split=True),), model, seed=1)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kdim", [None, 8])
def test_multi_head_attention_is_torchs(need_weights: bool, kdim: int | None) -> None:
    padding = torch.tensor([[0, 0, 0, 1, 1], [0] * 5, [0, 1, 1, 1, 1]]).bool()
    causal = torch.ones(5, 5).triu(1).bool()
    each = torch.randn(6, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = nn.MultiheadAttention(8, 2, dropout=TINY, batch_first=True, kdim=kdim, bias=kdim is None).double()
    x = _samples()
    for key_padding_mask, attn_mask in itertools.product((None, padding), (None, causal, each)):
        if attn_mask is each and key_padding_mask is not None:  # torch wants both of one type
            key_padding_mask = torch.zeros(3, 5, dtype=torch.float64).masked_fill(padding, -torch.inf)
        how = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "need_weights": need_weights}
        with _step(model).step(0):
            mine = model(x, x, x, **how)
        assert rows_of(mine[0]).same_as(rows_of(x))
        theirs = model.eval()(x, x, x, **how)
        model.train()
        torch.testing.assert_close(mine[0], theirs[0])
        assert need_weights == (mine[1] is not None)
        if need_weights:
            torch.testing.assert_close(mine[1], theirs[1])


def test_scaled_dot_product_attention_is_torchs() -> None:
    x = _samples()
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    with _step(nn.Identity()).step(0):
        q, few = x.unflatten(2, (4, 2)).transpose(1, 2), x[..., :4].unflatten(2, (2, 2)).transpose(1, 2)
    for how in ({}, {"attn_mask": allowed}, {"attn_mask": allowed.double()}, {"is_causal": True}, {"scale": 0.3}):
        with _step(nn.Identity()).step(0):
            mine = F.scaled_dot_product_attention(q, q, q, dropout_p=TINY, **how)
        torch.testing.assert_close(mine, F.scaled_dot_product_attention(q, q, q, **how))
        assert rows_of(mine).same_as(rows_of(x))
    with _step(nn.Identity()).step(0):
        mine = F.scaled_dot_product_attention(q, few, few, dropout_p=TINY, enable_gqa=True)
    torch.testing.assert_close(mine, F.scaled_dot_product_attention(q, few, few, enable_gqa=True))


def test_a_place_that_may_look_nowhere_gets_zeros_and_no_nan_gradients() -> None:
    x = _samples().requires_grad_()
    tag(x, Rows("sample", torch.tensor([4, 0, 9]), split=True))
    nowhere = torch.zeros(5, 5, dtype=torch.bool)
    nowhere[0, 0] = True
    with _step(nn.Identity()).step(0):
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=nowhere, dropout_p=TINY)
    assert bool((out[:, 1:] == 0).all())
    out.sum().backward()
    assert bool(x.grad.isfinite().all())


def test_the_share_of_dropped_weights() -> None:
    n = 400
    x = tag(torch.zeros(n, 2, 4, 1, dtype=torch.float64), Rows("sample", torch.arange(n), split=True))
    with _step(nn.Identity()).step(0):
        out = F.scaled_dot_product_attention(x, x, torch.ones_like(x), dropout_p=0.25)
    # weights are 1/4, kept ones 1/3: the sum over 4 n * 2 * 4 weights has a standard deviation of
    # sqrt(num * 0.25 * 0.75) / 3; five of them
    num = 4 * n * 2 * 4
    assert abs(float(out.sum()) - num / 4) <= 5 * (num * 0.25 * 0.75) ** 0.5 / 3
