"""Runs whose gradients travel compressed: replicas stay the same bits, a resumed run too, and training goes its way."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import nugnn
from exactness import NUM_FEATURES, make_graph, make_parts
from logged_sums import LoggedStep, clipped, logged, parts_of, sums_of
from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.comm import backward_sums
from nugnn.comm.backward_sums import BackwardSums
from nugnn.comm.clock import CommClock
from nugnn.comm.compression import compressor
from nugnn.comm.compression.gradient_sync import GRAD_SYNCS
from nugnn.comm.compression.settings import Compression
from nugnn.comm.groups import Ranks
from nugnn.history import History
from nugnn.loss import cross_entropy
from nugnn.models import GNN
from nugnn.networks import MLP
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore
from sample_cases import NUM_CLASSES, make_data
from shard_calls import shard_of
from trainers import graph_trainer

SIZES = {2: (18, 6), 3: (13, 0, 11), 4: (9, 1, 8, 6)}


def _trainer(
    ranks: Ranks,
    grad_sync: str | Compression,
    *,
    data: Dataset[Any] | None = None,
    model: nn.Module | None = None,
    **how: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = model or MLP(72, NUM_CLASSES, hidden=64, layers=3, norm="batch", dropout=0.3)
    data = data or make_data("images", 70, torch.float32)
    family = SampleFamily(model, data, ranks, sizes=SIZES[ranks.world_size], seed=3, **how)
    return Trainer(family, grad_sync=grad_sync)


def _bits(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.model.state_dict().values()]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _small_buckets(num_bytes: int = 20_000) -> Any:
    return mock.patch.multiple(backward_sums, FIRST_BUCKET_BYTES=1, BUCKET_BYTES=num_bytes)


def _train_all(ranks: Ranks, names: tuple[str, ...], epochs: int) -> dict[str, list[Tensor]]:
    found = {}
    with _small_buckets(), mock.patch.multiple(compressor, FIRST_PLAN=3, STEPS_BETWEEN_PLANS=5):
        for name in names:
            trainer = _trainer(ranks, name)
            for _ in range(epochs):
                trainer.train_epoch()
            found[name] = _bits(trainer)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicas_stay_the_same_bits(ranks: Any, num_ranks: int) -> None:
    names = ("4bit",) if num_ranks > 2 else ("fp32", "bf16", "fp16", "8bit", "1bit", "adaptive", "powersgd")
    first, *others = ranks.run(num_ranks, _train_all, names, 2)
    for name in names:
        assert all(_equal(first[name], other[name]) for other in others)
        assert num_ranks > 2 or name == "fp32" or not _equal(first[name], first["fp32"])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicas_stay_the_same_bits_for_200_steps(ranks: Any, num_ranks: int) -> None:
    first, *others = ranks.run(num_ranks, _train_all, GRAD_SYNCS, 67, timeout=500)
    assert all(_equal(first[name], other[name]) for other in others for name in GRAD_SYNCS)


def _early_and_late(ranks: Ranks) -> list[bool]:
    """Sums that begin while backward runs, and sums after it."""
    same = []
    with _small_buckets():
        for name in ("bf16", "4bit"):
            early = _trainer(ranks, name)
            with mock.patch.object(SampleFamily, "sums_in_backward", False):
                late = _trainer(ranks, name)
            for trainer in (early, late):
                trainer.train_epoch()
                trainer.train_epoch()
            assert early._sums._begins and not late._sums._begins
            same.append(_equal(_bits(early), _bits(late)))
    return same


def test_sums_that_begin_in_backward_are_the_same_bits(ranks: Any) -> None:
    assert ranks.run(2, _early_and_late) == [[True, True]] * 2


def _plain(ranks: Ranks) -> bool:
    """As without any of this."""
    with mock.patch.object(compressor.Compressor, "__init__", side_effect=AssertionError("nothing is compressed")):
        now, before = _trainer(ranks, "fp32"), _trainer(ranks, "fp32")
    before._sums = BackwardSums(before._replicated, ranks, while_backward_runs=True)
    for trainer in (now, before):
        trainer.train_epoch()
        trainer.train_epoch()
    assert now.grad_sync.residuals == {}
    return _equal(_bits(now), _bits(before))


def test_what_is_not_compressed_travels_as_before(ranks: Any) -> None:
    assert ranks.run(2, _plain) == [True, True]


def _counted(ranks: Ranks, way: str, late: float) -> tuple[dict[str, Any], int, int]:
    """The report of three epochs of float32, values of a step with what goes along, and steps."""
    begins, is_direct = way == "in backward", way == "direct"
    ranks = replace(ranks, clock=CommClock(), direct=ranks.direct if is_direct else None)
    assert (ranks.direct is not None) == is_direct
    if ranks.rank and not begins:  # the other ones wait
        own_sum = ranks.sum_
        object.__setattr__(ranks, "sum_", lambda x: (time.sleep(late), own_sum(x))[1])
    with _small_buckets(10_000), mock.patch.object(SampleFamily, "sums_in_backward", begins):
        trainer = _trainer(ranks, "fp32")
        for _ in range(3):
            trainer.train_epoch()
    own = trainer._replicated
    riders = trainer.family.riders
    num_values = sum(p.numel() for p in own) + len(own) + (0 if riders is None else riders.num_values)
    assert trainer._sums._begins == begins and len(trainer._sums._buckets) > 1
    return trainer.grad_sync.report() or {}, num_values, trainer.num_steps


@pytest.mark.parametrize("way", ["in backward", "after", "direct"])
def test_plain_sums_are_counted_as_compressed_ones_are(ranks: Any, way: str) -> None:
    size = 3
    for report, num_values, num_steps in ranks.run(size, _counted, way, 0.002):
        factor = {"direct": size - 1}.get(way, 2 * (size - 1) / size)
        assert report["wire"] == "fp32" and report["steps"] == num_steps > 3
        assert report["sent_bytes"] == pytest.approx(factor * 4 * num_values * num_steps, rel=1e-4)
        buckets = report["buckets"]
        assert sum(b["sent_bytes"] for b in buckets.values()) == report["sent_bytes"] and len(buckets) > 1
        assert all(b["values"] > 0 and b["error"] == 0 for b in buckets.values())
        assert report["sent_bytes_across_hosts"] == 0 and report["hosts"] == 1
        assert report["exchange_seconds"] > 0 and report["codec_seconds"] == 0
        if way != "in backward":  # all of a sum is waited for
            assert report["exposed_seconds"] > report["exchange_seconds"] > 0.002 * num_steps


def _same_names(ranks: Ranks) -> list[set[str]]:
    found = []
    for name in ("fp32", "4bit", "auto"):
        trainer = _trainer(ranks, name)
        trainer.train_epoch()
        report = trainer.grad_sync.report() or {}
        assert report["exposed_seconds"] > 0
        found.append(set(report) - {"arranged", "choice"})
    return found


def test_all_ways_are_reported_under_the_same_names(ranks: Any) -> None:
    for plain, compressed, chosen in ranks.run(2, _same_names):
        assert plain == compressed == chosen


def _resumed(ranks: Ranks, folder: Path, name: str) -> tuple[bool, bool]:
    with mock.patch.multiple(compressor, FIRST_PLAN=2, STEPS_BETWEEN_PLANS=3):
        whole, first = _trainer(ranks, name), _trainer(ranks, name)
        for trainer in (whole, first):
            trainer.train_epoch()
        shared, own = capture(first, History())
        where = write_checkpoint(folder / name, ranks, epoch=1, shared=shared, own=own, identity={})
        second = _trainer(ranks, name)
        second.train_epoch()  # something else is kept
        restore(second, open_checkpoint(where))
        kept = all(torch.equal(second.grad_sync.residuals[k], v) for k, v in first.grad_sync.residuals.items())
        for trainer in (whole, second):
            trainer.train_epoch()
        return kept and bool(first.grad_sync.residuals), _equal(_bits(whole), _bits(second))


def _kept_in_all(ranks: Ranks, where: Path) -> dict[str, Tensor]:
    trainer = _trainer(ranks, "4bit")
    restore(trainer, open_checkpoint(where))
    trainer.train_epoch()
    torch.manual_seed(0)
    again = _trainer(ranks, "4bit")
    restore(again, open_checkpoint(where))
    return {k: ranks.sum_(v.double()) for k, v in again.grad_sync.residuals.items()}


def test_a_resumed_run_goes_on_in_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    for name in ("4bit", "adaptive", "powersgd"):
        assert ranks.run(2, _resumed, tmp_path, name) == [(True, True)] * 2
    where = next((tmp_path / "4bit").iterdir())
    before: dict[str, Tensor] = {}
    for rank in range(2):
        for name, kept in open_checkpoint(where).read_rank(rank)["residuals"].items():
            before[name] = before.get(name, 0) + kept.double()
    for after in ranks.run(3, _kept_in_all, where):  # another number of ranks: an even share for each
        for name, kept in before.items():
            # each of 3 shares rounded once to float32
            assert float((after[name] - kept).abs().max()) <= 3 * 2.0**-24 * float(kept.abs().max())


def test_one_rank_has_nothing_to_send_and_is_told_so() -> None:
    notes: list[str] = []
    data = make_data("images", 12, torch.float32)
    result = nugnn.fit(
        MLP(72, NUM_CLASSES, hidden=8), data, epochs=1, batch_size=6, grad_sync="4bit", on_note=notes.append
    )
    assert notes == ["grad_sync 4bit has no effect with one worker: nothing travels"] == list(result.notes)
    torch.manual_seed(0)
    models = [MLP(72, NUM_CLASSES, hidden=64) for _ in range(1)] * 2
    found = []
    for name, model in zip(("fp32", "2bit"), models, strict=True):
        family = SampleFamily(copy.deepcopy(model), make_data("images", 30, torch.float32), Ranks(), sizes=(8,))
        trainer = Trainer(family, grad_sync=name)
        trainer.train_epoch()
        assert trainer.grad_sync.report() is None
        found.append(_bits(trainer))
    assert _equal(*found)


class _Bad:
    """Infinite on one rank in one step."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        rows = cross_entropy(logits, labels)
        return rows * float("inf") if self.rank == 1 and self.calls == 2 else rows


