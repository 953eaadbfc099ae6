"""The pieces for samples in a script of one's own with torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import nugnn
from nugnn.comm.groups import Ranks
from nugnn.loss import cross_entropy
from sample_cases import FLOAT64_BOUND, make_data, make_model


def _trained(ranks: Ranks, name: str, sizes: tuple[int, ...]) -> tuple[list[float], list[Tensor]]:
    """As docs/samples.md has it: the loss over all ranks of each step, and the weights after two epochs."""
    data = make_data("tokens" if name == "transformer" else "images", 53)
    model = make_model(name).double().train()
    trained = DistributedDataParallel(model, process_group=ranks.control) if ranks.is_split else model
    sampler = nugnn.SplitBatchSampler(len(data), sizes, ranks.rank, seed=0)
    mean = nugnn.BatchMean(cross_entropy, ranks)
    interceptor = nugnn.intercept_samples(model, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, step = [], 0
    for epoch in range(2):
        sampler.begin(epoch)
        for number, batch in enumerate(nugnn.batch_loader(data, sampler)):
            x, labels = nugnn.as_samples(batch, ranks).data
            with interceptor.step(step):
                loss = mean(trained(x), labels, mean.total(sampler.counts(number), [labels]))
                optimizer.zero_grad()
                (ranks.world_size * loss).backward()
            optimizer.step()
            losses.append(float(ranks.sum_(loss.detach().clone())))
            step += 1
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("sizes", [(18, 6), (5, 0)], ids=str)
def test_uneven_batches_under_ddp_are_those_of_one_process(ranks: Any, name: str, sizes: tuple[int, ...]) -> None:
    expected, weights = _trained(Ranks(), name, (sum(sizes),))
    for losses, own in ranks.run(len(sizes), _trained, name, sizes):
        assert losses == pytest.approx(expected, rel=FLOAT64_BOUND, abs=FLOAT64_BOUND)
        for mine, theirs in zip(own, weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=FLOAT64_BOUND, atol=FLOAT64_BOUND)
