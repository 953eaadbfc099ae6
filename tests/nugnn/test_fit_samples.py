"""`nugnn.fit` on samples: the machinery of graphs, checkpoints in mid-epoch, and what belongs to graphs alone."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import nugnn
from nugnn import job
from nugnn.augmentation import ShiftAndFlip
from nugnn.batch_split import batch_sizes
from nugnn.batches import SplitBatchSampler
from nugnn.checkpoint import CheckpointError, list_checkpoints, newest_checkpoint
from nugnn.checkpointer import CheckpointPlan
from nugnn.comm.groups import Ranks
from nugnn.datasets.samples import TensorSamples, load_samples
from nugnn.interrupt import Interrupted
from nugnn.loss import cross_entropy
from nugnn.sample_config import SampleConfig
from nugnn.sample_options import GRAPHS_ONLY, SampleOptions, sample_options
from nugnn.sample_part import SamplePart
from nugnn.sample_run import fit_arguments
from nugnn.schedules import Cosine
from nugnn.task import OF_ONE_FAMILY
from nugnn.train_rank import train_rank
from sample_cases import FLOAT64_BOUND, NUM_CLASSES, make_data, make_model

NUM_STEPS = 5
"""Of an epoch: 50 samples in batches of 12, the last one smaller."""


class _Counted:
    """Cross-entropy that knows how many steps there were."""

    num_steps = 0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.num_steps += 1
        return cross_entropy(logits, labels)


def _rank(
    ranks: Ranks, folder: Path | None, sizes: tuple[int, ...], stop_at: int | None = None, resume: bool = False
) -> dict[str, Any]:
    """Two epochs of a network with batch norm and dropout, with all that is carried from step to step."""
    part = SamplePart(make_data("images", 50), make_data("images", 20), make_data("images", 17), sizes, "accuracy")
    loss = _Counted()
    options = SampleOptions(
        loss=loss, epochs=2, seed=3, clip_norm=0.5, schedule_steps=True, make_scheduler=_one_cycle,
        class_weights=torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1], dtype=torch.float64),
    )  # fmt: skip
    plan = None
    if folder is not None:
        newest, _ = newest_checkpoint(folder) if resume else (None, [])
        here = None if newest is None else newest.folder
        plan = CheckpointPlan(folder=folder, identity={}, every_steps=stop_at, resume_from=here)
    model = make_model("cnn").double()
    return train_rank(part, ranks, model, options, checkpoints=plan, asked_to_stop=lambda: loss.num_steps == stop_at)


def _one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40, cycle_momentum=False)


def _learned(outcome: dict[str, Any]) -> tuple[Any, ...]:
    """All of an outcome that does not measure time."""
    epochs = [[epoch[name] for name in ("number", "loss", "val", "test")] for epoch in outcome["epochs"]]
    return epochs, outcome["best"]["number"], outcome["best"]["train"]


def _same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_that_stops_after_any_step_ends_with_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    whole = _rank(Ranks(), None, (12,))
    for step in range(1, 2 * NUM_STEPS):
        folder = tmp_path / str(step)
        stopped = _rank(Ranks(), folder, (12,), stop_at=step)
        assert stopped == {"interrupted_after": list(divmod(step, NUM_STEPS))}
        assert [path.name for path in list_checkpoints(folder)] == [
            f"epoch-{step // NUM_STEPS:08d}" + (f"-step-{step % NUM_STEPS:08d}" if step % NUM_STEPS else "")
        ]
        resumed = _rank(Ranks(), folder, (12,), resume=True)
        assert _same_bits(resumed["state"], whole["state"]) and torch.equal(resumed["logits"], whole["logits"]), step
        assert _learned(resumed) == _learned(whole), step


@pytest.mark.parametrize(("step", "sizes"), [(3, (7, 0, 5)), (7, (5, 3, 4))])
def test_ranks_go_on_in_mid_epoch_on_the_same_split_and_on_others(
    ranks: Any, tmp_path: Path, step: int, sizes: tuple[int, ...]
) -> None:
    whole = ranks.run(3, _rank, None, sizes)
    stopped = ranks.run(3, _rank, tmp_path / "run", sizes, stop_at=step)
    assert stopped == [{"interrupted_after": list(divmod(step, NUM_STEPS))}] * 3
    for number, others in enumerate([sizes, (5, 0, 7), (12,), (6, 6)]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", folder)
        resumed = ranks.run(len(others), _rank, folder, others, resume=True)
        state, expected = resumed[0]["state"], whole[0]["state"]
        if others == sizes:
            assert _same_bits(state, expected)
            assert [_learned(rank) for rank in resumed] == [_learned(rank) for rank in whole]
        for name, value in expected.items():
            assert float((state[name] - value).abs().max()) <= FLOAT64_BOUND * max(float(value.abs().max()), 1e-3), name
        losses = [[epoch["loss"] for epoch in run[0]["epochs"]] for run in (resumed, whole)]
        assert losses[0] == pytest.approx(losses[1], rel=FLOAT64_BOUND)


PIECES: dict[str, Any] = {
    "schedule": "cosine",
    "warmup_epochs": 0.5,
    "label_smoothing": 0.1,
    "weight_decay": 0.3,
    "augment": ShiftAndFlip(1, flip=True),
}


def _with_options(ranks: Ranks, sizes: tuple[int, ...], pieces: dict[str, Any]) -> dict[str, Tensor]:
    part = SamplePart(make_data("images", 50), make_data("images", 20), None, sizes, "accuracy")
    options = SampleOptions(epochs=2, seed=3, lr=0.02, **pieces)
    outcome = train_rank(part, ranks, make_model("cnn").double(), options)
    return outcome.get("state", {})


def test_options_of_training_have_an_effect_that_a_split_does_not_change(ranks: Any) -> None:
    whole = _with_options(Ranks(), (12,), PIECES)
    divided = ranks.run(3, _with_options, (7, 0, 5), PIECES)[0]
    for name, value in whole.items():
        assert float((divided[name] - value).abs().max()) <= FLOAT64_BOUND * max(float(value.abs().max()), 1e-3), name
    for left_out in ("schedule", "warmup_epochs", "label_smoothing", "weight_decay", "augment"):
        fewer = {name: value for name, value in PIECES.items() if name != left_out}
        assert not _same_bits(_with_options(Ranks(), (12,), fewer), whole), left_out


class _Shaken(Dataset[Any]):
    """Samples with noise that is drawn when they are read; asks for the end of the run at one of them."""

    def __init__(self, stop_at: int | None) -> None:
        self.x, self.labels = make_data("images", 50)[:]
        self.stop_at, self.num_read = stop_at, 0

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> Any:
        self.num_read += 1
        if self.num_read == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return self.x[i] + 0.1 * torch.randn(self.x[i].shape), int(self.labels[i])


def test_ctrl_c_in_mid_epoch_and_noise_drawn_by_the_data_set(tmp_path: Path) -> None:
    def fit(stop_at: int | None, **options: Any) -> nugnn.FitResult:
        torch.manual_seed(5)
        options |= {"val": make_data("images", 20), "epochs": 3, "batch_size": 5}
        return nugnn.fit(make_model("mlp").double(), _Shaken(stop_at), **options)

    whole = fit(None)
    stages: list[str] = []
    with pytest.raises(Interrupted, match=r"after step \d of epoch 2 of 3; the checkpoint is in") as caught:
        fit(1 + 50 + 20, checkpoint_folder=tmp_path, on_stage=stages.append)  # the first is looked at for its label
    assert caught.value.epoch == 1 and 0 < caught.value.step < 10 and stages == ["train", "stop"]
    notes: list[str] = []
    torch.manual_seed(5)
    resumed = fit(None, checkpoint_folder=tmp_path, resume=True, on_note=notes.append)
    assert notes and notes[0].startswith(f"going on after step {caught.value.step} of epoch 2")
    assert _same_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert [epoch.loss for epoch in resumed.history] == [epoch.loss for epoch in whole.history]


def test_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    model = make_model("mlp").double()
    before = copy.deepcopy(model.state_dict())
    data = make_data("images", 50)
    options: dict[str, Any] = {"val": make_data("images", 20), "test": make_data("images", 17), "epochs": 2, "seed": 1}
    one = nugnn.fit(model, data, batch_size=12, **options)
    notes: list[str] = []
    two = nugnn.fit(
        model, data, workers=2, shares=[3, 1], batch_size=12, checkpoint_folder=tmp_path, checkpoint_steps=3,
        on_note=notes.append, **options,
    )  # fmt: skip
    assert notes == ["batches of 12 samples are divided by the shares: 9, 3"] == list(two.notes)
    assert two.batch_split == (9, 3) and one.batch_split == (12,)
    assert two.samples_per_second == pytest.approx(50 / two.epoch_seconds)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch-00000002", "epoch-00000001-step-00000004"]
    for a, b in zip(two.history, one.history, strict=True):
        assert (a.loss, a.val, a.test) == pytest.approx((b.loss, b.val, b.test), rel=FLOAT64_BOUND)
    assert two.best.train == pytest.approx(one.best.train) and two.logits.shape == (17, NUM_CLASSES)
    for name, value in one.model.state_dict().items():
        assert torch.allclose(two.model.state_dict()[name], value, rtol=FLOAT64_BOUND, atol=FLOAT64_BOUND), name
    assert _same_bits(model.state_dict(), before)
    with pytest.raises(CheckpointError, match="batch_size was 12, is 10"):
        nugnn.fit(model, data, batch_size=10, checkpoint_folder=tmp_path, resume=True, **options)
    with pytest.raises(CheckpointError, match="samples: train_content was"):
        nugnn.fit(model, make_data("images", 50, torch.float32), batch_size=12, checkpoint_folder=tmp_path, resume=True)


def test_prepared_samples_by_value_and_by_name() -> None:
    data = load_samples("digits-images")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    by_value, by_name = (nugnn.fit(model, given, epochs=1) for given in (data, "Digits_Images"))
    assert _same_bits(by_value.model.state_dict(), by_name.model.state_dict())
    assert by_value.best.train > 0 and by_value.best.test > 0 and len(by_value.logits) == 359
    assert isinstance(data.train, TensorSamples)
    other = copy.copy(data.train)
    other.labels = other.labels.flip(0)
    assert other.content_hash() != data.train.content_hash() == load_samples("digits-images").train.content_hash()


class _NoPairs(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Tensor:
        return torch.zeros(2)


def _relabelled(data: TensorDataset, labels: Tensor) -> TensorDataset:
    return TensorDataset(data.tensors[0], labels)


def test_what_does_not_fit_is_refused_before_anything_starts() -> None:
    data, model = make_data("images", 10), make_model("mlp").double()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (data, {name: "x"}, f"{name} belongs to graphs, not to samples; leave it out") for name in GRAPHS_ONLY
    ]
    cases += [
        (_NoPairs(), {}, r"sample 0 is a Tensor; each has to be a pair \(x, label\)"),
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), {}, "there are no samples"),
        (data, {"optimizer": "adagrad"}, "choose one of adamw, adam, sgd"),
        (data, {"metric": "micro_f1"}, "whose samples have one label each; use accuracy"),
        (data, {"workers": 2, "batch_split": (3, 4), "batch_size": 9}, "adds up to 7, but batch_size is 9"),
        (data, {"workers": 2, "batch_split": "1,2,3"}, "3 numbers for 2 workers"),
        (data, {"batch_split": "most"}, "allowed: auto, even, or samples"),
        (data, {"workers": 3, "batch_size": 2}, "each needs at least one"),
        (data, {"checkpoint_steps": 2}, "need a checkpoint_folder"),
        (load_samples("digits-images"), {"val": data}, "has parts of its own"),
        (data, {"momentum": 0.5}, "momentum has an effect on optimizer sgd alone"),
        (data, {"optimizer": "sgd", "make_optimizer": torch.optim.SGD}, "give one of them"),
        (data, {"schedule_steps": True}, "schedule_steps has an effect on make_scheduler alone"),
        (data, {"epochs": 0}, "epochs is 0, must be a whole number from 1 up"),
        (data, {"epochs": "3"}, "epochs is '3'"),
        (data, {"evaluate_every": 0}, "evaluate_every is 0"),
        (data, {"patience": 0}, "patience is 0"),
        (data, {"schedule": 5}, "schedule is 5; give one of constant, cosine, step"),
        (data, {"schedule": "step", "decay_epochs": 0}, "decay_epochs is 0, must be 1 or more"),
        (_relabelled(data, torch.zeros(10)), {}, "is torch.float32; a class is a whole number"),
        (data, {"val": _relabelled(data, torch.zeros(10, 5))}, r"of val has shape \(5,\), and \(\) in training"),
        (data, {"class_weights": torch.ones(2)}, "class_weights has 2 numbers, but labels of this batch go up to 4"),
        (_relabelled(data, torch.zeros(10, 5)), {"class_weights": torch.ones(5)}, "need one class per sample"),
        (data, {"metric": "roc_auc", "val": data}, "roc_auc needs two classes"),
        (_relabelled(data, torch.arange(10) % 5 - 100 * (torch.arange(10) == 7)), {}, "sample 7 has the label -98"),
    ]
    for given, options, words in cases:
        with pytest.raises(ValueError, match=words):
            raise AssertionError(f"{words}: {nugnn.fit(model, given, **options)}")
    with pytest.raises(TypeError, match="did you mean 'batch_size'"):
        nugnn.fit(model, data, batchsize=3)
    with pytest.raises(ValueError, match="return a column for each class"):
        nugnn.fit(nn.Sequential(nn.Flatten(), nn.Linear(72, 2)).double(), data, epochs=1)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(72, 1), nn.Flatten(0)).double()
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(10,\); it has to return a tensor \(n, C\)"):
        nugnn.fit(flat, data, epochs=1)
    with pytest.raises(TypeError, match="a list_iterator, neither a graph nor a map-style data set"):
        nugnn.fit(model, iter([1]))  # type: ignore[arg-type]


def test_options_of_one_family_are_known_to_the_other() -> None:
    from nugnn.fit_options import FitOptions
    from nugnn.train_options import TrainOptions

    common = {field.name for field in fields(TrainOptions)}
    of_graphs = {field.name for field in fields(FitOptions)} - common
    assert set(GRAPHS_ONLY) == of_graphs | (OF_ONE_FAMILY.keys() - {"check", "val", "test"})


def test_the_rate_follows_a_cosine_unless_something_else_is_said() -> None:
    from_settings = fit_arguments(SampleConfig(dataset="digits-images", epochs=5))
    for options, schedule, warmup in (
        ({}, "cosine", 1.0),
        ({"epochs": 5}, "cosine", 0.5),
        ({"epochs": 5, "warmup_epochs": 2.0}, "cosine", 2.0),
        ({"schedule": "constant"}, "constant", 0.0),
        ({"make_scheduler": lambda optimizer: None}, "constant", 0.0),
        ({name: from_settings[name] for name in ("epochs", "schedule", "warmup_epochs")}, "cosine", 0.5),
    ):
        chosen = sample_options(options)
        assert (chosen.schedule, chosen.warmup_epochs) == (schedule, warmup)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    chosen = sample_options({name: np.int64(2) for name in ("epochs", "batch_size", "micro_batches", "patience")})
    assert {type(x) for x in (chosen.epochs, chosen.batch_size, chosen.micro_batches, chosen.patience)} == {int}
    assert sample_options({"drop_last": True}).drop_last is True
    assert SplitBatchSampler(5, np.array([2, 1])).sizes == (2, 1)  # type: ignore[arg-type]


def test_a_warm_up_that_nobody_asked_for_is_never_refused() -> None:
    for epochs, steps, warmup in ((1, 1, 0), (1, 4, 0), (3, 2, 1), (5, 1, 0), (200, 1, 1), (5, 40, 20)):
        schedule = sample_options({"epochs": epochs}).built_schedule(steps)
        assert schedule == Cosine(epochs * steps, warmup)
    with pytest.raises(ValueError, match="less than one optimizer step"):
        sample_options({"epochs": 1, "warmup_epochs": 0.2}).built_schedule(4)


def test_how_a_batch_is_divided() -> None:
    assert batch_sizes("auto", None, 1, None, 64) == ((64,), "")
    assert batch_sizes("auto", 10, 3, None, 64)[0] == (4, 3, 3)
    assert "no shares" in batch_sizes("auto", 10, 3, None, 64)[1]
    assert batch_sizes("even", 10, 2, None, 64) == ((5, 5), "batches of 10 samples are divided evenly: 5, 5")
    assert batch_sizes("5,0", None, 2, None, 64) == ((5, 0), "")
    for count in range(1, 40):
        sizes, _ = batch_sizes("auto", count + 2, 3, (0.6, 0.3, 0.1), 64)
        assert sum(sizes) == count + 2
        assert all(abs(size - share * (count + 2)) < 1 for size, share in zip(sizes, (0.6, 0.3, 0.1), strict=True))


def test_large_tensors_travel_as_files_and_stay_private_to_who_writes(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    images = torch.randint(0, 256, (700, 3, 40, 40), dtype=torch.uint8)
    turned = torch.randn(600, 500, dtype=torch.float64).T
    job.write_job(tmp_path, {"data": TensorDataset(images, torch.arange(700)), "turned": turned, "again": [images]})
    assert (tmp_path / "job.pickle").stat().st_size < 20_000 and len(list(tmp_path.glob("tensor-*"))) == 2
    work, other = job.read_job(tmp_path), job.read_job(tmp_path)
    assert torch.equal(work["data"].tensors[0], images) and torch.equal(work["turned"], turned)
    assert work["again"][0] is work["data"].tensors[0]
    work["turned"].zero_()
    assert torch.equal(other["turned"], turned)