def _overflow(ranks: Ranks) -> tuple[list[Tensor], int, float, bool]:
    trainer = _trainer(ranks, "4bit", precision="fp16", loss=_Bad(ranks.rank))
    works = list(trainer.family.steps(0))
    trainer.step(works[0])
    before = {name: kept.clone() for name, kept in trainer.grad_sync.residuals.items()}
    weights = _bits(trainer)
    trainer.step(works[1])
    same = all(torch.equal(before[name], kept) for name, kept in trainer.grad_sync.residuals.items())
    same = same and all(
        torch.equal(a, b)
        for a, b, name in zip(weights, _bits(trainer), trainer.model.state_dict(), strict=True)
        if "running" not in name and "batches" not in name
    )
    trainer.step(works[2])
    return _bits(trainer), trainer.loss_scale.num_skipped, trainer.loss_scale.scale, same


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(ranks: Any) -> None:
    (a, *first), (b, *second) = ranks.run(2, _overflow)
    assert _equal(a, b) and first == second == [1, 2.0**15, True]


# -- clipping ----------------------------------------------------------------------------------------------------------

LARGEST, RATE_OF_CLIPPED, STEP_LEFT_OUT = 0.05, 0.5, 2


class _Loss:
    """Infinite while it is told to be."""

    is_bad = False

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        rows = cross_entropy(logits, labels)
        return rows * float("inf") if self.is_bad else rows


