"""One line in a script with DistributedDataParallel: replicas stay the same bits, and DDP's ways are not in the way."""

from __future__ import annotations

import copy
import gc
import io
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nugnn
from compressed_ways import WAYS
from logged_sums import LoggedStep, clipped, logged, parts_of, sums_of
from nugnn.comm.compression import choice, compressor, ddp
from nugnn.comm.compression.ddp import CompressedGradients, compress
from nugnn.comm.compression.settings import Compression
from nugnn.comm.groups import Ranks
from rank_server import MAX_RANKS

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


def _replicas(
    ranks: Ranks, num_steps: int, wires: tuple[int | str, ...], feedbacks: tuple[bool, ...] = ()
) -> list[list[Tensor]]:
    """Weights of each wire, with feedback or without as ``feedbacks`` say; in more ways if they say nothing."""
    found = []
    compressor.FIRST_PLAN, compressor.STEPS_BETWEEN_PLANS = 3, 5
    try:
        for wire in wires:
            for feeds_back in feedbacks or ((None, False) if wire == 4 else (None,)):
                for views in (True, False) if not feedbacks and wire == 4 else (wire != 4,):
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
@pytest.mark.parametrize(
    ("num_ranks", "feedbacks"), [(2, (True, False)), (3, (True, False)), (4, (True,)), (4, (False,))]
)
def test_replicas_stay_the_same_bits_for_200_steps(ranks: Any, num_ranks: int, feedbacks: tuple[bool, ...]) -> None:
    first, *others = ranks.run(num_ranks, _replicas, 200, WAYS, feedbacks, timeout=550)
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


def _resumed_in_new_buckets(ranks: Ranks, bits: int | str, how: dict[str, Any]) -> bool:
    """DDP lays out the buckets of ``_Crossed`` anew after the first step of each process, or the second."""

    def train(model: DistributedDataParallel, steps: range) -> list[Tensor]:
        for number in steps:
            _step(model, ranks.rank, number)
        return [p.detach().clone() for p in model.parameters()]

    whole = _ddp(ranks, _Crossed, bucket_cap_mb=0.012, **how)
    sync = _compress(ranks, whole, bits, least_size=0)
    train(whole, range(3))
    model = _ddp(ranks, _Crossed, bucket_cap_mb=0.012, **how)
    model.load_state_dict(whole.state_dict())
    again = _compress(ranks, model, bits, least_size=0)
    again.load_state_dict(sync.state_dict())
    assert again.state_dict()["buckets"] == sync.state_dict()["buckets"] and len(sync.state_dict()["buckets"]) > 1
    return _equal(train(whole, range(3, 6)), train(model, range(3, 6)))


@pytest.mark.parametrize(
    ("num_ranks", "bits", "how"),
    [(2, 4, {}), (3, 4, {}), (2, "bf16", {}), (3, "fp32", {}), (2, "powersgd", {}), (2, 4, {"static_graph": True})],
    ids=str,
)
def test_a_resumed_script_goes_on_in_the_same_bits_though_ddp_lays_out_its_buckets_anew(
    ranks: Any, num_ranks: int, bits: int | str, how: dict[str, Any]
) -> None:
    assert all(ranks.run(num_ranks, _resumed_in_new_buckets, bits, how))


class _Mixed(nn.Module):
    """Parameters of two types, which DDP never puts into one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 48), nn.Linear(48, 30).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().bfloat16()).float()  # type: ignore[no-any-return]


def _step(model: DistributedDataParallel, rank: int, number: int) -> None:
    """Of plain descent, on the rank's own batch."""
    model.zero_grad()
    model(_x(rank, number)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.05 * parameter.grad)  # type: ignore[operator]


def _static_graph_of_two_types(ranks: Ranks) -> tuple[list[int], set[str], bool]:
    """Steps that were counted, what is owed after the first one, and whether a resumed script has the same bits."""
    whole, model = (_ddp(ranks, _Mixed, static_graph=True) for _ in range(2))
    sync, again = (_compress(ranks, each, 4) for each in (whole, model))
    _step(whole, ranks.rank, 0)
    counted, owed = [sync.report()["steps"]], set(sync.state_dict()["residuals"])
    for number in range(1, 3):
        _step(whole, ranks.rank, number)
    model.load_state_dict(whole.state_dict())
    again.load_state_dict(sync.state_dict())
    for number in range(3, 6):
        _step(whole, ranks.rank, number)
        _step(model, ranks.rank, number)
    return [*counted, sync.report()["steps"], again.report()["steps"]], owed, _same(whole, model)


