"""A device is measured within physical bounds, leaves torch as it was, and has no rate for what it computes wrongly."""

from __future__ import annotations

import random
import time
import types
from pathlib import Path

import pytest
import torch

from nugnn.planning import device_facts, measure_products
from nugnn.planning.fitting import WrongResult, largest_that_fits
from nugnn.planning.measure import gathered, launched, measure_device, packed
from nugnn.planning.measure_products import Product, check_product, float32_rounding, formats_of, make_product
from nugnn.planning.profiles import DeviceProfile, Format
from nugnn.planning.timing import Rate, Timing, time_calls, timing_of

CPU = torch.device("cpu")
USABLE_BYTES = 1 << 29
"""Features of at most 32 MiB: a quick profile."""
RATES = ("stream_bytes", "gather_bytes", "cached_gather_bytes", "pack_bytes")


def quick_profile(notes: list[str]) -> DeviceProfile:
    """By the seconds that this process computes, which others on its cores do not make longer."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("timing", "measure"):
            patch.setattr(f"nugnn.planning.{module}.time", types.SimpleNamespace(perf_counter=time.process_time))
        return measure_device(CPU, seconds=0.4, usable_bytes=USABLE_BYTES, on_note=notes.append)


@pytest.fixture(scope="module")
def measured() -> tuple[DeviceProfile, list[str]]:
    notes: list[str] = []
    return quick_profile(notes), notes


def settings() -> tuple[object, ...]:
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        random.getstate(),
    )


def test_a_quick_profile_of_this_cpu_is_plausible(measured: tuple[DeviceProfile, list[str]]) -> None:
    profile, _ = measured
    assert (profile.kind, profile.source, profile.uuid) == ("cpu", "measured", None)
    assert profile.memory_bytes == USABLE_BYTES and profile.multiprocessors == torch.get_num_threads()
    assert 1 << 18 <= profile.cache_bytes <= 1 << 31
    # slower than one core without vectors, faster than any host
    assert 1e8 < profile.gemm_flops["fp32"] < 1e14
    for rate in RATES:
        assert 1e7 < getattr(profile, rate) < 1e13, rate
    assert 1e-8 < profile.launch_seconds < 1e-2


def test_every_rate_has_its_spread(measured: tuple[DeviceProfile, list[str]]) -> None:
    profile, _ = measured
    products = {f"gemm_flops.{name}" for name in profile.gemm_flops}
    assert set(profile.spread) == products | {*RATES, "launch_seconds"}


def test_measured_again_it_is_the_same_within_noise_and_torch_is_as_before(
    measured: tuple[DeviceProfile, list[str]],
) -> None:
    before = settings()
    again = quick_profile([])
    assert settings() == before
    for rate in (*RATES, "launch_seconds"):  # of a machine whose caches other tests use, too
        assert 1 / 8 < getattr(again, rate) / getattr(measured[0], rate) < 8, rate


def test_features_that_cannot_exceed_the_cache_are_named(
    monkeypatch: pytest.MonkeyPatch, measured: tuple[DeviceProfile, list[str]]
) -> None:
    profile, notes = measured
    is_small = USABLE_BYTES // 16 < 4 * profile.cache_bytes
    assert any("for lack of memory" in note for note in notes) == is_small


# -- timing ------------------------------------------------------------------------------------------------------------


def test_the_spread_is_of_the_20th_and_80th_percentile() -> None:
    assert timing_of([3.0, 1.0, 2.0, 5.0, 4.0, 100.0]) == Timing(3.5, (5.0 - 2.0) / 3.5)
    assert timing_of([2.0]) == Timing(2.0, 0.0)
    assert Rate.of(10.0, Timing(2.0, 0.5)) == Rate(5.0, 0.5)


def test_calls_stay_within_the_budget_but_for_the_least() -> None:
    calls: list[int] = []
    time_calls(lambda: calls.append(0), CPU, budget_seconds=0.0)
    assert len(calls) == 2 + 5
    time_calls(lambda: calls.append(0), CPU, budget_seconds=1e6)
    assert len(calls) == 7 + 2 + 100


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        MemoryError(),
    ],
)
def test_what_does_not_fit_is_measured_smaller_and_said(error: Exception) -> None:
    def measure(size: int) -> int:
        if size > 30:
            raise error
        return size

    notes: list[str] = []
    assert largest_that_fits(measure, 100, 10, "copies", notes.append) == 25
    assert notes == ["copies: memory did not suffice, measured at 25 instead of 100"]
    with pytest.raises(type(error)):
        largest_that_fits(measure, 100, 30, "copies", notes.append)
    assert largest_that_fits(measure, 20, 10, "copies", notes.append) == 20 and len(notes) == 1


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    sizes: list[int] = []

    def measure(size: int) -> None:
        sizes.append(size)
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        largest_that_fits(measure, 100, 1, "copies", print)
    assert sizes == [100]


# -- results are checked -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp64", "fp32", "tf32", "bf16", "fp16", "int8", "fp8"])
def test_a_right_product_passes_and_a_wrong_one_does_not(name: Format) -> None:
    product = make_product(name, 64, CPU)
    result = product.run()
    check_product(name, product, result)
    wrong = result.clone()
    wrong[0, 0] += 1
    with pytest.raises(WrongResult, match="a product of 64 x 64 is off"):
        check_product(name, product, wrong)
    if result.is_floating_point():
        with pytest.raises(WrongResult):
            check_product(name, product, torch.full_like(result, torch.nan))


def test_a_product_in_fewer_bits_is_not_taken_for_float32() -> None:
    product = make_product("fp32", 64, CPU)
    with pytest.raises(WrongResult):
        check_product("fp32", product, (product.a.bfloat16() @ product.b.bfloat16()).float())


def test_a_format_that_is_wrong_or_missing_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: Format, n: int, device: torch.device) -> Product:
        product = make_product(name, n, device)
        if name == "fp16":
            return Product(product.a, product.b, lambda: product.a)
        if name == "int8":
            raise NotImplementedError("no such kernel\nand more")
        return product

    monkeypatch.setattr(measure_products, "make_product", made)
    monkeypatch.setattr(measure_products, "formats_of", lambda device: ("fp32", "fp16", "int8"))
    monkeypatch.setattr(measure_products, "_CPU_SIZES", (64, 64))
    notes: list[str] = []
    assert list(measure_products.measure_products(CPU, seconds=0.03, on_note=notes.append)) == ["fp32"]
    assert [note.split(":")[0] for note in notes] == ["fp16 products are left out", "int8 products are left out"]


def test_wrong_sums_over_neighbours_and_rows_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nugnn.planning.measure.spmm", lambda structure, *_: torch.zeros(structure.num_dst, 128))
    with pytest.raises(WrongResult, match="a sum over neighbours is wrong"):
        gathered(100, 160, CPU, 0.0)
    monkeypatch.setattr("nugnn.planning.measure.take_rows", lambda x, rows: x[: len(rows)])
    with pytest.raises(WrongResult, match="rows that were picked differ"):
        packed(100, CPU, 0.0)


def test_products_of_float32_are_rounded_only_inside() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), float32_rounding("high"):
        assert torch.get_float32_matmul_precision() == "high"
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_an_operator_costs_the_host_something() -> None:
    timing = launched(CPU, 0.01)
    assert timing.seconds > 0 and timing.spread >= 0


# -- who a device is ---------------------------------------------------------------------------------------------------


class Uuid:
    """As torch's: only its text is of use."""

    def __str__(self) -> str:
        return "5d3a0b6e-1234-4000-8000-000000000001"