def _clipping_trainer(ranks: Ranks, kind: str, loss: _Loss) -> Trainer:
    torch.manual_seed(0)
    how: dict[str, Any] = {
        "make_optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=RATE_OF_CLIPPED),
        "grad_sync": "4bit",
        "clip_norm": LARGEST,
    }
    if kind == "samples":
        model = MLP(72, NUM_CLASSES, hidden=64, layers=3, dropout=0.3)
        data, sizes = make_data("images", 130, torch.float32), SIZES[ranks.world_size]
        return Trainer(SampleFamily(model, data, ranks, sizes=sizes, seed=3, precision="fp16", loss=loss), **how)
    graph_data = make_graph(dtype=torch.float32)
    graph = shard_of(ranks, graph_data, make_parts(graph_data, ranks.world_size, "metis_unequal"))
    rows = {"train": torch.isin(graph.global_node_ids, graph_data.train_nodes).nonzero().flatten()}
    model = GNN("sage", NUM_FEATURES, int(graph_data.num_classes), hidden=48, layers=3)
    return graph_trainer(model, graph, rows, precision="fp16", loss=loss, **how)


def _clipped(ranks: Ranks, kind: str) -> tuple[list[LoggedStep], list[float | None], list[dict[str, Tensor]]]:
    """What was summed, the norms by which gradients were clipped, and weights before each step and at the end."""
    loss, clip, norms = _Loss(), nn.utils.clip_grad_norm_, []

    def seen(*args: Any) -> Tensor:
        norm = clip(*args)
        norms[-1] = float(norm)
        return norm

    trainer = _clipping_trainer(ranks, kind, loss)
    trainer.loss_scale.scale = 2.0**8  # with no overflow of its own
    works = list(trainer.family.steps(0)) if kind == "samples" else [[None]] * 5
    weights = []
    with logged() as steps, mock.patch.object(nn.utils, "clip_grad_norm_", seen):
        for step, work in enumerate(works[:5]):
            weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
            loss.is_bad = step == STEP_LEFT_OUT and ranks.rank == 0
            norms.append(None)
            trainer.step(work)
    weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    return steps, norms, weights