def test_the_first_step_of_a_static_graph_is_one_step_in_however_many_buckets(ranks: Any) -> None:
    """DDP says of each of them that it is the first, and of none that it is the last."""
    wanted = [1, 6, 3], {"first.weight", "last.weight"}, True
    assert ranks.run(2, _static_graph_of_two_types, timeout=60) == [wanted] * 2


def _resumed_after_each_step(ranks: Ranks) -> bool:
    """A new process for each step, against one that makes them all."""
    whole = _ddp(ranks, _Crossed, bucket_cap_mb=0.012)
    sync = _compress(ranks, whole, 4, least_size=0)
    for number in range(2):
        _step(whole, ranks.rank, number)
    weights, state = copy.deepcopy(whole.state_dict()), sync.state_dict()
    for number in range(2, 5):
        _step(whole, ranks.rank, number)
        model = _ddp(ranks, _Crossed, bucket_cap_mb=0.012)
        model.load_state_dict(weights)
        again = _compress(ranks, model, 4, least_size=0)
        again.load_state_dict(state)
        _step(model, ranks.rank, number)
        weights, state = model.state_dict(), again.state_dict()
    return _equal([*whole.parameters()], [*weights.values()])


def test_a_script_that_ends_after_each_step_goes_on_in_the_same_bits(ranks: Any) -> None:
    """The first buckets of a process are not those of its state."""
    assert ranks.run(2, _resumed_after_each_step) == [True, True]


def _resumed_with_an_error(ranks: Ranks) -> tuple[str, bool, bool]:
    """Of the first step after a resume, which is made again: what is saved in between, and the weights in the end."""
    whole, model = (_ddp(ranks, _Crossed, bucket_cap_mb=0.012) for _ in range(2))
    sync, scaler = _compress(ranks, whole, 4, least_size=0), _Scaler()
    again = _compress(ranks, model, 4, least_size=0, scaler=scaler)
    for number in range(2):
        _step(whole, ranks.rank, number)
    model.load_state_dict(whole.state_dict())
    again.load_state_dict(sync.state_dict())
    scaler.is_broken = True
    said, _ = _said_by(model, _x(ranks.rank, 2))
    scaler.is_broken = False
    is_kept = again.state_dict()["buckets"] == sync.state_dict()["buckets"]
    for number in range(2, 4):
        _step(whole, ranks.rank, number)
        _step(model, ranks.rank, number)
    return said, is_kept, _same(whole, model)


def test_a_first_step_that_fails_can_be_made_again_in_the_same_bits(ranks: Any) -> None:
    assert ranks.run(2, _resumed_with_an_error) == [("_NoScale", True, True)] * 2


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


# -- clipping ----------------------------------------------------------------------------------------------------------

LARGEST, RATE, STEP_LEFT_OUT = 0.05, 0.5, 2


