"""An error in the user's own code is told as one: whose it is, its lines, nothing of torch's loader, exit code 2."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import nugnn
from nugnn.cli_errors import errors_reported
from nugnn.failure import WorkerFailed
from nugnn.sample_family import SampleFamily
from nugnn.user_code import UserCodeError
from sample_cases import make_data


class _Broken(Dataset[Any]):
    """Sample 7 asks for a column that is not there."""

    def __init__(self, error: type[Exception] = KeyError, at: int = 7) -> None:
        self.x, self.labels = make_data("images", 12, torch.float32)[:]
        self.error, self.at = error, at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        if i == self.at:
            raise self.error("colour")  # line of the data set
        return self.x[i], self.labels[i]


class _Taking(_Broken):
    def take(self, ids: Tensor) -> Any:
        return [torch.stack(part) for part in zip(*[self[int(i)] for i in ids], strict=True)]


class _Uneven(_Broken):
    def __getitem__(self, i: int) -> Any:
        return self.x[i, :, : 2 + i % 2], self.labels[i]


class _BrokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(72, 5)

    def forward(self, x: Tensor) -> Tensor:
        sizes = {"rows": len(x)}
        return self.linear(x.flatten(1)) * sizes["row"]  # type: ignore[no-any-return]  # line of the model


def _model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 5))


def _raised(model: nn.Module, data: Any, **options: Any) -> str:
    """The text of the error, of which neither it nor its traceback speaks of torch's loader."""
    with pytest.raises(UserCodeError) as caught:
        nugnn.fit(model, data, epochs=1, batch_size=4, **options)
    whole = "".join(traceback.format_exception(caught.value))
    assert "dataloader.py" not in whole and "fetch.py" not in whole and "DataLoader" not in whole
    return str(caught.value)


@pytest.mark.parametrize("num_data_workers", [0, 1])
@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_the_data_set_is_named_with_sample_and_line(num_data_workers: int, error: type[Exception]) -> None:
    text = _raised(_model(), _Broken(error), num_data_workers=num_data_workers)
    assert text.startswith(f"the data set failed on sample 7: {error.__name__}: ")
    assert "line of the data set" in text and __file__ in text and "torch" not in text
    assert "the data set failed on samples" in _raised(_model(), _Taking(error), num_data_workers=num_data_workers)


def test_the_first_sample_is_read_before_anything_starts() -> None:
    assert "sample 0: KeyError: 'colour'" in _raised(_model(), _Broken(at=0), workers=2)


def test_joining_samples_and_a_collate_function_are_told_apart() -> None:
    assert _raised(_model(), _Uneven()).startswith("joining samples into a batch failed on samples ")

    def collate(samples: list[Any]) -> Any:
        return samples[99]

    text = _raised(_model(), _Broken(at=-1), collate_fn=collate)
    assert text.startswith("collate_fn failed on samples") and "return samples[99]" in text


@pytest.mark.parametrize("model", [_BrokenModel(), nn.Sequential(nn.Flatten(), nn.Linear(70, 5))])
def test_the_model_is_named_with_what_it_was_given(model: nn.Module) -> None:
    text = _raised(model, make_data("images", 12, torch.float32))
    assert text.startswith("the model failed on a batch of shape (4, ")
    is_own = isinstance(model, _BrokenModel)
    assert ("line of the model" in text and "KeyError: 'row'" in text) if is_own else "cannot be multiplied" in text


def test_a_loss_and_an_augmentation_of_the_users_are_named() -> None:
    data = make_data("images", 12, torch.float32)

    def broken(*given: Any) -> Tensor:
        raise KeyError("weights")

    assert _raised(_model(), data, loss=broken).startswith("the loss function failed: KeyError: 'weights'")
    assert _raised(_model(), data, augment=broken).startswith("augment failed: KeyError: 'weights'")


def test_what_nugnn_refuses_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^the model returned a tensor of shape") as caught:
        nugnn.fit(nn.Sequential(nn.Flatten(), nn.Linear(72, 1), nn.Flatten(0)), make_data("images", 4, torch.float32))
    assert not isinstance(caught.value, UserCodeError)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("whose", ["the data set", pytest.param("the model", marks=pytest.mark.slow)])
