"""Batches divided unevenly among ranks train as one process does: the law of the second family."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nugnn.batches import Batch, SplitBatchSampler, apportioned, batch_loader
from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.loss import cross_entropy
from nugnn.samples import BatchMean, as_samples, intercept_samples
from sample_cases import FLOAT64_BOUND, make_data, make_model


def train(
    ranks: Ranks,
    name: str,
    sizes: tuple[int, ...],
    num_samples: int,
    *,
    epochs: int = 2,
    dtype: torch.dtype = torch.float64,
    class_weights: Tensor | None = None,
    micro_batches: int = 1,
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first step's gradients and the final state, of a loop such as a user writes."""
    dataset = make_data("images" if name in ("mlp", "cnn", "instance-norm") else "tokens", num_samples, dtype)
    model = make_model(name).to(dtype)
    # eps: see test_exactness.py
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    sampler = SplitBatchSampler(num_samples, sizes, ranks.rank, seed=3)
    interceptor, mean = intercept_samples(model, ranks, seed=5), BatchMean(cross_entropy, ranks, class_weights)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for epoch in range(epochs):
        sampler.begin(epoch)
        for number, batch in enumerate(batch_loader(dataset, sampler)):
            x, labels = as_samples(batch, ranks).data
            cuts = [len(x) * part // micro_batches for part in range(micro_batches + 1)]
            parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
            total = mean.total(sampler.counts(number), [labels[part] for part in parts])
            optimizer.zero_grad()
            share = torch.zeros((), dtype=torch.float64)
            for part in parts:
                with interceptor.step(len(losses)):
                    loss = mean(model(x[part]), labels[part], total)
                    loss.backward()
                share += loss.detach()
            sum_gradients(model.parameters(), ranks)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            gradients = gradients or {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            losses.append(float(ranks.sum_(share)))
    return losses, gradients, copy.deepcopy(model.state_dict())


def largest_difference(one: Any, many: Any) -> float:
    worst = max(abs(a - b) / abs(a) for a, b in zip(one[0], many[0], strict=True))
    for mine, theirs in zip(one[1:], many[1:], strict=True):
        assert mine.keys() == theirs.keys()
        scale = max(float(value.double().abs().max()) for value in mine.values())
        for key, value in mine.items():
            worst = max(worst, float((value.double() - theirs[key].double()).abs().max()) / scale)
    return worst


@pytest.mark.parametrize(
    ("sizes", "num_samples"),
    [((18, 6), 100), ((144, 112), 600), ((5, 0), 23), ((7, 5, 3, 1), 70)],
    ids=["18-6", "144-112", "5-0", "7-5-3-1"],
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_uneven_batches_equal_one_process(ranks: Any, name: str, sizes: tuple[int, ...], num_samples: int) -> None:
    alone = train(Ranks(), name, (sum(sizes),), num_samples)
    assert len(alone[0]) == 2 * -(-num_samples // sum(sizes))
    runs = ranks.run(len(sizes), train, name, sizes, num_samples)
    for run in runs:
        assert largest_difference(alone, run) <= FLOAT64_BOUND
        assert all(torch.equal(value, run[2][key]) for key, value in runs[0][2].items())


@pytest.mark.parametrize("sizes", [(5, 0), (7, 5, 3, 1)], ids=["5-0", "7-5-3-1"])
@pytest.mark.parametrize("name", ["torch-attention", "transformer-max", "instance-norm"])
def test_attention_of_torch_and_what_else_a_network_may_have(ranks: Any, name: str, sizes: tuple[int, ...]) -> None:
    alone = train(Ranks(), name, (sum(sizes),), 40)
    for run in ranks.run(len(sizes), train, name, sizes, 40):
        assert largest_difference(alone, run) <= FLOAT64_BOUND


@pytest.mark.parametrize("name", ["lstm", "lstm-packed"])
def test_a_text_classifier_with_a_recurrent_network(ranks: Any, name: str) -> None:
    alone = train(Ranks(), name, (7,), 40)
    for run in ranks.run(2, train, name, (5, 2), 40):
        assert largest_difference(alone, run) <= FLOAT64_BOUND


def _attend(ranks: Ranks, *, is_known: bool) -> Tensor:
    """Sequences on axis 0 and samples on axis 1; or nobody can tell whose they are."""
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))
    own = (slice(4), slice(4, 6))[ranks.rank] if ranks.is_split else slice(6)
    batch = as_samples(Batch(torch.arange(6)[own], x[own]), ranks)
    model = nn.MultiheadAttention(8, 2, dropout=0.5)
    for weight in (model.in_proj_weight, model.out_proj.weight):
        nn.init.eye_(weight)
    with intercept_samples(model, ranks).step(0):
        turned = batch.data.permute(1, 0, 2)
        if not is_known:
            turned = torch.from_numpy(turned.numpy())
        return model(turned, turned, turned)[0]  # type: ignore[no-any-return]


def test_attention_along_axis_0_drops_by_sample(ranks: Any) -> None:
    """Samples on axis 1, as without batch_first: their identity lies along that axis."""
    alone = _attend(Ranks(), is_known=True)
    parts = ranks.run(2, _attend, is_known=True)
    torch.testing.assert_close(torch.cat(parts, 1), alone, rtol=1e-5, atol=1e-6)  # a few roundings in float32


def test_attention_dropout_on_unknown_rows_is_refused(ranks: Any) -> None:
    assert _attend(Ranks(), is_known=False).shape == (5, 6, 8)
    with pytest.raises(AssertionError, match=r"NotImplementedError.*batch_first=True"):
        ranks.run(2, _attend, is_known=False)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_class_weights_and_micro_batches(ranks: Any, name: str) -> None:
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1])
    norm_free = name == "transformer"  # batch norm sees one micro-batch at a time, on any number of ranks
    alone = train(Ranks(), name, (12,), 50, class_weights=weights, micro_batches=1)
    options = {"class_weights": weights, "micro_batches": 2 if norm_free else 1}
    for run in ranks.run(2, train, name, (8, 4), 50, **options):
        assert largest_difference(alone, run) <= FLOAT64_BOUND