def _clipped(ranks: Ranks) -> tuple[list[LoggedStep], list[float], list[dict[str, Tensor]]]:
    """What was summed, the norms by which gradients were clipped, and weights before each step and at the end."""
    model = _ddp(ranks, _two_layers)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    sync = _compress(ranks, model, 4, scaler=scaler)
    sync.weight = (6 + ranks.rank) / sum(6 + rank for rank in range(ranks.world_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    norms, weights = [], []
    with logged() as steps:
        for step in range(5):
            weights.append({name: p.detach().clone() for name, p in model.module.named_parameters()})
            optimizer.zero_grad()
            loss = model(_x(ranks.rank, step)).square().mean()
            is_bad = step == STEP_LEFT_OUT and ranks.rank == ranks.world_size - 1
            scaler.scale(loss * float("inf") if is_bad else loss).backward()
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LARGEST)))
            scaler.step(optimizer)
            scaler.update()
    weights.append({name: p.detach().clone() for name, p in model.module.named_parameters()})
    return steps, norms, weights


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_clipped_is_the_sum_that_arrived(ranks: Any, num_ranks: int) -> None:
    """Norm and step are those of one process that sums what all ranks have by the same codec."""
    results = ranks.run(num_ranks, _clipped)
    _, norms, weights = results[0]
    for _, other_norms, other_weights in results[1:]:
        assert other_norms[:STEP_LEFT_OUT] == norms[:STEP_LEFT_OUT]
        assert other_norms[STEP_LEFT_OUT + 1 :] == norms[STEP_LEFT_OUT + 1 :]
        for ours, theirs in zip(weights, other_weights, strict=True):
            assert _equal(list(ours.values()), list(theirs.values()))
    assert [math.isfinite(norm) for norm in norms] == [step != STEP_LEFT_OUT for step in range(5)]
    assert all(torch.equal(x, weights[STEP_LEFT_OUT + 1][name]) for name, x in weights[STEP_LEFT_OUT].items())
    eps, num_values = 2.0**-24, sum(p.numel() for p in weights[0].values())
    for step, gradients in enumerate(sums_of([steps for steps, *_ in results], weights[0], "4bit")):
        if step == STEP_LEFT_OUT:
            continue
        assert gradients.keys() == weights[0].keys()
        expected, factor = clipped(gradients, LARGEST)
        # a sum of squares in any order is within n eps of it, Higham 2002, sec. 4.2
        assert abs(norms[step] - expected) <= num_values * eps * expected
        assert factor < 1
        for name, flat in gradients.items():
            before, after = weights[step][name].double(), weights[step + 1][name].double()
            move = RATE * factor * flat.double().view(before.shape)
            bound = (num_values + 4) * eps * move.abs() + eps * (before.abs() + move.abs())
            assert ((before - move - after).abs() <= bound).all(), name


# -- frozen parameters -------------------------------------------------------------------------------------------------

FROZEN = "first.weight"


@dataclass
class _Frozen:
    """Two steps with all parameters, two with a frozen one, two with all again."""

    steps: list[LoggedStep]
    weights: list[Tensor]
    kept: list[dict[str, Tensor]]
    frozen_weight: list[Tensor]
    is_resumed: bool


def _frozen_for_a_while(ranks: Ranks) -> _Frozen:
    def phase(model: DistributedDataParallel, sync: CompressedGradients, number: int) -> None:
        model.module.get_parameter(FROZEN).requires_grad_(number != 1)
        _train(model, ranks, range(2 * number, 2 * number + 2), sync)

    model = _ddp(ranks)
    sync = _compress(ranks, model, 4)
    kept, weights = [], []
    with logged() as steps:
        for number in range(3):
            phase(model, sync, number)
            kept.append(sync.state_dict()["residuals"])
            weights.append(model.module.get_parameter(FROZEN).detach().clone())
            if number == 1:
                state, weights_then = sync.state_dict(), copy.deepcopy(model.module.state_dict())
    again = _ddp(ranks)
    again.module.load_state_dict(weights_then)
    again.module.get_parameter(FROZEN).requires_grad_(False)
    synced = _compress(ranks, again, 4)
    synced.load_state_dict(state)
    phase(again, synced, 2)
    found, after = ([p.detach().clone() for p in each.module.parameters()] for each in (model, again))
    owed = synced.state_dict()["residuals"]
    is_resumed = _equal(found, after) and _equal(list(kept[2].values()), [owed[name] for name in kept[2]])
    return _Frozen(steps, found, kept, weights, is_resumed)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_parameter_that_is_frozen_for_a_while_goes_on_owing(ranks: Any, num_ranks: int) -> None:
    """DDP gives it zeros meanwhile, where it looks for parameters that are not used."""
    results = ranks.run(num_ranks, _frozen_for_a_while)
    for of_rank in results:
        assert _equal(of_rank.weights, results[0].weights) and of_rank.is_resumed
        before, meanwhile, after = of_rank.kept
        assert torch.equal(before[FROZEN], meanwhile[FROZEN]) and not torch.equal(before[FROZEN], after[FROZEN])
        assert before[FROZEN].any() and before.keys() == meanwhile.keys() == after.keys()
        assert torch.equal(of_rank.frozen_weight[0], of_rank.frozen_weight[1])
        assert not torch.equal(of_rank.frozen_weight[1], of_rank.frozen_weight[2])
    named = {name: p for name, p in zip(dict(_Net().named_parameters()), results[0].weights, strict=True)}
    for name in results[0].kept[-1]:
        arrived = torch.zeros(named[name].numel(), dtype=torch.float64)
        given, mass = arrived.clone(), 0.0
        for steps in zip(*(of_rank.steps for of_rank in results), strict=True):
            for sums in zip(*(step.sums for step in steps), strict=True):
                if name in sums[0].names:
                    arrived += parts_of(sums[0].total, sums[0], named)[name].double()
                    for each in sums:
                        part = parts_of(each.values, each, named)[name].double()
                        given += part
                        mass += float(part.abs().max())
        kept = [of_rank.kept[-1][name].double().flatten() for of_rank in results]
        # each gradient is rounded some 6 times in float32, with what is kept, which is no larger than all of them
        assert float((arrived + sum(kept) - given).abs().max()) <= 6 * 6 * 2.0**-24 * 2 * mass