def test_exit_code_and_message_over_two_workers(whose: str, capsys: pytest.CaptureFixture[str]) -> None:
    if whose == "the model":
        data, model, words = make_data("images", 12, torch.float32), _BrokenModel(), "a batch of shape (2, 2, 6, 6)"
    else:
        data, model, words = _Broken(), _model(), "sample 7: KeyError: 'colour'"
    with pytest.raises(SystemExit) as ended, errors_reported():
        nugnn.fit(model, data, epochs=1, batch_size=4, workers=2)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"nugnn: error: {whose} failed on {words}")
    assert __file__ in said
    assert isinstance(ended.value.__context__, WorkerFailed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 16.5}, "batch_size is 16.5, must be a whole number of samples"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"schedule": "cosine", "warmup_epochs": 0.1}, "less than one optimizer step, of which an epoch has 3"),
        ({"warmup_epochs": 0.1}, "would have no effect; give 0.333 or more"),
        ({"schedule": "cosine", "warmup_epochs": 0.9, "epochs": 1}, "comes to 3 optimizer steps, and there are 3"),
        ({"batch_norm": "local"}, "the model has no batch norm; leave the option out"),
        ({"batch_norm": "local", "norm": True, "batch_split": (3, 1)}, "a single sample"),
        ({"batch_norm": "local", "norm": True, "micro_batches": 2}, "a single sample"),
        ({"batch_norm": "mine"}, "batch_norm is 'mine', must be all or local"),
        ({"batch_size": 16, "drop_last": True}, "12 samples make no batch of 16, and drop_last is on"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"num_data_workers": -1}, "num_data_workers is -1"),
        ({"clip_norm": 0.0}, "clip_norm is 0, must be positive"),
        ({"lr": 0.1, "make_optimizer": torch.optim.SGD}, "lr has no effect beside make_optimizer"),
        ({"weight_decay": 0.1, "make_optimizer": torch.optim.SGD}, "weight_decay has no effect beside make_optimizer"),
    ],
)
def test_what_cannot_be_is_refused_before_workers_start(options: dict[str, Any], words: str) -> None:
    norms = [nn.BatchNorm1d(72)] if options.pop("norm", False) else []
    model = nn.Sequential(nn.Flatten(), *norms, nn.Linear(72, 5))
    stages: list[str] = []
    options = {"batch_size": 4, "epochs": 2} | options
    if "batch_split" in options:
        del options["batch_size"]
    with pytest.raises(ValueError, match=words):
        nugnn.fit(model, make_data("images", 12, torch.float32), workers=2, on_stage=stages.append, **options)
    assert stages == []


def test_a_resumed_cosine_of_another_length_is_refused_before_workers_start(tmp_path: Any) -> None:
    data, stages = make_data("images", 12, torch.float32), []
    options: dict[str, Any] = {"batch_size": 4, "schedule": "cosine", "checkpoint_folder": tmp_path}
    nugnn.fit(_model(), data, epochs=2, **options)
    with pytest.raises(
        ValueError, match=r"epochs of the schedule was 2, is 3. Give what was given then, or train with"
    ):
        nugnn.fit(_model(), data, epochs=3, resume=True, on_stage=stages.append, **options)
    assert stages == []


def test_weights_that_the_last_step_ruins_are_noticed() -> None:
    def ruins(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def ruin(*_: Any) -> None:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][1][0] = torch.nan

        optimizer.register_step_post_hook(ruin)
        return optimizer

    data = make_data("images", 4, torch.float32)
    with pytest.raises(FloatingPointError, match=r"1\.bias is no longer finite after the last step, in epoch 1"):
        nugnn.fit(_model(), data, epochs=1, batch_size=4, make_optimizer=ruins)


def test_a_loader_of_ones_own_raises_the_same() -> None:
    sampler = nugnn.SplitBatchSampler(12, (4,), shuffle=False)
    loader = nugnn.batch_loader(_Broken(), sampler)
    with pytest.raises(UserCodeError, match="sample 7"):
        list(loader)
    with pytest.raises(UserCodeError, match="the data set failed on sample 0"):
        SampleFamily(_model(), _Broken(at=0), nugnn.init(), sizes=(4,))