def test_one_process_is_plain_torch() -> None:
    model = make_model("mlp").double().eval()
    dataset = make_data("images", 20)
    sampler = SplitBatchSampler(20, (20,), shuffle=False)
    (batch,) = batch_loader(dataset, sampler)
    x, labels = as_samples(batch, Ranks()).data
    with intercept_samples(model, Ranks()).step(0):
        mine = BatchMean(cross_entropy, Ranks())(model(x), labels, 20)
    torch.testing.assert_close(mine, nn.functional.cross_entropy(model(x), labels))


@pytest.mark.parametrize("sizes", [(18, 6), (5, 0), (0, 0, 4), (7, 5, 3, 1), (1,)])
@pytest.mark.parametrize("num_samples", [1, 5, 23, 24, 47, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_an_epoch(sizes: tuple[int, ...], num_samples: int, shuffle: bool) -> None:
    samplers = [SplitBatchSampler(num_samples, sizes, rank, shuffle=shuffle) for rank in range(len(sizes))]
    whole = SplitBatchSampler(num_samples, (sum(sizes),), shuffle=shuffle)
    seen = []
    for epoch in (0, 3):
        for sampler in (*samplers, whole):
            sampler.begin(epoch)
        batches = [list(sampler) for sampler in samplers]
        assert len({len(each) for each in batches}) == 1 and len(batches[0]) == len(samplers[0])
        for number, (parts, expected) in enumerate(zip(zip(*batches, strict=True), whole, strict=True)):
            assert [i for part in parts for i in part] == expected
            assert tuple(map(len, parts)) == samplers[0].counts(number)
        seen.append([i for parts in zip(*batches, strict=True) for part in parts for i in part])
        assert sorted(seen[-1]) == list(range(num_samples))
        for sampler in samplers:  # going on in mid-epoch
            sampler.begin(epoch, 1)
            assert list(sampler) == batches[sampler.rank][1:] and len(sampler) == len(batches[0]) - 1
    assert num_samples < 20 or not shuffle or seen[0] != seen[1]


def test_counts_are_the_nearest_that_add_up() -> None:
    assert apportioned(8, (18, 6)) == (6, 2)
    assert apportioned(3, (7, 5, 3, 1)) == (1, 1, 1, 0)
    assert apportioned(1, (1, 1)) == (1, 0)
    for count in range(40):
        sizes = (7, 0, 5, 3, 1)
        counts = apportioned(count, sizes)
        assert sum(counts) == count and counts[1] == 0
        assert all(abs(got - count * size / 16) < 1 for got, size in zip(counts, sizes, strict=True))


def test_drop_last_and_wrong_sizes() -> None:
    assert len(list(SplitBatchSampler(23, (4, 2), drop_last=True))) == 3
    for sizes, rank, match in (((), 0, "batch sizes"), ((0, 0), 0, "at least one"), ((4, -1), 0, "whole numbers")):
        with pytest.raises(ValueError, match=match):
            SplitBatchSampler(10, sizes, rank)
    with pytest.raises(ValueError, match="rank 2 has no batch size"):
        SplitBatchSampler(10, (1, 1), 2)
    with pytest.raises(ValueError, match="no samples"):
        SplitBatchSampler(0, (1,))
    with pytest.raises(ValueError, match="no batch of 12"):
        SplitBatchSampler(10, (12,), drop_last=True)


def test_what_is_no_row_per_sample_is_refused() -> None:
    dataset = make_data("images", 6)
    loader = batch_loader(dataset, SplitBatchSampler(6, (6,)), collate_fn=lambda samples: torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"shape \(2, 3\) in a batch of 6"):
        as_samples(next(iter(loader)), Ranks())
    with pytest.raises(ValueError, match="without a mean or sum"):
        BatchMean(lambda x, y: x.mean(), Ranks())(torch.ones(3, 2), torch.ones(3), 3)
    with pytest.raises(ValueError, match="all or local"):
        intercept_samples(nn.Identity(), Ranks(), batch_norm="sync")  # type: ignore[arg-type]


def _norm_of_own_rows(ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Batch norm of this rank's part under ``local``, and what torch makes of the same rows."""
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float64)
    norm, own = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    batch = as_samples(Batch(torch.arange(6) + 6 * ranks.rank, x), ranks)
    with intercept_samples(norm, ranks, batch_norm="local").step(0):
        return norm(batch.data), own(x.clone())


def test_local_batch_norm_counts_a_ranks_own_rows(ranks: Any) -> None:
    for mine, expected in ranks.run(2, _norm_of_own_rows):
        assert torch.equal(mine, expected)


def test_strings_go_with_their_samples_into_parts_of_a_batch() -> None:
    dataset = [({"x": torch.full((2,), float(i)), "name": (str(i), f"{i}!")}, i) for i in range(5)]
    (batch,) = batch_loader(dataset, SplitBatchSampler(5, [5], shuffle=False))  # type: ignore[arg-type]
    for part in (batch.part(number, 2) for number in range(2)):
        x, labels = part.data
        assert x["x"][:, 0].tolist() == labels.tolist() == part.ids.tolist() and len(part.ids) in (2, 3)
        assert [list(names) for names in x["name"]] == [[f"{i}{end}" for i in part.ids.tolist()] for end in ("", "!")]
    empty = next(iter(batch_loader(dataset, SplitBatchSampler(5, [5, 0], 1))))  # type: ignore[arg-type]
    assert len(empty.ids) == len(empty.data[0]["x"]) == 0 and [*map(len, empty.data[0]["name"])] == [0, 0]
    ragged = Batch(torch.arange(3), (torch.zeros(3, 1), [[1, 2], [3], [4, 5]]))
    with pytest.raises(ValueError, match=r"a batch of 3 samples cannot be divided: it has a list of 2 values \(1, "):
        ragged.part(0, 2)