def _frozen_from_the_start(ranks: Ranks, *, before_ddp: bool) -> tuple[list[Tensor], set[str], int, bool]:
    def make() -> nn.Module:
        net = _Net()
        net.get_parameter(FROZEN).requires_grad_(not before_ddp)
        return net

    model = _ddp(ranks, make, find_unused_parameters=True)
    model.module.get_parameter(FROZEN).requires_grad_(False)
    sync = _compress(ranks, model, 4)
    first = model.module.get_parameter(FROZEN).detach().clone()
    found = _train(model, ranks, range(3), sync)
    stays = torch.equal(first, model.module.get_parameter(FROZEN))
    owes = {name for name, kept in sync.state_dict()["residuals"].items() if kept.any()}
    return found, owes, sync.report()["sent_bytes"], stays


def test_a_parameter_that_is_frozen_from_the_start_owes_nothing(ranks: Any) -> None:
    """Frozen before DDP is made it does not travel; behind it DDP has room for it in its buckets, with zeros."""
    num_bytes = []
    for before_ddp in (True, False):
        (found, owes, sent, stays), (others, *same) = ranks.run(2, _frozen_from_the_start, before_ddp=before_ddp)
        assert _equal(found, others) and same[0] == owes and stays and same[2]
        assert owes == {"last.weight", "sometimes.weight"}
        num_bytes.append(sent)
    assert num_bytes[0] < num_bytes[1]


class _WithOwn(_Net):
    """Each rank has a weight of its own, which DDP is asked to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(40, 40, bias=False)
        nn.init.constant_(self.own.weight, 1.0 + dist.get_rank())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["own.weight"])

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        return super().forward(self.own(x) / 40, leaves_out)


def _left_alone(ranks: Ranks, is_frozen: bool) -> tuple[dict[str, Tensor], set[str]]:
    model = _ddp(ranks, _WithOwn, find_unused_parameters=True)
    model.module.own.weight.requires_grad_(not is_frozen)
    sync = _compress(ranks, model, 4, check_every=1)
    _train(model, ranks, range(3), sync)
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}, set(sync.state_dict()["arranged"])


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_ddp_leaves_alone_is_each_ranks_own(ranks: Any, is_frozen: bool) -> None:
    (first, compressed), (second, _) = ranks.run(2, _left_alone, is_frozen)
    assert compressed == {"first.weight", "last.weight", "sometimes.weight", "never.weight"}
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["own.weight"]


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
    named = "sometimes.weight is no longer the same on all ranks after 2 steps: replicas have diverged"
    assert ranks.run(2, _diverged) == [named] * 2


class _NoScale(Exception):  # noqa: N818
    """Of a type that torch does not know."""


class _Scaler:
    def __init__(self) -> None:
        self.is_broken = False

    def get_scale(self) -> float:
        if self.is_broken:
            raise _NoScale("the scale is gone", 7)
        return 1.0


def _said_by(model: DistributedDataParallel, x: Tensor) -> tuple[str, tuple[Any, ...]]:
    try:
        model(x).sum().backward()
    except Exception as error:
        return type(error).__name__, error.args
    return "", ()


def _errors_of_hooks(ranks: Ranks, how: dict[str, Any]) -> list[Any]:
    """Of the lane, of the hook itself, and the step after them, which is none's business."""
    model, scaler = _ddp(ranks, _two_layers, **how), _Scaler()
    sync = _compress(ranks, model, 4, scaler=scaler)
    said = [_said_by(model, _x(0, 0))]
    scaler.is_broken = True
    said.append(_said_by(model, _x(0, 1)))
    scaler.is_broken = False
    said.append(_said_by(model, _x(0, 2)))
    return [said, sync.report()["steps"], bool(model.module[0].weight.grad.any())]


