"""Which device each worker gets, and each refusal in one sentence."""

from __future__ import annotations

import pytest
import torch

from nugnn import devices
from nugnn.config import TrainConfig
from nugnn.devices import devices_of, own_device
from nugnn.options import ConfigError

CPU = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0)
    assert devices_of("auto", 2) == ([CPU, CPU], "")
    with pytest.raises(ValueError, match=r"device cuda.*: there is no GPU to use: .*; use --device cpu"):
        devices_of("cuda", 1)


def test_auto_takes_a_gpu_for_each_worker_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    assert devices_of("auto", 2) == ([torch.device("cuda", 0), torch.device("cuda", 1)], "")
    devices, note = devices_of("auto", 3)
    assert devices == [CPU] * 3 and "3 workers for 2 GPUs" in note


def test_cuda_shares_gpus_in_turn_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    devices, note = devices_of("cuda", 2)
    assert devices == [torch.device("cuda", 0)] * 2 and "2 workers share 1 GPU" in note


def test_a_list_names_the_device_of_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    assert devices_of("cuda:0,cpu", 2) == ([torch.device("cuda", 0), CPU], "")
    with pytest.raises(ValueError, match="2 devices for 3 workers"):
        devices_of("cuda:0,cpu", 3)
    with pytest.raises(ValueError, match="cuda:1: this host has 1 GPU"):
        devices_of("cuda:0,cuda:1", 2)
    with pytest.raises(ValueError, match="'tpu' is not known"):
        devices_of("cpu,tpu", 2)


def test_a_gpu_is_found_by_its_uuid_and_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    monkeypatch.setattr(devices, "device_uuid", lambda device: f"GPU-{'ab'[device.index]}")
    second = torch.device("cuda", 1)
    assert devices_of("GPU-b,GPU-b,cpu", 3) == ([second, second, CPU], "")
    assert devices_of("GPU-b", 2) == ([second] * 2, "")
    with pytest.raises(ValueError, match="device GPU-c: this host has no such GPU; it has GPU-a, GPU-b"):
        devices_of("GPU-c", 1)
    pretend(monkeypatch, 0)
    with pytest.raises(ValueError, match="device GPU-a: this host has no such GPU; it has none"):
        devices_of("GPU-a", 1)
    assert TrainConfig(dataset="digits", workers=2, device="GPU-a1b2-c3,cpu").device == "GPU-a1b2-c3,cpu"


def test_a_process_of_torchrun_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert own_device("cuda") == torch.device("cuda", 1)
    assert own_device("cpu") == CPU


def test_the_option_is_checked_before_torch_is_imported() -> None:
    assert TrainConfig(dataset="digits", workers=2, device="cuda:0,cpu").device == "cuda:0,cpu"
    for wrong in ("gpu", "cuda:", "cpu,", "cuda,cuda,cuda"):
        with pytest.raises(ConfigError, match=r"--device .* is not allowed; allowed: auto, cpu, cuda"):
            TrainConfig(dataset="digits", workers=2, device=wrong)