def test_a_gpu_is_known_by_its_uuid_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def properties(device: torch.device) -> object:
        asked.append(device)
        return types.SimpleNamespace(uuid=Uuid(), name="a card", total_memory=7, L2_cache_size=5)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    gpu = torch.device("cuda", 3)
    assert device_facts.device_uuid(gpu) == "GPU-5d3a0b6e-1234-4000-8000-000000000001"
    assert (device_facts.device_name(gpu), device_facts.memory_bytes(gpu), device_facts.cache_bytes(gpu)) == (
        "a card", 7, 5,
    )  # fmt: skip
    assert set(asked) == {gpu}
    assert device_facts.device_uuid(CPU) is None
    assert device_facts.spelled_uuid("00000000-0000-0000-0000-000000000000") is None


@pytest.mark.parametrize(
    ("capability", "formats"),
    [
        ((7, 0), {"fp32", "fp64", "fp16"}),
        ((8, 0), {"fp32", "fp64", "fp16", "tf32", "bf16", "int8"}),
        ((9, 0), {"fp32", "fp64", "fp16", "tf32", "bf16", "int8", "fp8"}),
    ],
)
def test_formats_follow_from_what_the_gpu_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], formats: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert set(formats_of(torch.device("cuda", 0))) == formats


def test_caches_and_names_are_read_from_the_system(tmp_path: Path) -> None:
    for number, (level, size) in enumerate([("1", "32K"), ("2", "1M"), ("3", "36608K"), ("x", "")]):
        folder = tmp_path / "cpu0" / "cache" / f"index{number}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    assert device_facts.last_cache_bytes(tmp_path) == 36608 << 10
    assert device_facts.last_cache_bytes(tmp_path / "none") == 0
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\nmodel\t: 1\n")
    assert device_facts.processor_name(info) == "Some CPU @ 2 GHz"
    assert device_facts.processor_name(tmp_path / "none")
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 100 kB\nMemAvailable:   42 kB\n")
    assert device_facts.free_bytes(CPU, memory) == 42 << 10
    assert device_facts.free_bytes(CPU, tmp_path / "none") > 0


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_in_every_format_it_has() -> None:
    device, notes = torch.device("cuda", 0), list[str]()
    before = settings()
    profile = measure_device(device, seconds=3.0, on_note=notes.append)
    assert settings() == before
    assert set(profile.gemm_flops) == set(formats_of(device)), notes
    assert profile.uuid is not None and profile.uuid.startswith(("GPU-", "MIG-"))
    assert profile.gather_bytes < profile.cached_gather_bytes and 1e-7 < profile.launch_seconds < 1e-4
    if "bf16" in profile.gemm_flops:
        assert profile.gemm_flops["fp32"] < profile.gemm_flops["tf32"] < profile.gemm_flops["bf16"]
