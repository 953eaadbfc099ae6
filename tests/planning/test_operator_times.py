"""Times from rates: every operator at the rate of its kind, formats that are not there named, faster devices faster."""

from __future__ import annotations

import functools

import pytest

from nugnn.models import GNN
from nugnn.planning.datasheet import sheet_of
from nugnn.planning.operator_costs import bytes_of, flops_of
from nugnn.planning.operator_times import ProfileTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.profiles import DeviceProfile
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import OperatorRecord, Storage, TensorRecord
from nugnn.traced_step import trace_graph_step

PART = PartSizes(inner=100_000, halo=30_000, edges=1_000_000, train=50_000, sent=25_000)
RATES = ("stream_bytes", "gather_bytes", "cached_gather_bytes", "pack_bytes")


def _profile(**changes: object) -> DeviceProfile:
    return sheet_of("Tesla V100-SXM2-16GB").as_profile().model_copy(update={"launch_seconds": 0.0, **changes})


def _scaled(profile: DeviceProfile, factor: float) -> DeviceProfile:
    rates = {rate: getattr(profile, rate) * factor for rate in RATES}
    return profile.model_copy(
        update={**rates, "gemm_flops": {form: rate * factor for form, rate in profile.gemm_flops.items()}}
    )


@functools.cache
def _step(name: str) -> StepTrace:
    return trace_graph_step(GNN(name, 20, 5, layers=2, hidden=16), in_features=20, num_classes=5).at(PART)


def _product(m: int, k: int, n: int, dtype: str = "float32") -> tuple[OperatorRecord, list[Storage]]:
    shapes = ((m, k), (k, n), (m, n))
    storages = [Storage(values=a * b, dtype=dtype, category="input", made_by=-1) for a, b in shapes]
    *inputs, output = (TensorRecord(storage=i, shape=shape, dtype=dtype) for i, shape in enumerate(shapes))
    sizes = {"m": m, "k": k, "n": n, "batch": 1}
    record = OperatorRecord(
        name="linear", op="aten.mm", kind="product", phase="forward", inputs=tuple(inputs), outputs=(output,),
        sizes=sizes,
    )  # fmt: skip
    return record, storages


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_all_but_views_take_time_in_inverse_proportion_to_rates(name):
    step, slow, fast = _step(name), ProfileTimes(_profile()), ProfileTimes(_scaled(_profile(), 3.0))
    for record in step.operators:
        seconds = slow.seconds(record, step.storages)
        has_none = record.kind == "metadata" or record.attrs.get("what") == "all_reduce" or not record.inputs
        assert seconds >= 0 and (seconds > 0 or has_none), record
        assert fast.seconds(record, step.storages) == pytest.approx(seconds / 3, rel=1e-12)


def test_a_cpu_takes_its_launches_beside_its_work_and_a_gpu_has_them_apart():
    step = _step("gcn")
    gpu, cpu = (ProfileTimes(_profile(launch_seconds=1e-3, kind=kind)) for kind in ("cuda", "cpu"))
    assert (gpu.launch_seconds, cpu.launch_seconds) == (1e-3, 0.0)
    for record in step.operators:
        more = cpu.seconds(record, step.storages) - gpu.seconds(record, step.storages)
        assert more == pytest.approx(0.0 if record.kind == "metadata" else 1e-3)


def test_a_product_takes_the_longer_one_of_its_operations_and_its_bytes():
    profile = _profile()
    large, storages = _product(4096, 4096, 4096)
    assert ProfileTimes(profile).seconds(large, storages) == flops_of(large) / profile.gemm_flops["fp32"]
    thin, storages = _product(1_000_000, 2, 2)
    assert ProfileTimes(profile).seconds(thin, storages) == bytes_of(thin, storages) / profile.stream_bytes


def test_float32_goes_at_the_rate_of_tf32_where_torch_is_told_so():
    record, storages = _product(4096, 4096, 4096)
    ampere = sheet_of("NVIDIA A100-SXM4-40GB").as_profile()
    plain, rounded = (ProfileTimes(ampere, tf32=on).seconds(record, storages) for on in (False, True))
    assert plain / rounded == pytest.approx(ampere.gemm_flops["tf32"] / ampere.gemm_flops["fp32"])


def test_a_format_that_the_device_lacks_is_counted_as_another_one_and_named():
    record, storages = _product(4096, 4096, 4096, "bfloat16")
    profile = _profile()  # a V100 has fp16, not bf16
    times = ProfileTimes(profile)
    assert times.seconds(record, storages) == flops_of(record) / profile.gemm_flops["fp32"]
    assert times.fallbacks == {"bf16": f"{profile.name} has no rate of products in bf16: counted as fp32"}
    only_fp32 = ProfileTimes(_profile(gemm_flops={"fp32": 1e12}))
    double, storages = _product(4096, 4096, 4096, "float64")
    assert only_fp32.seconds(double, storages) == pytest.approx(flops_of(double) / 5e11)
    assert "2 times as long" in only_fp32.fallbacks["fp64"]


def test_rows_come_from_the_cache_as_far_as_it_holds_their_source():
    step = _step("gcn")
    record = next(r for r in step.operators if r.kind == "spmm" and r.phase == "forward")
    source = 4 * 130_000 * record.sizes["width"]
    gathered = 4 * 1_000_000 * record.sizes["width"]
    rest = (bytes_of(record, step.storages) - gathered) / _profile().stream_bytes
    for cache, share in ((2 * source, 1.0), (source, 1.0), (source // 2, 0.5), (1, 1 / source)):
        profile = _profile(cache_bytes=cache)
        per_byte = share / profile.cached_gather_bytes + (1 - share) / profile.gather_bytes
        assert ProfileTimes(profile).seconds(record, step.storages) == pytest.approx(gathered * per_byte + rest)


def test_sparse_features_cost_what_is_stored_of_them():
    """Of 500 columns: 2 stored values take less than 20, and those far less than the dense product."""

    def seconds(stored: int | None) -> float:
        model = GNN("gcn", 500, 5, layers=2, hidden=16)
        step = trace_graph_step(model, in_features=500, num_classes=5, stored_features=stored).at(PART)
        kinds = ("product", "sparse_product")
        first = next(record for record in step.operators if record.kind in kinds)
        (gradient,) = (r for r in step.operators if r.kind in kinds and r.phase == "backward" and r.name == first.name)
        assert flops_of(first) == flops_of(gradient) == 2 * PART.inner * 16 * (stored or 500)
        return sum(ProfileTimes(_profile()).seconds(record, step.storages) for record in (first, gradient))

    assert 5 * seconds(2) < seconds(20) < 0.5 * seconds(None)


def test_more_of_anything_never_takes_less():
    trace = trace_graph_step(GNN("gat", 20, 5, layers=2, hidden=16), in_features=20, num_classes=5)
    times = ProfileTimes(_profile())

    def total(sizes: PartSizes) -> float:
        step = trace.at(sizes)
        return sum(times.seconds(record, step.storages) for record in step.operators)

    base = {"inner": 1000, "halo": 300, "edges": 9000, "train": 500, "sent": 200}
    for name, value in base.items():
        assert total(PartSizes(**base)) < total(PartSizes(**{**base, name: 2 * value})), name