@pytest.mark.parametrize("kind", ["graphs", "samples"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_clipped_is_the_sum_that_arrived(ranks: Any, kind: str, num_ranks: int) -> None:
    """Norm and step are those of one process that sums what all ranks have by the same codec."""
    results = ranks.run(num_ranks, _clipped, kind)
    _, norms, weights = results[0]
    for _, other_norms, other_weights in results[1:]:
        assert other_norms == norms
        for ours, theirs in zip(weights, other_weights, strict=True):
            assert _equal(list(ours.values()), list(theirs.values()))
    assert [norm is None for norm in norms] == [step == STEP_LEFT_OUT for step in range(5)]
    assert all(torch.equal(x, weights[STEP_LEFT_OUT + 1][name]) for name, x in weights[STEP_LEFT_OUT].items())
    sums = sums_of([steps for steps, *_ in results], weights[0], "4bit")
    eps, num_values = 2.0**-24, sum(p.numel() for p in weights[0].values())
    for step, (norm, gradients) in enumerate(zip(norms, sums, strict=True)):
        if norm is None:
            continue
        assert gradients.keys() == weights[0].keys()
        expected, factor = clipped(gradients, LARGEST)
        # a sum of squares in any order is within n eps of it, Higham 2002, sec. 4.2
        assert abs(norm - expected) <= num_values * eps * expected
        assert factor < 1
        for name, flat in gradients.items():
            before, after = weights[step][name].double(), weights[step + 1][name].double()
            move = RATE_OF_CLIPPED * factor * flat.double().view(before.shape)
            bound = (num_values + 4) * eps * move.abs() + eps * (before.abs() + move.abs())
            assert ((before - move - after).abs() <= bound).all(), name


# -- frozen parameters -------------------------------------------------------------------------------------------------

FROZEN = "hidden.weight"


class _Three(nn.Module):
    """Three matrices that are compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(72, 64), nn.Linear(64, 48), nn.Linear(48, 40)
        self.head = nn.Linear(40, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).tanh()
        return self.head(self.last(self.hidden(x).tanh()).tanh())  # type: ignore[no-any-return]


def _freeze(trainer: Trainer, *, is_frozen: bool = True) -> None:
    trainer.model.get_parameter(FROZEN).requires_grad_(not is_frozen)


def _bytes_of_steps(trainer: Trainer, epochs: int) -> list[int]:
    """Of each step of the next epochs."""
    found, before = [], (trainer.grad_sync.report() or {})["sent_bytes"]
    for _ in range(epochs):
        for works in trainer.family.steps(trainer.num_steps // trainer.family.steps_per_epoch):
            trainer.step(works)
            now = (trainer.grad_sync.report() or {})["sent_bytes"]
            found.append(now - before)
            before = now
    return found


@dataclass
class _Frozen:
    """An epoch with all parameters, one with a frozen one, one with all again."""

    steps: list[LoggedStep]
    named: dict[str, Tensor]
    kept: list[dict[str, Tensor]]
    frozen_weight: list[Tensor]
    num_bytes: list[list[int]]
    bits: list[dict[str, int]]
    is_resumed: bool
    from_the_start: tuple[set[str], list[int], bool]


def _frozen(ranks: Ranks, wire: str, folder: Path) -> _Frozen:
    def made() -> Trainer:
        return _trainer(ranks, wire, model=_Three())

    def kept(trainer: Trainer) -> dict[str, Tensor]:
        return {name: rows.clone() for name, rows in trainer.grad_sync.residuals.items()}

    with _small_buckets(), mock.patch.multiple(compressor, FIRST_PLAN=5, STEPS_BETWEEN_PLANS=100):
        trainer, residuals, weights, num_bytes, bits = made(), [], [], [], []
        with logged() as steps:
            for is_frozen in (False, True, False):
                _freeze(trainer, is_frozen=is_frozen)
                num_bytes.append(_bytes_of_steps(trainer, 1))
                residuals.append(kept(trainer))
                weights.append(trainer.model.get_parameter(FROZEN).detach().clone())
                bits.append(dict(trainer.grad_sync._compressor.bits))  # type: ignore[union-attr]
                if is_frozen:
                    shared, own = capture(trainer, History())
                    where = write_checkpoint(folder, ranks, epoch=2, shared=shared, own=own, identity={})
        again = made()
        _freeze(again)
        restore(again, open_checkpoint(where))
        is_resumed = all(torch.equal(residuals[1][name], rows) for name, rows in kept(again).items())
        _freeze(again, is_frozen=False)
        _bytes_of_steps(again, 1)
        is_resumed = is_resumed and _equal(_bits(trainer), _bits(again)) and kept(again).keys() == residuals[2].keys()
        is_resumed = is_resumed and all(torch.equal(residuals[2][name], rows) for name, rows in kept(again).items())
        without = made()
        _freeze(without)
        first = without.model.get_parameter(FROZEN).detach().clone()
        of_steps = _bytes_of_steps(without, 2)
        stays = torch.equal(first, without.model.get_parameter(FROZEN))
        from_the_start = (set(without.grad_sync.residuals), of_steps, stays)
    named = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return _Frozen(steps, named, residuals, weights, num_bytes, bits, is_resumed, from_the_start)


@pytest.mark.parametrize(("num_ranks", "wire"), [(2, "4bit"), (2, "adaptive"), (2, "powersgd"), (3, "2bit")])
def test_a_frozen_parameter_does_not_travel_and_goes_on_owing(
    ranks: Any, tmp_path: Path, num_ranks: int, wire: str
) -> None:
    results = ranks.run(num_ranks, _frozen, wire, tmp_path)
    steps_per_epoch = len(results[0].num_bytes[0])
    for of_rank in results:
        assert _equal(list(of_rank.named.values()), list(results[0].named.values()))
        assert of_rank.is_resumed
        travels = [FROZEN in step.names for step in of_rank.steps]
        assert travels == [epoch != 1 for epoch in range(3) for _ in range(steps_per_epoch)]
        before, meanwhile, after = of_rank.kept
        assert before.keys() == meanwhile.keys() == after.keys() and FROZEN in before
        assert torch.equal(before[FROZEN], meanwhile[FROZEN]) and not torch.equal(before[FROZEN], after[FROZEN])
        assert any(not torch.equal(before[name], meanwhile[name]) for name in before)
        assert torch.equal(of_rank.frozen_weight[0], of_rank.frozen_weight[1])
        assert not torch.equal(of_rank.frozen_weight[1], of_rank.frozen_weight[2])
        names, of_steps, stays = of_rank.from_the_start
        assert names == before.keys() - {FROZEN} and stays
        if wire == "adaptive":  # bits are chosen in the epoch in which it does not travel
            assert of_rank.bits[0][FROZEN] == of_rank.bits[1][FROZEN] == 4
        else:  # and arrangements in the first step
            assert of_rank.num_bytes[1] == of_steps[steps_per_epoch:]
            assert of_rank.num_bytes[2] == [of_rank.num_bytes[0][1]] * steps_per_epoch
            assert max(of_rank.num_bytes[1]) < min(of_rank.num_bytes[2])
    _check_that_nothing_is_lost(results)


def _check_that_nothing_is_lost(results: list[_Frozen]) -> None:
    """What arrived and what is kept are all gradients that ranks had to send."""
    named = results[0].named
    for name in results[0].kept[-1]:
        # what is added to a gradient of what was kept cancels from step to step
        given, largest, arrived = torch.zeros(named[name].numel(), dtype=torch.float64), 0.0, 0.0
        num_terms = 0
        for number, step in enumerate(results[0].steps):
            for each, *others in zip(*(of_rank.steps[number].sums for of_rank in results), strict=True):
                if name in each.names:
                    assert each.total is not None
                    arrived = arrived + parts_of(each.total, each, named)[name].double()
                    for summed in (each, *others):
                        part = parts_of(summed.values, summed, named)[name].double()
                        given += part
                        largest, num_terms = max(largest, float(part.abs().max())), num_terms + 1
            assert step.is_good
        kept = sum(of_rank.kept[-1][name].double().flatten() for of_rank in results)
        # each term is rounded some 6 times in float32, as it is or with what is kept, which is no larger
        assert float((arrived + kept - given).abs().max()) <= 6 * num_terms * 2 * largest * len(results) * 2.0**-24


def _diverged(ranks: Ranks, every: int) -> str:
    data = make_data("images", 70, torch.float32)
    model = MLP(72, NUM_CLASSES, hidden=64)
    trainer = Trainer(SampleFamily(model, data, ranks, sizes=(18, 6)), check_replicas=every)
    works = list(trainer.family.steps(0))
    name = list(dict(model.named_parameters()))[2]
    try:
        for number, work in enumerate(works):
            if number == 1 and ranks.rank == 1:
                with torch.no_grad():
                    model.get_parameter(name).view(-1)[5] += 1e-6
            trainer.step(work)
    except ValueError as error:
        return str(error).replace(name, "NAME")
    return "nothing was said"


def test_replicas_that_diverge_stop_the_run_and_are_named(ranks: Any) -> None:
    for said in ranks.run(2, _diverged, 2):
        assert said.startswith("NAME is no longer the same on all ranks after step 2")
        assert "workers=1" in said and "graph" not in said  # of samples
    assert ranks.run(2, _diverged, 0) == ["nothing was said"] * 2


# -- training goes its way ---------------------------------------------------------------------------------------------

RATE, STEPS = 0.05, 40


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(x).float() / 16
    return torch.cat([x, x.square()], 1), torch.from_numpy(labels)


def _regression(ranks: Ranks, name: str) -> tuple[Tensor, list[float]]:
    """Weights after steps of gradient descent on all samples, and the norm of what all ranks keep after each."""
    x, labels = _digits()
    torch.manual_seed(0)
    model = nn.Linear(x.shape[1], 10, bias=False)
    sizes = (1200, len(x) - 1200)
    family = SampleFamily(model, TensorDataset(x, labels), ranks, sizes=sizes, seed=3)
    trainer = Trainer(family, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=RATE), grad_sync=name)
    norms = []
    for _ in range(STEPS):
        trainer.train_epoch()
        kept = trainer.grad_sync.residuals.get("weight")
        norms.append(0.0 if kept is None else float(ranks.sum_(kept.double()).norm()))
    return model.weight.detach(), norms


@pytest.mark.parametrize("name", ["8bit", "2bit"])
def test_gradient_descent_stays_within_what_is_kept(ranks: Any, name: str) -> None:
    """Softmax regression on the digits, a convex loss whose gradient changes by at most L for each unit of weight.

    With E_t what all ranks keep after step t, v_t = w_t - rate E_t moves by whole gradients, taken at w_t. A step
    with rate <= 2 / L brings no two points apart, so v leaves the path of the exact run by at most rate L |w - v| =
    rate^2 L |E_t| a step: |w_T - exact| <= rate |E_T| + rate^2 L sum |E_t|. L is at most half the largest eigenvalue
    of X'X / n, since the softmax' Jacobian is at most one half.
    """
    x, _ = _digits()
    smooth = 0.5 * float(torch.linalg.eigvalsh((x.double().T @ x.double()) / len(x))[-1])
    assert smooth * RATE <= 2
    exact, _ = ranks.run(2, _regression, "fp32")[0]
    (weight, norms), (twin, _) = ranks.run(2, _regression, name)
    assert torch.equal(weight, twin)
    distance = float((weight - exact).double().norm())
    bound = RATE * norms[-1] + RATE**2 * smooth * sum(norms[:-1])
    # both runs are float32: 1800 terms in a gradient of norm below 1, in each of 40 steps, at most
    slack = 2 * STEPS * RATE * 1800 * 2.0**-24
    assert 0 < distance <= bound + slack
    assert float(exact.norm()) > 4 * bound  # it says something


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["graphs", "samples"])
def test_the_option_reaches_the_trainer_of_either_family(kind: str) -> None:
    from nugnn import graph_run, sample_run
    from nugnn.config import TrainConfig
    from nugnn.fit_options import FitOptions
    from nugnn.options import ConfigError
    from nugnn.sample_config import SampleConfig
    from nugnn.sample_options import SampleOptions

    config, run, options, dataset = {
        "graphs": (TrainConfig, graph_run, FitOptions, "digits"),
        "samples": (SampleConfig, sample_run, SampleOptions, "digits-images"),
    }[kind]
    for name in GRAD_SYNCS:
        given = run.fit_arguments(config(dataset=dataset, grad_sync=name, check_replicas=7))
        assert (given["grad_sync"], given["check_replicas"]) == (name, 7)
        made = options(grad_sync=name, check_replicas=7).trainer_options(1)
        assert (made["grad_sync"], made["check_replicas"]) == (name, 7)
    flat = {"grad_sync": "4bit", "grad_sync_hosts": "flat"}
    assert run.fit_arguments(config(dataset=dataset, **flat))["grad_sync_hosts"] == "flat"
    assert options(**flat).trainer_options(1)["grad_sync_hosts"] == "flat"
    assert "grad_sync_hosts" not in config(dataset=dataset, **flat).fixed_settings()
    with pytest.raises(ConfigError, match="--grad-sync-hosts flat has no effect on --grad-sync fp32"):
        config(dataset=dataset, grad_sync_hosts="flat")
    assert config(dataset=dataset, grad_sync="4bit").fixed_settings()["grad_sync"] == "4bit"
    assert "check_replicas" not in config(dataset=dataset).fixed_settings()
    with pytest.raises(ConfigError, match="--grad-sync 9bit is not allowed; allowed: fp32, bf16"):
        config(dataset=dataset, grad_sync="9bit")
    with pytest.raises(ConfigError, match="--check-replicas -1 is not allowed"):
        config(dataset=dataset, check_replicas=-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grad_sync": "4"}, "grad_sync '4' is not known; choose one of fp32"),
        ({"check_replicas": -3}, "check_replicas is -3"),
        ({"grad_sync_hosts": "no"}, "grad_sync_hosts 'no' is not known; choose one of auto, flat"),
        ({"grad_sync_hosts": "flat"}, "grad_sync_hosts flat has no effect on grad_sync fp32"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, Any], words: str) -> None:
    data = make_data("images", 20, torch.float32)
    with pytest.raises(ValueError, match=words):
        nugnn.fit(MLP(72, NUM_CLASSES, hidden=8), data, workers=2, batch_size=4, **options)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"grad_sync": "powersgd", "grad_sync_rank": 4}, Compression(wire="powersgd", rank=4)),
        ({"grad_sync": "bf16", "grad_sync_feedback": "on"}, Compression(wire="bf16", error_feedback=True)),
        ({"grad_sync": "4bit", "grad_sync_feedback": "off"}, Compression(wire="4bit", error_feedback=False)),
        ({"grad_sync": "auto", "grad_sync_exact": "a.*, b"}, Compression(wire="auto", exact=("a.*", "b"))),
        ({"grad_sync": "fp32", "grad_sync_rank": 4}, "--grad-sync-rank 4 has no effect on --grad-sync fp32, only on"),
        ({"grad_sync": "4bit", "grad_sync_rank": 4}, "--grad-sync-rank 4 has no effect on --grad-sync 4bit"),
        ({"grad_sync": "powersgd", "grad_sync_rank": 0}, "--grad-sync-rank 0 is not allowed"),
        (
            {"grad_sync": "auto", "grad_sync_feedback": "off"},
            "--grad-sync-feedback off has no effect on --grad-sync auto",
        ),
        ({"grad_sync_feedback": "on"}, "--grad-sync-feedback on has no effect on --grad-sync fp32"),
        ({"grad_sync_exact": "a"}, "--grad-sync-exact a has no effect on --grad-sync fp32"),
        ({"grad_sync": "4bit", "grad_sync_exact": "a,,b"}, "--grad-sync-exact a,,b is not allowed"),
    ],
)
def test_what_the_shell_says_of_gradients_is_settings_or_refused(
    given: dict[str, Any], meant: Compression | str
) -> None:
    from nugnn import graph_run, sample_run
    from nugnn.config import TrainConfig
    from nugnn.options import ConfigError
    from nugnn.sample_config import SampleConfig

    for kind, run, dataset in ((TrainConfig, graph_run, "digits"), (SampleConfig, sample_run, "digits-images")):
        make: Any = kind
        if isinstance(meant, str):
            with pytest.raises(ConfigError) as caught:
                make(dataset=dataset, **given)
            assert meant in str(caught.value)
        else:
            config = make(dataset=dataset, **given)
            assert run.fit_arguments(config)["grad_sync"] == meant  # type: ignore[attr-defined]
            assert given.items() <= config.fixed_settings().items()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"wire": "9bit"}, "'9bit'; choose one of fp32, bf16, fp16, 8bit, .*, 1bit, adaptive, powersgd, auto"),
        ({"wire": "auto", "least_size": 7}, "least_size has no effect on auto"),
        ({"wire": "fp32", "exact": ["a"]}, "exact a has no effect on fp32"),
        ({"wire": "8bit", "rank": 3}, "rank 3 has no effect on 8bit"),
        ({"wire": "powersgd", "rank": 0}, "rank is 0"),
        ({"wire": "powersgd", "rank": 1.5}, "rank is 1.5"),
        ({"bucket": 0}, "bucket is 0"),
        ({"exact": [3]}, "must be names or patterns"),
        ({"error_feedback": "no"}, "error_feedback is 'no'"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Compression(**settings)


def _named(ranks: Ranks, grad_sync: Compression | str) -> tuple[dict[str, Any], list[str]]:
    trainer = _trainer(ranks, grad_sync)
    for _ in range(2):
        trainer.train_epoch()
    return trainer.grad_sync.report() or {}, sorted(trainer.grad_sync.residuals)


@pytest.mark.parametrize("wire", ["4bit", "powersgd", "adaptive"])
def test_named_gradients_travel_as_float32(ranks: Any, wire: str) -> None:
    exact = Compression(wire=wire, exact=["layers.1.*", "*.bias"])
    for (report, kept), (whole, kept_of_all) in zip(
        ranks.run(2, _named, exact), ranks.run(2, _named, wire), strict=True
    ):
        assert "layers.1.weight" in kept_of_all and kept == [name for name in kept_of_all if name != "layers.1.weight"]
        assert report["compressed_values"] == whole["compressed_values"] - 72 * 64
        more = report["sent_bytes"] - whole["sent_bytes"]
        # float32 in place of at most half a byte and the ends of buckets, which chunks are not cut in
        assert (72 * 64 + 512) * 4 * report["steps"] > more > 72 * 64 * 3 * report["steps"]


def _of_tied(ranks: Ranks) -> tuple[str, list[str]]:
    model = MLP(72, NUM_CLASSES, hidden=64, layers=4, norm="batch")
    model.layers[9].weight = model.layers[5].weight
    trainer = _trainer(ranks, Compression(wire="4bit", exact=["layers.9.*"]), model=model)
    trainer.train_epoch()
    return str(trainer.grad_sync.settings), sorted(trainer.grad_sync.residuals)


def test_tied_weights_travel_as_float32_by_each_of_their_names(ranks: Any) -> None:
    how = "4bit(exact=('layers.9.*', 'layers.5.weight'))"
    for said, kept in ranks.run(2, _of_tied):
        assert said == how and kept == ["layers.1.weight"]


def test_all_settings_reach_the_sums(ranks: Any) -> None:
    for report, kept in ranks.run(
        2, _named, Compression(wire="8bit", error_feedback=False, bucket=100, least_size=6000)
    ):
        assert kept == [] and report["error_feedback"] is False and report["compressed_values"] == 0
    small, large = (ranks.run(2, _named, Compression(wire="powersgd", rank=rank))[0][0] for rank in (1, 8))
    assert large["sent_bytes"] > 2 * small["sent_bytes"]


def _of_trial(ranks: Ranks) -> list[str]:
    sync = _trainer(ranks, Compression(wire="auto", exact=["layers.1.*"])).grad_sync
    return [str(sync.in_way(name).settings) for name in ("fp32", "4bit")]


def test_ways_are_tried_with_the_names_of_the_run(ranks: Any) -> None:
    assert ranks.run(2, _of_trial) == [["fp32", "4bit(exact=('layers.1.*',))"]] * 2


def _unlike(ranks: Ranks) -> str:
    try:
        _trainer(ranks, Compression(wire="4bit", exact=["layers.1.*"] if ranks.rank else ()))
    except ValueError as error:
        return str(error)
    return "nothing was said"


def test_ranks_with_other_settings_are_refused_on_all(ranks: Any) -> None:
    first, second = ranks.run(2, _unlike)
    assert first == "grad_sync is 4bit on worker 0, and another one elsewhere"
    assert second == "grad_sync is 4bit(exact=('layers.1.*',)) on worker 1, and another one elsewhere"


@pytest.mark.parametrize("workers", [1, 2])
def test_names_that_no_parameter_has_are_refused_with_near_ones(workers: int) -> None:
    data, model = make_data("images", 20, torch.float32), MLP(72, NUM_CLASSES, hidden=8)
    for pattern, words in (
        ("layer.1.weight", "did you mean layers.1.weight"),
        ("head*", "; there are layers.1.weight"),
    ):
        grad_sync = Compression(wire="4bit", exact=[pattern])
        with pytest.raises(ValueError, match=f"exact {re.escape(pattern)} matches no parameter.*{words}"):
            nugnn.fit(model, data, workers=workers, batch_size=4, grad_sync=grad_sync)


def test_settings_belong_to_the_run(tmp_path: Path) -> None:
    data, model = make_data("images", 12, torch.float32), MLP(72, NUM_CLASSES, hidden=8)

    def train(epochs: int, grad_sync: str | Compression, **how: Any) -> None:
        usual: dict[str, Any] = {"schedule": "constant", "batch_size": 6, "checkpoint_folder": tmp_path}
        nugnn.fit(model, data, epochs=epochs, grad_sync=grad_sync, on_note=lambda _: None, **usual, **how)

    exact = Compression(wire="4bit", exact=["layers.1.*"])
    train(1, exact)
    train(2, exact, resume=True)
    with pytest.raises(ValueError, match=r"grad_sync was 4bit\(exact=\('layers.1.\*',\)\), is 4bit\."):
        train(3, "4bit", resume=True)
    train(1, "4bit")
    train(2, Compression(wire="4bit"), resume=True)  # the same in other words


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["digits", "digits-images"])
def test_a_run_reports_what_travelled_and_goes_on(tmp_path: Path, dataset: str) -> None:
    from nugnn.config import TrainConfig
    from nugnn.run import run_from_config
    from nugnn.sample_config import SampleConfig

    config: Any = {"digits": TrainConfig, "digits-images": SampleConfig}[dataset]
    how = {
        "dataset": dataset,
        "workers": 2,
        "shares": "0.7,0.3",
        "grad_sync": "4bit",
        "seed": 1,
        "schedule": "constant",
    }
    whole = run_from_config(config(**how, epochs=4, out=str(tmp_path / "whole")))
    run_from_config(config(**how, epochs=2, out=str(tmp_path / "parts")))
    parts = run_from_config(config(**how, epochs=4, out=str(tmp_path / "parts"), resume=True))
    assert (parts["val"], parts["last_test"]) == (whole["val"], whole["last_test"])
    for name in ("model.safetensors",):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    for report in whole["ranks"]:
        assert report["grad_sync"]["wire"] == "4bit" and report["grad_sync"]["sent_bytes"] > 0
        assert 0 < min(bucket["error"] for bucket in report["grad_sync"]["buckets"].values()) < 0.3
    with pytest.raises(ValueError, match="grad_sync was 4bit, is 2bit"):
        run_from_config(config(**how | {"grad_sync": "2bit"}, epochs=5, out=str(tmp_path / "parts"), resume=True))
