"""Pieces of training that both families share: schedules, weight-decay groups, label smoothing, local batch norm."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import nugnn
from nugnn.augmentation import AugmentationKey, ShiftAndFlip
from nugnn.batches import apportioned
from nugnn.check_samples import compare_augmentation, first_batch
from nugnn.checkpoint import Checkpoint, CheckpointError, open_checkpoint, write_checkpoint
from nugnn.comm.groups import Ranks
from nugnn.loss import GlobalMean, SmoothedCrossEntropy, choose_loss
from nugnn.networks import MLP
from nugnn.parameter_groups import parameter_groups
from nugnn.sample_family import SampleFamily
from nugnn.samples import BatchMean
from nugnn.schedules import Constant, Cosine, Schedule, Steps
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore
from sample_cases import FLOAT64_BOUND, NUM_CLASSES, make_data, make_model

# -- label smoothing -----------------------------------------------------------------------------------------------


def _shares(ranks: Ranks, smoothing: float, class_weights: Tensor | None) -> list[tuple[float, Tensor]]:
    """Of rows that are divided 5/0/2 or so: loss shares of this rank and gradients, for both families' reductions."""
    generator = torch.Generator().manual_seed(2)
    logits, labels = torch.randn(7, 4, generator=generator).double(), torch.randint(0, 4, (7,), generator=generator)
    mine = [slice(0, 7)] if ranks.world_size == 1 else [slice(0, 5), slice(5, 5), slice(5, 7)]
    x, y = logits[mine[ranks.rank]].clone().requires_grad_(), labels[mine[ranks.rank]]
    loss = choose_loss(None, y, smoothing)
    batch = BatchMean(loss, ranks, class_weights)
    counts = [len(labels[part]) for part in mine]
    values = [batch(x, y, batch.total(counts, [y])), GlobalMean(loss, y, ranks, class_weights)(x)]
    return [(float(value.detach()), torch.autograd.grad(value, x)[0]) for value in values]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0, 0.0]], ids=["plain", "weighted"])
def test_label_smoothing_is_torchs_over_any_ranks(ranks: Any, smoothing: float, weights: list[float] | None) -> None:
    generator = torch.Generator().manual_seed(2)
    logits, labels = torch.randn(7, 4, generator=generator).double(), torch.randint(0, 4, (7,), generator=generator)
    class_weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    x = logits.clone().requires_grad_()
    expected = F.cross_entropy(x, labels, class_weights, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(expected, x)
    for runs in ([_shares(Ranks(), smoothing, class_weights)], ranks.run(3, _shares, smoothing, class_weights)):
        for family in range(2):
            shares, gradients = zip(*(run[family] for run in runs), strict=True)
            assert sum(shares) == pytest.approx(float(expected.detach()), rel=1e-12)
            torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-14)


def test_label_smoothing_belongs_to_cross_entropy() -> None:
    with pytest.raises(ValueError, match="smoothing is 1"):
        SmoothedCrossEntropy(1.0)
    with pytest.raises(ValueError, match="multi-label targets leave it out"):
        choose_loss(None, torch.zeros(2, 3), 0.1)
    with pytest.raises(ValueError, match="a loss of your own put it there"):
        choose_loss(lambda x, y: x[:, 0], torch.zeros(2, dtype=torch.int64), 0.1)
    with pytest.raises(ValueError, match="returns 2 columns"):
        GlobalMean(SmoothedCrossEntropy(0.1), torch.tensor([0, 2]), Ranks())(torch.zeros(2, 2))


# -- weight decay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_weight_decay_spares_biases_and_norms(name: str) -> None:
    model = make_model(name)
    decayed, spared = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    names = {id(p): key for key, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in (decayed, spared)]
    assert sorted(itertools.chain(*groups)) == sorted(names.values())
    assert all(key.endswith(("weight", "bias")) for key in groups[1])
    matrices = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
    assert set(groups[0]) == {
        f"{path}.weight" for path, module in model.named_modules() if isinstance(module, matrices)
    }


