"""One line in a script with DistributedDataParallel: replicas stay the same bits, and DDP's ways are not in the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nugnn
from nugnn.comm.compression import compressor
from nugnn.comm.compression.ddp import CompressedGradients, compress
from nugnn.comm.groups import Ranks

WIRES: tuple[int | str, ...] = (8, 4, 1, "bf16", "fp16", "adaptive", "powersgd")


class _Net(nn.Module):
    """A layer that all use, one that some leave out, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 48), nn.Linear(48, 30)
        self.sometimes, self.never = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x if leaves_out else self.sometimes(x).tanh())  # type: ignore[no-any-return]


def _ddp(ranks: Ranks, make: Callable[[], nn.Module] = _Net, **how: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    how = {"find_unused_parameters": make is _Net, "bucket_cap_mb": 0.01} | how
    return DistributedDataParallel(make(), process_group=ranks.control, **how)


def _compress(ranks: Ranks, model: DistributedDataParallel, *options: Any, **named: Any) -> CompressedGradients:
    return compress(model, *options, group=ranks.halo, **named)


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 48), nn.Linear(48, 30))


class _Crossed(nn.Module):
    """Layers that are used in another order than they are named in, so that DDP lays out its buckets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.between = nn.Linear(48, 30), nn.Linear(40, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor, *_: bool) -> Tensor:
        return self.last(self.between(self.first(x).tanh()).tanh())  # type: ignore[no-any-return]


def _x(rank: int, step: int) -> Tensor:
    return torch.randn(6 + rank, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(
    model: DistributedDataParallel, ranks: Ranks, steps: range, sync: CompressedGradients | None = None, **sgd: Any
) -> list[Tensor]:
    """Uneven batches, and layers that ranks leave out in turn."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **sgd)
    total = sum(6 + rank for rank in range(ranks.world_size))
    for step in steps:
        optimizer.zero_grad()
        x = _x(ranks.rank, step)
        if sync is not None:
            sync.weight = len(x) / total
        loss = model(x, (step + ranks.rank) % 3 == 0).square().mean()
        loss.backward()
        assert model.module.never.weight.grad is None
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _replicas(ranks: Ranks, num_steps: int, wires: tuple[int | str, ...]) -> list[list[Tensor]]:
    found = []
    compressor.FIRST_PLAN, compressor.STEPS_BETWEEN_PLANS = 3, 5
    try:
        for wire in wires:
            is_long = num_steps > 100
            for feeds_back in (True, False) if is_long else (None, False) if wire == 4 else (None,):
                for views in (True, False) if not is_long and wire == 4 else (wire != 4,):
                    model = _ddp(ranks, gradient_as_bucket_view=views)
                    sync = _compress(ranks, model, wire, error_feedback=feeds_back, check_every=3)
                    found.append(_train(model, ranks, range(num_steps), sync))
    finally:
        compressor.FIRST_PLAN, compressor.STEPS_BETWEEN_PLANS = 8, 200
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_replicas_stay_the_same_bits(ranks: Any, num_ranks: int) -> None:
    first, *others = ranks.run(num_ranks, _replicas, 4, WIRES if num_ranks == 2 else (4,))
    assert all(_equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    of_four = 0 if num_ranks == 3 else 1
    assert _equal(first[of_four], first[of_four + 1])  # with gradients as views of buckets, and without


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicas_stay_the_same_bits_for_200_steps(ranks: Any, num_ranks: int) -> None:
    wires = ("bf16", "fp16", 8, 4, 3, 2, 1, "adaptive", "powersgd")
    first, *others = ranks.run(num_ranks, _replicas, 200, wires, timeout=550)
    assert all(_equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def _weighted(ranks: Ranks) -> float:
    """8 bits of everything against one process that has all rows."""
    model = _ddp(ranks)
    whole = copy.deepcopy(model.module)
    sync = compress(model, "fp32")  # in a group that it makes
    sync.weight = (6 + ranks.rank) / 13
    model(_x(ranks.rank, 0)).square().mean().backward()
    whole(torch.cat([_x(rank, 0) for rank in range(2)])).square().mean().backward()
    pairs = zip(model.module.parameters(), whole.parameters(), strict=True)
    return max(
        float((a.grad - b.grad).abs().max() / b.grad.abs().max())
        for a, b in pairs
        if b.grad is not None  # type: ignore
    )


def test_unequal_batches_have_the_gradient_of_one_process(ranks: Any) -> None:
    # sums of up to 13 * 30 products in another order, one after the other through three layers
    assert max(ranks.run(2, _weighted)) < 3 * 400 * 2.0**-24


def _accumulated(ranks: Ranks) -> tuple[int, float]:
    """Three micro-batches, one exchange; as one batch of their gradients."""
    model, whole = _ddp(ranks), _ddp(ranks)
    sync, of_whole = _compress(ranks, model, 4), _compress(ranks, whole, 4)
    for _ in range(2):
        for part in range(2):
            with model.no_sync():
                model(_x(ranks.rank, part)).square().mean().backward()
        model(_x(ranks.rank, 2)).square().mean().backward()
        sum(whole(_x(ranks.rank, part)).square().mean() for part in range(1)).backward()  # type: ignore[union-attr]
        model.zero_grad()
        whole.zero_grad()
    report, other = sync.report(), of_whole.report()
    return report["steps"], report["sent_bytes"] - other["sent_bytes"]


def test_accumulation_exchanges_once_a_step(ranks: Any) -> None:
    assert ranks.run(2, _accumulated) == [(2, 0), (2, 0)]


def _all_that_was_sent(ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], bool]:
    """Sums of gradients that arrived, of this rank's own, and what it keeps, over DDP's change of buckets."""
    model = _ddp(ranks, _Crossed, bucket_cap_mb=0.012)
    sync = _compress(ranks, model, 3, bucket=64)
    layouts, sum_ = set(), compressor.Compressor.sum_

    def seen(self: Any, values: Tensor, names: list[str], *args: Any) -> None:
        layouts.add(tuple(names))
        sum_(self, values, names, *args)

    twin = copy.deepcopy(model.module)
    arrived: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for step in range(4):
        for net in (model, twin):
            net.zero_grad()
            with mock.patch.object(compressor.Compressor, "sum_", seen):
                net(_x(ranks.rank, step)).square().mean().backward()
        for (name, a), b in zip(model.module.named_parameters(), twin.parameters(), strict=True):
            for total, grad in ((arrived, a.grad), (own, b.grad)):
                if grad is not None:
                    total[name] = total.get(name, 0) + grad.double()
    return (
        arrived,
        own,
        sync.state_dict()["residuals"],
        len({n for names in layouts for n in names}) < sum(map(len, layouts)),
    )


def test_what_arrived_and_what_is_kept_are_all_gradients_whatever_the_buckets(ranks: Any) -> None:
    """Keys are names of parameters: DDP lays its buckets out anew after the first step."""
    results = ranks.run(2, _all_that_was_sent)
    assert all(changed for *_, changed in results)
    for name in ("first.weight", "between.weight", "last.weight"):
        mean = sum(own[name] for _, own, _, _ in results) / 2
        kept = sum(residuals[name].double() for _, _, residuals, _ in results)
        error = (results[0][0][name] + kept - mean).abs().max()
        assert float(error) < 4 * 8 * 2.0**-24 * float(mean.abs().max() + kept.abs().max())
    assert not any("bias" in name for _, _, residuals, _ in results for name in residuals)


def _resumed(ranks: Ranks, rounding: str) -> bool:
    whole = _ddp(ranks)
    seed = 5 if rounding == "stochastic" else 0
    sync = _compress(ranks, whole, 2, rounding=rounding, seed=seed)
    _train(whole, ranks, range(2), sync)
    model = _ddp(ranks)
    model.load_state_dict(whole.state_dict())
    again = _compress(ranks, model, 2, rounding=rounding, seed=seed)
    again.load_state_dict(sync.state_dict())
    return _equal(_train(whole, ranks, range(2, 4), sync), _train(model, ranks, range(2, 4), again))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_resumed_script_goes_on_in_the_same_bits(ranks: Any, rounding: str) -> None:
    assert ranks.run(2, _resumed, rounding) == [True, True]


def _scaled(ranks: Ranks) -> tuple[list[Tensor], list[float], bool]:
    """A loss scale that changes; infinite gradients on one rank."""
    model = _ddp(ranks, _two_layers)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    sync = _compress(ranks, model, 4, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scales, kept = [], True
    for step in range(5):
        optimizer.zero_grad()
        loss = model(_x(ranks.rank, step)).square().mean()
        before = sync.state_dict()["residuals"]
        scaler.scale(loss * float("inf") if step == 3 and ranks.rank == 1 else loss).backward()
        if step == 3:
            after = sync.state_dict()["residuals"]
            kept = all(torch.equal(before[name], after[name]) for name in before) and len(before) == 2
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach().clone() for p in model.parameters()], scales, kept


def _unscaled(ranks: Ranks) -> list[Tensor]:
    model = _ddp(ranks, _two_layers)
    _compress(ranks, model, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in (0, 1, 2, 4):
        optimizer.zero_grad()
        model(_x(ranks.rank, step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_a_loss_scale_changes_nothing_and_an_overflow_is_seen_by_all(ranks: Any) -> None:
    """Scales are powers of two, so all is as without one, in the same bits."""
    (a, scales, kept), (b, others, also) = ranks.run(2, _scaled)
    assert _equal(a, b) and scales == others == [2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10] and kept and also
    assert _equal(a, ranks.run(2, _unscaled)[0])


class _Counts(nn.Module):
    """Counts over ranks in forward."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.group = nn.Linear(40, 40), ranks.control
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        counts, integers = torch.tensor([len(x)]), torch.arange(999_000.0, 1_000_025.0)
        dist.all_reduce(counts, group=self.group)
        dist.all_reduce(integers, op=dist.ReduceOp.MAX, group=self.group)
        self.seen = [counts, integers]
        return self.layer(x)  # type: ignore[no-any-return]


def _other_traffic(ranks: Ranks) -> tuple[int, bool]:
    model = _ddp(ranks, lambda: _Counts(ranks))
    _compress(ranks, model, 4)
    for step in range(3):
        model(_x(ranks.rank, step)).sum().backward()
    counts, integers = model.module.seen
    return int(counts), torch.equal(integers, torch.arange(999_000.0, 1_000_025.0))


def test_comm_02_other_collectives_arrive_exact(ranks: Any) -> None:
    assert ranks.run(2, _other_traffic) == [(13, True)] * 2


def _diverged(ranks: Ranks) -> str:
    model = _ddp(ranks)
    sync = _compress(ranks, model, 4, check_every=2)
    _train(model, ranks, range(2), sync)
    with torch.no_grad():
        model.module.sometimes.weight[3, 4] += 1e-6 * ranks.rank
    try:
        _train(model, ranks, range(2, 3), sync)
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def test_replicas_that_diverge_are_named(ranks: Any) -> None:
    for said in ranks.run(2, _diverged):
        assert "sometimes.weight is no longer the same on all ranks after 2 steps" in said


def _refusals(ranks: Ranks) -> list[str]:
    said = []
    attempts = [
        lambda: compress(_Net()),  # type: ignore[arg-type]
        lambda: _compress(ranks, _ddp(ranks), 9),
        lambda: _compress(ranks, _ddp(ranks), "4bits"),
        lambda: _compress(ranks, _ddp(ranks), check_every=-1),
        lambda: _compress(ranks, _ddp(ranks), rank=3),
        lambda: _compress(ranks, _ddp(ranks), "powersgd", rank=0),
        lambda: compress(_ddp(ranks), group=dist.group.WORLD),
        lambda: _compress(ranks, _ddp(ranks, lambda: nn.Linear(40, 40).double())),
    ]
    for attempt in attempts:
        try:
            attempt()
        except (TypeError, ValueError) as error:
            said.append(str(error))
    model = _ddp(ranks)
    sync = _compress(ranks, model, 4)
    sync.weight = 7
    try:
        model(_x(0, 0)).sum().backward()
    except (RuntimeError, ValueError) as error:
        said.append(str(error))
    try:
        sync.load_state_dict({"world_size": 3})
    except ValueError as error:
        said.append(str(error))
    return said


def test_what_does_not_fit_is_refused(ranks: Any) -> None:
    words = [
        "not a _Net; nugnn.fit and nugnn train have the option grad_sync",
        "cannot travel as '9bit'",
        "cannot travel as '4bits'",
        "check_every is -1",
        "rank 3 has no effect on 4bit",
        "rank is 0",
        "group has the ranks [0, 1, 2, 3, 4], and the model is on the ranks [0, 1]",
        "weight is torch.float64",
        "weight is 7, must be this rank's share",
        "the state is of 3 ranks, and there are 2",
    ]
    for said in ranks.run(2, _refusals):
        assert len(said) == len(words), said
        assert all(word in text for word, text in zip(words, said, strict=True)), said


def test_the_line_in_a_script() -> None:
    assert nugnn.comm.compress is compress
