"""Limits slow each rate by its own factor, never speed one up; workers that share a device have no more than it."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.datasheet import sheet_of
from nugnn.planning.limited_profile import limited, shared
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.profiles import DeviceProfile

ROWS = Path(__file__).resolve().parents[2] / "benchmarks/rows/unequal"
H200 = sheet_of("H200").as_profile()
CPU = DeviceProfile(
    name="a CPU",
    kind="cpu",
    source="measured",
    memory_bytes=1 << 34,
    cache_bytes=1 << 25,
    gemm_flops={"fp32": 8e11},
    stream_bytes=1e11,
    gather_bytes=4e10,
    cached_gather_bytes=2e11,
    pack_bytes=5e10,
    launch_seconds=4e-6,
    multiprocessors=16,
)
RATES = ("stream_bytes", "gather_bytes", "cached_gather_bytes", "pack_bytes")


def rates(profile: DeviceProfile) -> list[float]:
    return [getattr(profile, name) for name in RATES] + list(profile.gemm_flops.values())


def test_what_was_measured_comes_out() -> None:
    """Of some H200, of which one differs from another by up to 12 % in products and 3 % in copies: the median."""
    files = ROWS.glob("*.jsonl")
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    for sms in (16, 32, 64):
        runs = {json.dumps(row["rates"]) for row in rows if row["sms"] == sms}
        assert len(runs) >= 3
        part = limited(H200, DeviceLimits(sms=sms))
        for rate, ours in (
            ("flops", part.gemm_flops["bf16"] / H200.gemm_flops["bf16"]),
            ("bandwidth", part.stream_bytes / H200.stream_bytes),
        ):
            shares = [measured[rate] / whole[rate] for whole, measured in map(json.loads, runs)]
            assert ours == pytest.approx(statistics.median(shares), rel=0.005)
    part = limited(H200, DeviceLimits(sms=32))  # sums over neighbours: measured once, no row kept
    assert H200.gather_bytes / part.gather_bytes == pytest.approx(2.7, rel=0.01)
    assert part.multiprocessors == 32 and part.memory_bytes == H200.memory_bytes


@given(few=st.integers(1, 132), more=st.integers(1, 132))
def test_rates_grow_with_multiprocessors_up_to_the_whole(few: int, more: int) -> None:
    few, more = sorted((few, more))
    less, much = (rates(limited(H200, DeviceLimits(sms=count))) for count in (few, more))
    assert all(a <= b <= whole for a, b, whole in zip(less, much, rates(H200), strict=True))
    assert all(a >= few / 132 * whole * (1 - 1e-12) for a, whole in zip(less, rates(H200), strict=True))
    assert limited(H200, DeviceLimits(sms=132)) == H200


@given(few=st.integers(1, 16), more=st.integers(1, 16))
def test_rates_grow_with_threads_up_to_the_whole(few: int, more: int) -> None:
    few, more = sorted((few, more))
    less, much = (rates(limited(CPU, DeviceLimits(threads=count))) for count in (few, more))
    assert all(a <= b * (1 + 1e-12) for a, b in zip(less, much, strict=True))
    assert limited(CPU, DeviceLimits(threads=16)) == CPU


def test_memory_is_a_fraction() -> None:
    assert limited(H200, DeviceLimits(memory_fraction=0.25)).memory_bytes == round(H200.memory_bytes / 4)
    assert limited(H200, DeviceLimits()) is H200
    assert limited(H200, DeviceLimits(threads=2)) == H200  # of the host: nothing that the GPU does


@pytest.mark.parametrize(
    ("profile", "limits", "text"),
    [
        (H200, DeviceLimits(sms=133), "sms is 133, and NVIDIA H200 has 132 multiprocessors"),
        (CPU, DeviceLimits(sms=8), "sms is 8, and a CPU is a CPU; limit its threads"),
        (CPU, DeviceLimits(threads=17), "threads=17: a CPU has 16 cores to use; give 16 or fewer"),
    ],
)
def test_limits_of_the_other_kind_or_beyond_are_refused(profile: DeviceProfile, limits: DeviceLimits, text: str):
    with pytest.raises(ValueError, match=text):
        limited(profile, limits)


@given(st.lists(st.integers(1, 16) | st.none(), min_size=2, max_size=5), st.sampled_from([H200, CPU]))
def test_workers_on_one_device_have_no_more_than_all_of_it(threads: list[int | None], profile: DeviceProfile) -> None:
    limits = [DeviceLimits(threads=count) for count in threads]
    parts = shared(profile, limits)
    for column, whole in zip(zip(*map(rates, parts), strict=True), rates(profile), strict=True):
        assert sum(column) <= whole * (1 + 1e-9)
    assert sum(part.memory_bytes for part in parts) <= profile.memory_bytes


def test_threads_decide_who_has_how_much_of_a_cpu() -> None:
    one, three = shared(CPU, [DeviceLimits(threads=4), DeviceLimits(threads=12)])
    assert three.gemm_flops["fp32"] == pytest.approx(3 * one.gemm_flops["fp32"])
    assert one.gemm_flops["fp32"] + three.gemm_flops["fp32"] == pytest.approx(CPU.gemm_flops["fp32"])
    halves = shared(CPU, [DeviceLimits()] * 2)
    assert halves[0] == halves[1] and halves[0].multiprocessors == 8
    # as the launcher divides them: the first ones have one more
    assert [each.multiprocessors for each in shared(CPU, [DeviceLimits()] * 3)] == [6, 5, 5]
    with_limit = [DeviceLimits(), DeviceLimits(threads=1), DeviceLimits()]
    assert [each.multiprocessors for each in shared(CPU, with_limit)] == [8, 1, 7]
    first, second = shared(CPU, [DeviceLimits()] * 2, [3, 2])
    assert (first.multiprocessors, second.multiprocessors) == (3, 2)
    assert 2 * first.gather_bytes == pytest.approx(3 * second.gather_bytes)


def test_memory_that_is_not_given_away_is_divided() -> None:
    a, b, c = shared(CPU, [DeviceLimits(memory_fraction=0.5), DeviceLimits(), DeviceLimits()])
    assert (a.memory_bytes, b.memory_bytes, c.memory_bytes) == (1 << 33, 1 << 32, 1 << 32)
    with pytest.raises(ValueError, match=r"adds up to 1\.2"):
        shared(CPU, [DeviceLimits(memory_fraction=0.6)] * 2)
    with pytest.raises(ValueError, match="leaves nothing for worker 1"):
        shared(CPU, [DeviceLimits(memory_fraction=1.0), DeviceLimits()])
    assert shared(CPU, [DeviceLimits(threads=3)]) == (limited(CPU, DeviceLimits(threads=3)),)
    assert replace(DeviceLimits(), sms=3) == DeviceLimits(sms=3)
