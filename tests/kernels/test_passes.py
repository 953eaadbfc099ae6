"""A batch that a model cuts into calls has the masks of one that it does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nugnn
from nugnn.batches import Batch
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.kernels.passes import Passes
from nugnn.kernels.rows import Rows

NUM_SAMPLES, WIDTH = 12, 8
Forward = Callable[["Pieces", Tensor], Tensor]


class Pieces(nn.Module):
    def __init__(self, how: Forward) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True)
        self.both = nn.Sequential(self.linear, self.drop)
        self._how = how

    def block(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.linear(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self._how(self, x)


def _chunks_of(num: int) -> Forward:
    return lambda model, x: torch.cat([model.block(piece) for piece in x.split(num)])


def _slices(model: Pieces, x: Tensor) -> Tensor:
    return torch.cat([model.block(x[first : first + 5]) for first in range(0, max(len(x), 1), 5)])


def _picked(model: Pieces, x: Tensor) -> Tensor:
    """Samples of small and of large values, whichever part they are in."""
    is_large = x.sum(1) > 0
    out = torch.zeros_like(x)
    for flags in (is_large, ~is_large):
        out[flags] = model.block(x[flags])
    return out


def _twice(model: Pieces, x: Tensor) -> Tensor:
    """Two views of each sample, one after the other, in chunks."""
    return _chunks_of(4)(model, x) - _chunks_of(3)(model, 2 * x)


def _attention(model: Pieces, x: Tensor) -> Tensor:
    return torch.cat([model.layer(piece[:, None].expand(-1, 3, -1)) for piece in x.split(4)])[:, 0]


def _recomputed(model: Pieces, x: Tensor) -> Tensor:
    return torch.cat([checkpoint(model.both, piece, use_reentrant=False) for piece in x.split(4)])


HOWS = {
    "chunks of 4": _chunks_of(4),
    "chunks of 1": _chunks_of(1),
    "slices": _slices,
    "picked": _picked,
    "twice": _twice,
    "attention": _attention,
    "recomputed": _recomputed,
}


def _gradient(ranks: Ranks, model: nn.Module, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    model = copy.deepcopy(model)
    first = sum(sizes[: ranks.rank])
    ids = torch.arange(first, first + sizes[ranks.rank])
    interceptor = nugnn.intercept_samples(model, ranks, seed=3)
    batch = nugnn.as_samples(Batch(ids, (x[ids].clone(),)), ranks)
    with interceptor.step(5):
        out = model(batch.data[0])
        out.square().sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return out.detach(), gradients


@pytest.mark.parametrize("name", HOWS)
def test_chunks_of_a_batch_draw_as_the_batch(name: str) -> None:
    how = HOWS[name]
    torch.manual_seed(0)
    model, x = Pieces(how).double(), torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64)
    expected, gradients = _gradient(Ranks(), model, x, (NUM_SAMPLES,))
    for sizes in ((6, 6), (7, 5), (11, 1)):
        parts = run_local_ranks(2, lambda ranks, sizes=sizes: _gradient(ranks, model, x, sizes))
        torch.testing.assert_close(torch.cat([out for out, _ in parts]), expected, rtol=0, atol=1e-12)
        for number, total in enumerate(gradients):
            torch.testing.assert_close(sum(own[number] for _, own in parts), total, rtol=0, atol=1e-11)


def test_two_views_of_a_sample_draw_other_numbers() -> None:
    torch.manual_seed(0)
    model = Pieces(lambda model, x: torch.cat([model.drop(x), model.drop(x)], 1) + 0 * model.linear.bias.sum()).double()
    out, _ = _gradient(Ranks(), model, torch.ones(NUM_SAMPLES, WIDTH, dtype=torch.float64), (NUM_SAMPLES,))
    assert not torch.equal(out[:, :WIDTH], out[:, WIDTH:])


def test_names() -> None:
    ids = torch.arange(8)
    whole = Rows("sample", ids)
    first, second, odd = whole.picked(slice(0, 4)), whole.picked(slice(4, 8)), whole.picked(torch.tensor([1, 3]))
    none = whole.picked(slice(2, 2))
    steps = whole.steps(torch.tensor([8, 8]))
    passes = Passes()
    assert [passes.name(f"a/dropout{end}", rows) for end, rows in (("", first), ("#1", second), ("#2", none))] == [
        "a/dropout"
    ] * 3
    assert passes.name("a/dropout#3", odd) == "a/dropout#1"  # it was in the first slice
    assert passes.name("a/dropout#4", whole) == "a/dropout#2"
    assert passes.name("a/dropout#1", Rows("sample", ids.clone())) == "a/dropout"  # again, in backward
    assert passes.name("a/dropout#5", steps) == "a/dropout#3"  # ids of steps are no samples' ids
    nodes = Rows("node", ids), Rows("edge", ids + 100)
    assert [passes.name(name, rows) for name, rows in zip(("b", "b#1"), nodes, strict=True)] == ["b", "b#1"]
    assert [passes.name(name, None) for name in ("c", "c#1", "c>d#x")] == ["c", "c#1", "c>d#x"]