def _exposed(ranks: Ranks, how: dict[str, Any], delay: float) -> tuple[float, float]:
    """Seconds that sums of two steps were waited for, and those that two backward passes took."""
    model = _ddp(ranks, _two_layers, **how)
    sync = _compress(ranks, model, 4)
    work, took = sync._compressor.settle, 0.0

    def late(*args: Any, **named: Any) -> None:
        time.sleep(delay)
        work(*args, **named)

    with mock.patch.object(sync._compressor, "settle", late):
        for step in range(2):
            loss = model(_x(ranks.rank, step)).sum()
            begin = time.perf_counter()
            loss.backward()
            took += time.perf_counter() - begin
    return float(sync.report()["exposed_seconds"]), took


@pytest.mark.parametrize(("how", "num_seen"), [({}, 2), ({"static_graph": True}, 1)])
def test_what_backward_waited_for_sums_is_reported(ranks: Any, how: dict[str, Any], num_seen: int) -> None:
    for exposed, took in ranks.run(2, _exposed, how, 0.3):
        assert num_seen * 0.3 <= exposed <= took


@pytest.mark.parametrize("how", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 25}])
def test_errors_of_the_exchange_are_the_ones_that_were_raised(ranks: Any, how: dict[str, Any]) -> None:
    wanted = [[("", ()), ("_NoScale", ("the scale is gone", 7)), ("", ())], 2, True]
    assert ranks.run(2, _errors_of_hooks, how) == [wanted] * 2


def _refusals(ranks: Ranks) -> list[str]:
    said = []
    attempts = [
        lambda: compress(_Net()),  # type: ignore[arg-type]
        lambda: _compress(ranks, _ddp(ranks), 9),
        lambda: _compress(ranks, _ddp(ranks), "4bits"),
        lambda: _compress(ranks, _ddp(ranks), check_every=-1),
        lambda: _compress(ranks, _ddp(ranks), rank=3),
        lambda: _compress(ranks, _ddp(ranks), "powersgd", rank=0),
        lambda: _compress(ranks, _ddp(ranks), exact=["frist.*"]),
        lambda: _compress(ranks, _ddp(ranks), "auto", bucket=64),
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
    except ValueError as error:
        said.append(str(error))
    owed_by_the_other = {**sync.state_dict(), "rank": 1 - ranks.rank, "residuals": {"first.weight": torch.ones(2)}}
    for state in ({"world_size": 3}, owed_by_the_other):
        try:
            sync.load_state_dict(state)
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_does_not_fit_is_refused(ranks: Any) -> None:
    words = [
        "not a _Net; nugnn.fit and nugnn train have the option grad_sync",
        "bits is 9, must be 1 to 8, fp32, bf16, fp16, adaptive, powersgd or auto",
        "bits is '4bits', must be 1 to 8, fp32",
        "check_every is -1",
        "rank 3 has no effect on 4bit",
        "rank is 0",
        "exact frist.* matches no parameter whose gradients travel; did you mean first.",
        "bucket has no effect on auto",
        "group has the ranks [0, 1, 2, 3, 4], and the model is on the ranks [0, 1]",
        "weight is torch.float64",
        "weight is 7, must be this rank's share",
        "the state is of 3 ranks, and there are 2",
    ]
    for rank, said in enumerate(ranks.run(2, _refusals)):
        own = [*words, f"the state is of rank {1 - rank}, and this is rank {rank}"]
        assert len(said) == len(own), said
        assert all(word in text for word, text in zip(own, said, strict=True)), said


_BY_LINK = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0, "4bit": 0.5}


def _chosen_by(ranks: Ranks, fastest: str) -> list[Any]:
    """Of a link on which one way is the fastest: the choice, and whether a script goes on in the bits of another one.

    Only the clock of the choice is not a real one.
    """

    def on_that_link(_: int, __: Ranks, names: tuple[str, ...], **___: Any) -> dict[str, float]:
        return {name: 0.1 if name == fastest else _BY_LINK[name] for name in names}

    with mock.patch.object(choice, "measured", on_that_link):
        model = _ddp(ranks)
        sync = _compress(ranks, model, "auto", check_every=1)
    plain = _ddp(ranks)
    other = None if fastest == "fp32" else _compress(ranks, plain, fastest)
    same = []
    for each, way in ((model, sync), (plain, other)):
        _train(each, ranks, range(2), way)
    state = copy.deepcopy(sync.state_dict())
    _train(model, ranks, range(2, 4), sync)
    report = sync.report()
    if other is not None:
        _train(plain, ranks, range(2, 4), other)
        same.append(_same(model, plain))
    with mock.patch.object(choice, "measured", lambda *_, **__: dict(_BY_LINK)):  # another one than then
        again = _ddp(ranks)
        resumed = _compress(ranks, again, "auto")
    resumed.load_state_dict(state)
    return [report["choice"]["name"], report["wire"], report["steps"], *same, resumed.report()["choice"]["name"]]


