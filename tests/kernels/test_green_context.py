"""Streams with some of a GPU's multiprocessors, on a driver that stands for NVIDIA's; on a GPU see test_virtual_gpu."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.kernels import green_context
from nugnn.kernels.green_context import limit_multiprocessors, new_stream, usable_multiprocessors

GPU = torch.device("cuda", 0)
TOTAL, GROUP = 132, 8
"""Of an H200."""
INVALID = 914
"""CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION."""


class Driver:
    """What the driver documents of these calls; handles are numbers that no other kind of handle has."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.streams: dict[int, int] = {}
        self.described: dict[int, int] = {}

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = 7 + ordinal.value
        return 0

    def cuDeviceGetDevResource(self, device: Any, resource: Any, kind: Any) -> int:
        assert (device.value, kind.value) == (7, 1)
        self._fill(resource._obj, TOTAL)
        return 0

    def cuDevSmResourceSplitByCount(
        self, result: Any, groups: Any, whole: Any, remaining: Any, flags: Any, least: Any
    ) -> int:
        assert groups._obj.value == 1 and self._read(whole._obj) == TOTAL and remaining is None and flags.value == 0
        granted = -(-least.value // GROUP) * GROUP
        if granted > TOTAL:
            return INVALID
        self._fill(result._obj, granted)
        return 0

    def cuDevResourceGenerateDesc(self, description: Any, resources: Any, count: Any) -> int:
        assert count.value == 1
        description._obj.value = 1000 + len(self.described)
        self.described[description._obj.value] = self._read(resources._obj)
        return 0

    def cuGreenCtxCreate(self, context: Any, description: Any, device: Any, flags: Any) -> int:
        assert (device.value, flags.value) == (7, 1)
        context._obj.value = 2000 + len(self.counts)
        self.counts[context._obj.value] = self.described[description.value]
        return 0

    def cuGreenCtxStreamCreate(self, stream: Any, context: Any, flags: Any, priority: Any) -> int:
        assert (flags.value, priority.value) == (1, 0)
        stream._obj.value = 3000 + len(self.streams)
        self.streams[stream._obj.value] = context.value
        assert context.value in self.counts
        return 0

    def cuGreenCtxGetDevResource(self, context: Any, resource: Any, kind: Any) -> int:
        assert kind.value == 1
        self._fill(resource._obj, self.counts[context.value])
        return 0

    def cuStreamGetGreenCtx(self, stream: Any, context: Any) -> int:
        context._obj.value = self.streams.get(stream.value)
        return 0

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"
        return 0 if code.value == INVALID else 1

    @staticmethod
    def _fill(resource: Any, count: int) -> None:
        ctypes.memset(ctypes.addressof(resource), 0xEE, 144)
        ctypes.memmove(ctypes.addressof(resource), ctypes.byref(ctypes.c_int(1)), 4)
        ctypes.memmove(ctypes.addressof(resource) + 96, ctypes.byref(ctypes.c_uint(count)), 4)

    @staticmethod
    def _read(resource: Any) -> int:
        return ctypes.c_uint.from_address(ctypes.addressof(resource) + 96).value


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A GPU of 132 multiprocessors, and the streams of torch."""
    driver, current = Driver(), [types.SimpleNamespace(cuda_stream=0)]

    def external(handle: int, device: torch.device) -> Any:
        return types.SimpleNamespace(cuda_stream=handle)

    properties = types.SimpleNamespace(multi_processor_count=TOTAL, name="a card")
    monkeypatch.setattr(green_context, "_library", lambda: driver)
    for name, stands_for in {
        "get_device_properties": lambda _: properties,
        "set_device": lambda _: None,
        "synchronize": lambda _: None,
        "current_device": lambda: 0,
        "current_stream": lambda _: current[0],
        "set_stream": lambda stream: current.__setitem__(0, stream),
        "ExternalStream": external,
        "Stream": lambda _: types.SimpleNamespace(cuda_stream=55),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_for)
    return driver


@pytest.mark.parametrize(("count", "granted"), [(1, 8), (8, 8), (16, 16), (20, 24), (32, 32), (64, 64), (128, 128)])
def test_all_streams_made_afterwards_have_the_limit(driver: Driver, count: int, granted: int) -> None:
    assert usable_multiprocessors(GPU) == TOTAL and new_stream(GPU).cuda_stream == 55
    assert limit_multiprocessors(GPU, count) == granted == usable_multiprocessors(GPU)
    further = new_stream(GPU)
    (context,) = driver.counts
    assert driver.streams[further.cuda_stream] == context and len(driver.streams) == 2


def test_all_of_a_gpu_is_no_limit(driver: Driver) -> None:
    assert limit_multiprocessors(GPU, TOTAL) == TOTAL == usable_multiprocessors(GPU)
    assert driver.counts == {}


@given(st.sampled_from([0, -1, TOTAL + 1]))
def test_what_a_gpu_has_not_is_refused(count: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        properties = types.SimpleNamespace(multi_processor_count=TOTAL, name="a card")
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        with pytest.raises(ValueError, match=f"{count} multiprocessors of a card, which has 132; give 1 to 132"):
            limit_multiprocessors(GPU, count)


def test_what_the_driver_cannot_set_apart_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="cuDevSmResourceSplitByCount says CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"):
        limit_multiprocessors(GPU, 131)
    assert usable_multiprocessors(GPU) == TOTAL


@pytest.mark.parametrize("library", [None, types.SimpleNamespace(cuDeviceGet=lambda *_: 0)], ids=["none", "old"])
def test_without_a_driver_that_can_it_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setattr(green_context, "_library", lambda: library)
    with pytest.raises(ValueError, match=r"NVIDIA's drivers have from 550 \(CUDA 12.4\) on"):
        limit_multiprocessors(GPU, 32)
    assert usable_multiprocessors(GPU) == TOTAL and new_stream(GPU).cuda_stream == 55