def test_groups_of_what_is_shared_frozen_or_a_norm_of_matrices() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "norm": nn.LayerNorm((2, 3)), "c": nn.Linear(3, 3, bias=False)})
    model["c"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    decayed, spared = parameter_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [(3, 3)]
    assert [p.shape for p in spared["params"]] == [(2, 3), (2, 3)]
    assert len(parameter_groups(nn.Linear(3, 3, bias=False), 0.1)) == 1
    with pytest.raises(ValueError, match="weight_decay is -1"):
        parameter_groups(model, -1)
    with pytest.raises(ValueError, match="no parameters"):
        parameter_groups(nn.ReLU(), 0.1)


# -- schedules -----------------------------------------------------------------------------------------------------

SCHEDULES: list[Schedule] = [Constant(), Constant(4), Cosine(20, 3, 0.1), Steps(5, 0.3), Steps(4, 0.5, warmup_steps=2)]


def _trainer(schedule: Schedule | None, **options: Any) -> Trainer:
    model = make_model("mlp").double()
    data = make_data("images", 50)
    family = SampleFamily(model, data, Ranks(), sizes=(12,), seed=3, label_smoothing=0.1, **options)
    return Trainer(
        family,
        make_optimizer=lambda m: torch.optim.AdamW(parameter_groups(m, 0.1), lr=0.01),
        schedule=schedule,
        clip_norm=1.0,
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_is_its_function_and_goes_on_bit_by_bit(schedule: Schedule, tmp_path: Any) -> None:
    rates = []
    whole = _trainer(schedule)
    for _ in range(4):
        for works in whole.family.steps(whole.num_steps // whole.family.steps_per_epoch):
            rates.append(whole.optimizer.param_groups[0]["lr"])
            whole.step(works)
    assert rates == [0.01 * schedule(step) for step in range(20)]
    first = _trainer(schedule)
    history = first.fit(2)
    second = _trainer(schedule)
    restored = restore(second, _checkpoint(first, history, tmp_path))
    second.fit(4, history=restored)
    straight = _trainer(schedule)
    straight.fit(4)
    for mine, theirs in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for group, theirs in zip(straight.optimizer.param_groups, second.optimizer.param_groups, strict=True):
        assert group["lr"] == theirs["lr"]


def test_another_schedule_is_another_run(tmp_path: Any) -> None:
    first = _trainer(Cosine(20, 3))
    checkpoint = _checkpoint(first, first.fit(1), tmp_path)
    for other in (None, Cosine(20, 2), Constant()):
        with pytest.raises(CheckpointError, match=r"schedule was Cosine\(num_steps=20, warmup_steps=3, final=0.0\)"):
            restore(_trainer(other), checkpoint)


def _checkpoint(trainer: Trainer, history: Any, folder: Any) -> Checkpoint:
    shared, own = capture(trainer, history)
    where = write_checkpoint(folder, Ranks(), epoch=len(history.epochs), shared=shared, own=own, identity={})
    return open_checkpoint(where)


def test_schedules_that_do_not_fit_are_refused() -> None:
    for make, match in (
        (lambda: Cosine(10, 10), "0 to 9"),
        (lambda: Constant(-1), "0 or more"),
        (lambda: Steps(0), "1 or more"),
    ):
        with pytest.raises(ValueError, match=match):
            make()
    with pytest.raises(ValueError, match="give either schedule"):
        Trainer(_trainer(None).family, schedule=Constant(), schedule_steps=True)


# -- local batch norm ----------------------------------------------------------------------------------------------


def _fit_local(ranks: Ranks, sizes: tuple[int, ...], ride: bool) -> tuple[list[Any], dict[str, Tensor]]:
    data = {split: make_data("images", num) for split, num in (("train", 53), ("val", 20))}
    model = make_model("cnn").double()
    model.dropout.p = 0.0
    family = SampleFamily(model, data.pop("train"), ranks, sizes=sizes, seed=3, batch_norm="local", **data)
    assert family.riders is not None
    if not ride:
        family.riders.dtype = torch.int8  # of no gradient
    trainer = Trainer(family, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    history = trainer.fit(2)
    assert family.riders.are_carried == ride
    return [(epoch.loss, epoch.val) for epoch in history.epochs], copy.deepcopy(model.state_dict())


def _local_by_hand(sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """One process: batch norm on each rank's samples in turn, gradients added, statistics averaged by samples."""
    data = make_data("images", 53)
    model = make_model("cnn").double()
    model.dropout.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    family = SampleFamily(model, data, Ranks(), sizes=(sum(sizes),), seed=3)
    for epoch in range(2):
        for ids in family.sampler.order(epoch).split(sum(sizes)):
            counts = apportioned(len(ids), sizes)
            before, found = copy.deepcopy(dict(model.named_buffers())), []
            optimizer.zero_grad()
            for part in ids.split(list(counts)):
                if len(part) == 0:
                    found.append(before)
                    continue
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
                x, labels = data[part]
                (F.cross_entropy(model(x), labels, reduction="sum") / len(ids)).backward()
                found.append(copy.deepcopy(dict(model.named_buffers())))
            optimizer.step()
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point():
                    weighted = (part[name] * count for part, count in zip(found, counts, strict=True))
                    buffer.copy_(sum(weighted) / len(ids))
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize(("sizes", "ride"), [((8, 4), True), ((12, 0), True), ((8, 4), False)], ids=str)
def test_local_batch_norm_is_each_ranks_own_with_statistics_averaged(
    ranks: Any, sizes: tuple[int, ...], ride: bool
) -> None:
    expected = _local_by_hand(sizes)
    runs = ranks.run(len(sizes), _fit_local, sizes, ride)
    for epochs, state in runs:
        assert epochs == runs[0][0]
        for name, value in expected.items():
            assert torch.equal(state[name], runs[0][1][name])
            torch.testing.assert_close(state[name], value, rtol=FLOAT64_BOUND, atol=FLOAT64_BOUND)


def _statistics(ranks: Ranks, grad_sync: str) -> dict[str, Tensor]:
    """After an epoch in which the weights stay what they are."""
    model = make_model("cnn").float()
    family = SampleFamily(model, make_data("images", 53, torch.float32), ranks, sizes=(8, 4), batch_norm="local")
    trainer = Trainer(family, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0), grad_sync=grad_sync)
    trainer.train_epoch()
    return {name: x.clone() for name, x in model.named_buffers()}


def test_statistics_beside_gradients_of_few_bits_travel_as_they_are(ranks: Any) -> None:
    exact, short = (ranks.run(2, _statistics, grad_sync) for grad_sync in ("fp32", "2bit"))
    for name, value in exact[0].items():
        assert torch.equal(short[0][name], short[1][name])
        torch.testing.assert_close(short[0][name], value, rtol=1e-6, atol=1e-7)  # two addends, in either order


def _residuals_around_an_infinite_variance(ranks: Ranks) -> list[dict[str, Tensor]]:
    norm = nn.BatchNorm1d(64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 64), norm, nn.ReLU(), nn.Linear(64, NUM_CLASSES))
    family = SampleFamily(model, make_data("images", 53, torch.float32), ranks, sizes=(8, 4), batch_norm="local")
    trainer = Trainer(family, grad_sync="2bit")
    found = []
    for _ in range(2):
        trainer.train_epoch()
        assert trainer.grad_sync._compressor is not None
        found.append({name: kept.clone() for name, kept in trainer.grad_sync._compressor.residuals.items()})
        norm.running_var[0] = torch.inf  # of one batch with an outlier; training never reads it
    return found


def test_statistics_that_are_not_finite_leave_error_feedback_alone(ranks: Any) -> None:
    for before, after in ranks.run(2, _residuals_around_an_infinite_variance):
        assert before and not any(torch.equal(after[name], kept) for name, kept in before.items())


def test_a_recorded_step_knows_the_weights_of_its_statistics() -> None:
    data, weights = make_data("images", 53, torch.float32), torch.ones(NUM_CLASSES)
    family = SampleFamily(
        make_model("cnn").float(), data, Ranks(), sizes=(12,), batch_norm="local", class_weights=weights
    )
    kinds = []
    for (work,) in family.steps(0):
        assert isinstance(work.total, Tensor)  # which says nothing about the kind
        kinds.append(family.kind_of(work))
    assert len(set(kinds)) == 2  # of whole batches and of the last one


def test_local_batch_norm_that_cannot_be_is_refused() -> None:
    data = make_data("images", 49)
    with pytest.raises(ValueError, match="no batch norm"):
        SampleFamily(nn.Linear(72, 5), data, Ranks(), sizes=(12,), batch_norm="local")
    with pytest.raises(ValueError, match="a single sample"):
        SampleFamily(make_model("mlp"), data, Ranks(), sizes=(12,), batch_norm="local")
    SampleFamily(make_model("mlp"), data, Ranks(), sizes=(12,), batch_norm="local", drop_last=True)


# -- augmentation --------------------------------------------------------------------------------------------------


def test_shift_and_flip_go_by_sample_and_epoch() -> None:
    x = torch.arange(1.0, 1 + 30 * 2 * 5 * 4).view(30, 2, 5, 4)
    ids, key = torch.arange(30) * 7, AugmentationKey(5, 0)
    change = ShiftAndFlip(shift=2, flip=True)
    whole = change(x, ids, key)
    some = torch.tensor([3, 29, 11])
    assert torch.equal(change(x[some], ids[some], key), whole[some])
    assert not torch.equal(change(x, ids, AugmentationKey(5, 1)), whole)
    seen = set()
    for image, result in zip(x, whole, strict=True):
        found = [
            (down, across, is_flipped)
            for down, across, is_flipped in itertools.product(range(-2, 3), range(-2, 3), (False, True))
            if torch.equal(result, _moved(image, down, across, is_flipped))
        ]
        assert len(found) == 1
        seen |= set(found)
    assert {f for _, _, f in seen} == {False, True}
    assert len({(a, b) for a, b, _ in seen}) > 10
    assert change(x[:0], ids[:0], key).shape == (0, 2, 5, 4)
    with pytest.raises(ValueError, match="give 1 or more"):
        ShiftAndFlip(0)
    with pytest.raises(ValueError, match="images"):
        change(torch.zeros(3, 5), ids[:3], key)


def _moved(image: Tensor, down: int, across: int, is_flipped: bool) -> Tensor:
    out = torch.zeros_like(image)
    source = image.flip(2) if is_flipped else image
    height, width = image.shape[1:]
    for row, column in itertools.product(range(height), range(width)):
        if 0 <= row - down < height and 0 <= column - across < width:
            out[:, row, column] = source[:, row - down, column - across]
    return out


def _fit_augmented(ranks: Ranks, sizes: tuple[int, ...]) -> list[float]:
    model = MLP(72, NUM_CLASSES).double()
    family = SampleFamily(
        model, make_data("images", 30), ranks, sizes=sizes, augment=ShiftAndFlip(1, flip=True), micro_batches=2
    )
    return [epoch.loss for epoch in Trainer(family).fit(3).epochs]


def test_augmentation_does_not_depend_on_the_split(ranks: Any) -> None:
    torch.manual_seed(0)
    alone = _fit_augmented(Ranks(), (9,))
    state = torch.get_rng_state()
    for losses in ranks.run(3, _seeded_fit_augmented, (5, 0, 4)):
        assert losses == pytest.approx(alone, rel=FLOAT64_BOUND)
    assert torch.equal(state, torch.get_rng_state())


def _seeded_fit_augmented(ranks: Ranks, sizes: tuple[int, ...]) -> list[float]:
    torch.manual_seed(0)
    return _fit_augmented(ranks, sizes)


TWO = Ranks(rank=0, world_size=2)  # nothing here comes to an exchange


def _noise(x: Tensor, ids: Tensor, key: AugmentationKey) -> Tensor:
    """Brighter or darker, and a row of each image left out, by sample."""
    draws = key.uniform(ids, 2, "noise").to(x.dtype)
    row = (draws[:, 1] * x.shape[2]).long()
    kept = torch.arange(x.shape[2]) != row[:, None]
    return x * (0.5 + draws[:, :1, None, None]) * kept[:, None, :, None]


def _first_batch(augment: Any, ranks: Ranks) -> Tensor:
    sizes = (3, 2) if ranks.is_split else (5,)
    family = SampleFamily(MLP(72, NUM_CLASSES).double(), make_data("images", 20), ranks, sizes=sizes, augment=augment)
    return next(family.steps(0))[0].x


def test_an_augmentation_of_ones_own_goes_by_sample() -> None:
    """Two unequal parts hold what the whole batch holds, and the comparison before training agrees."""
    whole = _first_batch(_noise, Ranks())
    parts = [_first_batch(_noise, ranks) for ranks in (TWO, Ranks(rank=1, world_size=2))]
    assert torch.equal(torch.cat(parts), whole) and len(parts[0]) == 3
    compare_augmentation(_noise, first_batch(make_data("images", 5), 5), (3, 2))


DRAWS: dict[str, Any] = {
    "rand_like": lambda x, ids, key: x + torch.rand_like(x),
    "randperm": lambda x, ids, key: x.roll(int(torch.randperm(3)[0]), 2),
    "bernoulli_": lambda x, ids, key: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5),
    "dropout": lambda x, ids, key: F.dropout(x, 0.5),
    "dropout2d": lambda x, ids, key: F.dropout2d(x, 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_torch_in_an_augmentation_are_refused_over_ranks(name: str) -> None:
    assert len(_first_batch(DRAWS[name], Ranks())) == 5
    with pytest.raises((NotImplementedError, ValueError), match=r"^augment>.*test_training_pieces\.py, line \d+"):
        _first_batch(DRAWS[name], TWO)


@pytest.mark.parametrize(
    "augment",
    [
        lambda x, ids, key: x * np.random.rand(),
        lambda x, ids, key: 0.5 * (x + x.flip(0)),
        lambda x, ids, key: x - x.mean(),
        lambda x, ids, key: x[: len(x) // 2 * 2],
    ],
    ids=["numpy", "mixup", "mean", "even"],
)
def test_an_augmentation_that_depends_on_the_batch_is_found_before_training(augment: Any) -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    with pytest.raises(nugnn.ModelDiffers, match=r"^augment gives other samples on a batch in parts of 3 and 2"):
        nugnn.fit(MLP(72, NUM_CLASSES), make_data("images", 20), workers=2, epochs=1, augment=augment)
    assert (np.random.get_state()[1] == state).all()


def test_draws_of_torch_are_named_before_training_too() -> None:
    with pytest.raises(NotImplementedError, match=r"rand_like draws .* key\.uniform"):
        nugnn.fit(MLP(72, NUM_CLASSES), make_data("images", 20), workers=2, epochs=1, augment=DRAWS["rand_like"])