@pytest.mark.parametrize("fastest", ["fp32", "4bit"])
def test_auto_takes_what_is_fastest_and_a_resumed_script_keeps_it(ranks: Any, fastest: str) -> None:
    same = [] if fastest == "fp32" else [True]
    assert ranks.run(2, _chosen_by, fastest) == [[fastest, fastest, 4, *same, fastest]] * 2


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def _measured_here(ranks: Ranks) -> tuple[str, list[str], bool]:
    """What auto finds between these processes, by the clock; and whether weights are those of unequal batches."""
    model, exact = _ddp(ranks), _ddp(ranks)
    sync = _compress(ranks, model, "auto", exact="never.*")
    _train(model, ranks, range(3), sync)
    seconds = sync.report()["choice"]["seconds"]
    _train(exact, ranks, range(3), _compress(ranks, exact, "fp32"))
    close = all(torch.allclose(x, y, atol=0.05) for x, y in zip(model.parameters(), exact.parameters(), strict=True))
    return sync.report()["wire"], [name for name, each in seconds.items() if each > 0], close


def test_auto_measures_sums_when_it_is_called(ranks: Any) -> None:
    found = ranks.run(2, _measured_here)
    assert found[0] == found[1] and found[0][0] in _BY_LINK
    assert found[0][1:] == (list(_BY_LINK), True)


def _plain_way(ranks: Ranks) -> tuple[bool, float, int]:
    """Whether gradients are those of DDP alone, with equal weights; the bytes of a step, and values."""
    model, alone = _ddp(ranks, _two_layers), _ddp(ranks, _two_layers)
    sync = _compress(ranks, model, "fp32")
    for each in (model, alone):
        each(_x(0, ranks.rank)).square().sum().backward()
    same = all(torch.equal(x.grad, y.grad) for x, y in zip(model.parameters(), alone.parameters(), strict=True))
    return same, sync.report()["sent_bytes"], sum(p.numel() for p in model.parameters())


def test_gradients_that_are_not_compressed_are_those_of_ddp(ranks: Any) -> None:
    for same, sent_bytes, num_values in ranks.run(2, _plain_way):
        assert same and sent_bytes == 4 * num_values


def _with_names(ranks: Ranks) -> tuple[list[str], list[str]]:
    kept = []
    for exact in ((), ["first.*", "*.bias"]):
        model = _ddp(ranks)
        sync = _compress(ranks, model, 4, exact=exact)
        _train(model, ranks, range(2), sync)
        kept.append(sorted(sync.state_dict()["residuals"]))
    return kept[0], kept[1]


def test_named_gradients_travel_as_float32(ranks: Any) -> None:
    for kept_of_all, kept in ranks.run(2, _with_names):
        assert "first.weight" in kept_of_all and kept == [name for name in kept_of_all if name != "first.weight"]


class _Tied(nn.Module):
    """Words in and out by one weight, which is named after the first of its two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.between, self.head = nn.Linear(40, 48, bias=False), nn.Linear(48, 40), nn.Linear(40, 48)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, *_: bool) -> Tensor:
        return self.head(self.between(self.words(x)))  # type: ignore[no-any-return]


def _with_second_names(ranks: Ranks) -> list[list[str]]:
    kept = []
    for exact in ((), ["head.*"], ["head.weight"], ["words.*"]):
        model = _ddp(ranks, _Tied)
        sync = _compress(ranks, model, 4, exact=exact)
        _step(model, ranks.rank, 0)
        kept.append(sorted(sync.state_dict()["residuals"]))
    return kept


def test_tied_weights_travel_as_float32_by_each_of_their_names(ranks: Any) -> None:
    both = ["between.weight", "words.weight"]
    assert ranks.run(2, _with_second_names) == [[both, *[["between.weight"]] * 3]] * 2


def _unlike(ranks: Ranks) -> list[str]:
    said = []
    for how in ({"bits": 4 + ranks.rank}, {"exact": ["first.*"] if ranks.rank else ()}, {"check_every": ranks.rank}):
        try:
            _compress(ranks, _ddp(ranks), **how)
        except ValueError as error:
            said.append(str(error))
    return said


def test_calls_that_are_not_alike_are_refused_on_all_ranks(ranks: Any) -> None:
    found = ranks.run(2, _unlike)
    for rank, said in enumerate(found):
        assert len(said) == 3 and all(
            f"something else on rank {1 - rank}; call it alike on all" in text for text in said
        )
    assert "4bit, check_every=100, hosts=auto on rank 0" in found[0][0]
    assert "5bit, check_every=100, hosts=auto on rank 1" in found[1][0]


def test_the_line_in_a_script() -> None:
    assert nugnn.comm.Compression is Compression
    assert nugnn.comm.compress is compress


def _threads_of_gloo() -> int:
    return sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


def _left(ranks: Ranks, bits: int | str) -> tuple[int, int, int]:
    """Threads of gloo before a script compresses, while it does, and when the interpreter is about to end."""
    model, before = _ddp(ranks), _threads_of_gloo()
    sync = compress(model, bits)  # in a group that it makes
    _train(model, ranks, range(2), sync)
    meanwhile = _threads_of_gloo()
    ddp._leave(weakref.ref(sync))
    return before, meanwhile, _threads_of_gloo()


def _lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "nugnn-gradients"}


def _given_up(ranks: Ranks) -> tuple[int, int]:
    """Threads that wait for work while a model is trained, and those of them that are left when it has gone."""
    before = _lanes()
    model = _ddp(ranks)
    sync = _compress(ranks, model)
    _train(model, ranks, range(1), sync)
    own = _lanes() - before
    del model, sync
    gc.collect()
    for thread in own:
        thread.join(60)
    return len(own), sum(thread.is_alive() for thread in own)


def test_the_thread_ends_with_the_model(ranks: Any) -> None:
    assert ranks.run(2, _given_up) == [(1, 0)] * 2


def _saved_whole(ranks: Ranks) -> tuple[list[str], bool, int]:
    """What is said when such a model is loaded, whether its weights are there, and what it sends once more."""
    model = DistributedDataParallel(_two_layers())  # of all ranks: torch saves no other
    _compress(ranks, model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = torch.load(file, weights_only=False)
    sync = _compress(ranks, loaded)
    loaded(_x(ranks.rank, 0)).square().mean().backward()
    words = [str(each.message) for each in said if "nugnn" in str(each.message)]
    return words, _same(loaded, model), sync.report()["steps"]


def test_a_model_can_be_saved_whole_and_says_that_it_has_to_be_compressed_again(ranks: Any) -> None:
    for words, is_same, steps in ranks.run(MAX_RANKS, _saved_whole):
        (said,) = words
        assert said.endswith("call nugnn.comm.compress on it again") and is_same and steps == 1


def _twice(ranks: Ranks) -> str:
    model = _ddp(ranks)
    _compress(ranks, model)
    with pytest.raises(ValueError, match="by another hook already, of an earlier compress or the script"):
        _compress(ranks, model, 8)
    return "refused"


def test_a_model_is_compressed_once(ranks: Any) -> None:
    assert ranks.run(2, _twice) == ["refused"] * 2


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 4)


def _of_words(ranks: Ranks) -> str:
    try:
        _compress(ranks, _ddp(ranks, _Words, find_unused_parameters=True))
    except ValueError as error:
        return str(error)
    return "taken"


def test_sparse_gradients_are_refused_by_name(ranks: Any) -> None:
    for said in ranks.run(2, _of_words):
        assert said.startswith("the gradients of words.weight are sparse") and "sparse=False" in said


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads cannot be told here")
@pytest.mark.parametrize("bits", ["fp32", 4, "powersgd"])
def test_no_thread_of_gloo_is_left_when_a_script_ends(ranks: Any, bits: int | str) -> None:
    """One that still drops a tensor when the interpreter has gone ends the process with SIGABRT, its work done.

    All ranks of the pool: torch gives a group of some the name of one that is gone, and the next would read its
    addresses.
    """
    for before, meanwhile, after in ranks.run(MAX_RANKS, _left, bits):
        assert after == before < meanwhile
