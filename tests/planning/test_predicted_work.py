"""Predictions of single devices: quick sums are the ones they stand for; memory is the peak of the trace."""

from __future__ import annotations

import gc
import math
import pickle
import random

import numpy as np
import pytest
import torch

from nugnn.kernels import sparse_rows
from nugnn.kernels.spmm import sums
from nugnn.models import GNN
from nugnn.planning.cluster import Cluster, ClusterDevice
from nugnn.planning.datasheet import sheet_of
from nugnn.planning.links import Links
from nugnn.planning.operator_times import ProfileTimes
from nugnn.planning.part_memory import KeptStructure, PeakTable
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_loop import partition_to_fit
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.predictor import overlap_of, predictor_for
from nugnn.planning.seconds_table import _EDGES, SecondsTable
from nugnn.planning.shares import plan_shares
from nugnn.planning.trace import TraceError
from nugnn.planning.work_model import PackedWork
from nugnn.traced_step import graph_trainer, run_steps, trace_graph_step
from step_traces import CLASSES, IN, LinearTimes, graph_trace, sample_trace, times_of_all

SLOW, FAST = (ProfileTimes(sheet_of(name).as_profile()) for name in ("Tesla T4", "NVIDIA A100-SXM4-40GB"))


def _some_sizes(count: int) -> list[PartSizes]:
    draw = random.Random(0)
    found = []
    for _ in range(count):
        inner = round(10 ** draw.uniform(2, 7))
        halo, train, sent = (round(inner * draw.random()) for _ in range(3))
        found.append(PartSizes(inner=inner, halo=halo, edges=inner * draw.randint(2, 60), train=train, sent=sent))
    return found


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_quick_seconds_are_those_of_the_scaled_trace(name):
    trace = graph_trace(name)
    linear = LinearTimes(1e-9, 1e-6)
    exact, near = SecondsTable(trace, linear), SecondsTable(trace, SLOW)
    for sizes in _some_sizes(12):
        step = trace.at(sizes)
        assert exact.seconds(sizes).sum() == pytest.approx(times_of_all(step, linear), rel=1e-12)
        each = [SLOW.seconds(record, step.storages) for record in step.operators]
        assert near.seconds(sizes).sum() == pytest.approx(sum(each), rel=1e-3)
    corner = [_EDGES[place] for place in (150, 120, 175, 110, 115)]
    sizes = PartSizes(**dict(zip(("inner", "halo", "edges", "train", "sent"), corner, strict=True)))
    step = trace.at(sizes)
    each = [SLOW.seconds(record, step.storages) for record in step.operators]
    assert near.seconds(sizes) == pytest.approx(each, rel=1e-12)


@pytest.mark.parametrize("trace", [graph_trace, sample_trace], ids=["graph", "samples"])
def test_quick_bytes_are_the_peak_of_the_scaled_trace(trace):
    known = [trace()] if trace is sample_trace else [trace(name) for name in ("gcn", "sage", "gat")]
    for each in known:
        table = PeakTable(each)
        for sizes in _some_sizes(6) if each.family == "graph" else [PartSizes(batch=b) for b in (1, 7, 512, 100_000)]:
            assert table.bytes(sizes) == each.peak_bytes(sizes)


def test_a_device_alone_takes_the_sum_of_its_operators():
    sizes, trace, times = PartSizes(inner=5000, edges=40_000, train=300), graph_trace("gcn", ranks=1), LinearTimes(1e-9)
    alone = PredictedWork([DeviceWork(trace, times)])
    assert alone.num_devices == 1
    assert alone.seconds(0, sizes) == pytest.approx(times_of_all(trace.at(sizes), times))


def test_exchanges_come_on_top_and_run_beside_sums_where_they_are_told_to():
    sizes, trace, times = _some_sizes(1)[0], graph_trace("gcn"), LinearTimes(1e-9)
    operators = times_of_all(trace.at(sizes), times)

    def predicted(rate: float, **how: object) -> float:
        links = Links.equal(2, rate)
        return PredictedWork([DeviceWork(trace, times)] * 2, links, **how).seconds(0, sizes)

    assert predicted(math.inf) == pytest.approx(operators)
    widths = [record.sizes for record in trace.operators if record.attrs.get("what") == "halo"]
    rows = max(sizes.halo, sizes.sent)
    sums_bytes = 4 * sum(p for r in trace.operators if r.attrs.get("what") == "all_reduce" for p in [r.sizes["sent"]])
    wire = (sum(size["row_bytes"] for size in widths) * rows + sums_bytes + 8) / 1e9
    assert predicted(1e9) == pytest.approx(operators + wire)
    for rate in (1e8, 1e9, 1e10, 1e11):
        none, backward, both = (predicted(rate, overlap=overlap) for overlap in ("none", "backward", "both"))
        assert none >= backward - 1e-12 >= both - 2e-12
        assert both >= operators
    assert predicted(1e9, overlap="both") < predicted(1e9)


def test_where_work_is_small_a_gpu_takes_the_launches_of_its_host():
    sizes, trace = PartSizes(inner=10, edges=30, train=5), graph_trace("gcn", ranks=1)
    last = 1e-9
    plain, captured = (
        PredictedWork([DeviceWork(trace, LinearTimes(0.0, last, 1e-5), is_captured=on)]).seconds(0, sizes)
        for on in (False, True)
    )
    running = [record for record in trace.operators if record.kind != "metadata"]
    assert plain == pytest.approx(sum(record.launches for record in running) * 1e-5, abs=2 * last)
    assert captured == pytest.approx((1 + running[-1].launches) * 1e-5, rel=1e-3)


@pytest.mark.parametrize("device_seconds", [0.0, 3e-6, 1e-5, 1e-3])
def test_a_queue_of_launches_is_followed_operator_by_operator(device_seconds):
    sizes, trace = PartSizes(inner=1000, edges=9000, train=50), graph_trace("gat", ranks=1)
    times = LinearTimes(1e-10, device_seconds, 1e-5)
    step, host, device = trace.at(sizes), 0.0, 0.0
    for record in step.operators:
        for _ in range(record.launches if record.kind != "metadata" else 0):
            host += 1e-5
            device = max(device, host) + times.seconds(record, step.storages) / record.launches
    assert PredictedWork([DeviceWork(trace, times)]).seconds(0, sizes) == pytest.approx(max(host, device))


def test_an_epoch_of_samples_has_many_steps():
    trace, sizes = sample_trace(ranks=1), PartSizes(batch=64)
    one, many = (PredictedWork([DeviceWork(trace, FAST)], steps_per_epoch=n).seconds(0, sizes) for n in (1, 25))
    assert many == pytest.approx(25 * one)


def test_shares_of_a_fast_and_a_slow_device_end_together():
    trace = graph_trace("sage")
    work = PredictedWork([DeviceWork(trace, FAST), DeviceWork(trace, SLOW)], Links.equal(2, 1e10, 1e-5))
    whole = PartSizes(inner=2_000_000, edges=50_000_000, train=1_000_000)
    plan = plan_shares(work, whole, [math.inf] * 2, halo_fraction=0.02)
    assert plan.shares[0] > 2 * plan.shares[1]
    assert plan.seconds[0] == pytest.approx(plan.seconds[1], rel=0.02)


def test_a_rank_for_which_rows_that_travel_are_dearer_gets_fewer_nodes_and_fewer_of_such_rows():
    ids = np.arange(40 * 40).reshape(40, 40)
    one = np.concatenate([ids[:, :-1].ravel(), ids[:-1].ravel()])
    other = np.concatenate([ids[:, 1:].ravel(), ids[1:].ravel()])
    src, dst = np.concatenate([one, other]), np.concatenate([other, one])
    trace, times = graph_trace("gcn"), LinearTimes(1e-9)

    def parts(*rates: float) -> tuple[PartSizes, ...]:
        links = Links(np.array([[np.inf, rates[0]], [rates[1], np.inf]]), np.zeros((2, 2)), (0, 0), {})
        work = PredictedWork([DeviceWork(trace, times)] * 2, links)
        fitted = partition_to_fit(len(ids.ravel()), src, dst, work, [math.inf] * 2, train_nodes=ids[::7].ravel())
        # each as long as the other one, by the model that knows the dearer row
        assert fitted.seconds[0] == pytest.approx(fitted.seconds[1], rel=0.1)
        return fitted.sizes

    equal, unequal = parts(1e8, 1e8), parts(1e8, 1e7)
    assert abs(equal[1].inner - equal[0].inner) < 0.1 * len(ids.ravel())
    assert unequal[1].inner < 0.8 * unequal[0].inner and unequal[1].inner < 0.9 * equal[1].inner
    assert unequal[1].halo + unequal[1].sent <= equal[1].halo + equal[1].sent


def test_computing_is_all_but_what_exchanges_take_and_a_copy_says_the_same():
    trace, sizes = graph_trace("sage"), _some_sizes(1)[0]
    for is_nccl in (False, True):
        links = Links(np.array([[np.inf, 1e8], [1e7, np.inf]]), np.full((2, 2), 1e-3), (0, 0), {}, is_nccl=is_nccl)
        work = PredictedWork([DeviceWork(trace, FAST), DeviceWork(trace, SLOW)], links, steps_per_epoch=3)
        for rank, times in enumerate((FAST, SLOW)):
            alone = sum(times.seconds(record, trace.at(sizes).storages) for record in trace.at(sizes).operators)
            assert work.computing().seconds(rank, sizes) == pytest.approx(3 * alone, rel=0.05)
            assert work.seconds(rank, sizes) > work.computing().seconds(rank, sizes)
        copied = pickle.loads(pickle.dumps(work))
        assert [copied.seconds(rank, sizes) for rank in range(2)] == [work.seconds(rank, sizes) for rank in range(2)]
        assert copied.among([1, 0]).seconds(0, sizes) == pytest.approx(work.seconds(1, sizes))
        assert copied.memory(1, sizes) == work.memory(1, sizes)
        packed = pickle.loads(pickle.dumps(PackedWork.of(work)))
        assert (packed.seconds(1, sizes), packed.bytes(1, sizes)) == (work.seconds(1, sizes), work.bytes(1, sizes))


def test_memory_is_told_by_what_it_is_for():
    trace, sizes = graph_trace("gcn"), _some_sizes(1)[0]
    work = PredictedWork([DeviceWork(trace, FAST, runtime_bytes=10**9)] * 2, Links.equal(2, 1e10))
    memory = work.memory(1, sizes)
    assert memory["step"] == trace.peak_bytes(sizes)
    assert memory["runtime"] == 10**9
    assert work.bytes(1, sizes) == sum(memory.values())


def test_the_structure_that_sums_keep_on_a_cpu_is_counted_to_the_byte():
    sizes = PartSizes(inner=20_000, halo=5000, edges=1_800_000, train=1000, sent=4000)  # enough for our own sums
    model = GNN("gcn", IN, CLASSES, layers=2, hidden=16)
    trainer = graph_trainer(model, sizes, in_features=IN, num_classes=CLASSES)
    run_steps(trainer, 1)
    structure = trainer.family.graph.index.structure
    kept = [lists for key, lists in sums._lists[structure].items() if key[0]]
    assert kept
    made = sum(lists.indptr.nbytes + lists.indices.nbytes for lists in kept)
    plan_bytes = 8 * sizes.sent + 3 * 8 * sizes.inner
    hidden = KeptStructure(graph_trace("gcn").model_copy(update={"operators": _of_width(16)}))
    assert hidden.bytes(sizes) == made + plan_bytes


def test_what_is_kept_of_sparse_features_is_counted_to_the_byte(monkeypatch):
    monkeypatch.setattr(sparse_rows._transposes, "_items", {})
    sizes = PartSizes(inner=500, halo=50, edges=4000, train=100, sent=40)
    model = GNN("sage", IN, CLASSES, layers=2, hidden=16)
    how = {"in_features": IN, "num_classes": CLASSES}
    trainer = graph_trainer(model, sizes, **how, stored_features=4)
    run_steps(trainer, 1)
    features = trainer.family.graph.ndata["feat"]
    assert len(sparse_rows._transposes) == 1  # both of the layer's products are of the same
    kept = sparse_rows._transposes.get(features.crow_indices(), features.col_indices(), IN)
    made = kept.indptr.nbytes + kept.rows.nbytes + kept.entries.nbytes
    traces = [trace_graph_step(model, **how, stored_features=stored) for stored in (4, None)]
    sparse, dense = (KeptStructure(trace).bytes(sizes) for trace in traces)
    assert sparse - dense == made
    assert KeptStructure(traces[0], device="cuda").bytes(sizes) > KeptStructure(traces[1], device="cuda").bytes(sizes)


def _of_width(width: int) -> tuple:
    """Sums of that width alone: narrower ones of the last layer are DGL's at these sizes."""
    return tuple(record for record in graph_trace("gcn").operators if record.sizes.get("width") == width)


def test_a_gpu_keeps_edges_by_source_and_rows_in_lockstep():
    trace = graph_trace("gcn").model_copy(update={"device": "cuda"})
    sizes = PartSizes(inner=1000, halo=300, edges=25_600, train=100, sent=200)
    transposed = 8 * 1301 + 4 * 25_600
    groups = 4 * 2 * ((25_600 + 8 * 1000) // 256 + 1) + 4 * 2 * ((25_600 + 8 * 1300) // 256 + 1)
    assert KeptStructure(trace).bytes(sizes) == transposed + 4 * 1000 + 4 * 1300 + groups + 8 * 200 + 24 * 1000
    on_paper = DeviceWork(graph_trace("gcn"), FAST, kind="cuda")
    assert PredictedWork([on_paper] * 2, Links.equal(2, 1e9)).memory(0, sizes)["structure"] == KeptStructure(
        trace
    ).bytes(sizes)
    assert KeptStructure(trace, "both").bytes(sizes) > KeptStructure(trace, "some").bytes(sizes)
    assert KeptStructure(trace, "some").bytes(sizes) > KeptStructure(trace).bytes(sizes)
    assert KeptStructure(sample_trace()).bytes(PartSizes(batch=10)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_memory_of_a_gpu_is_what_its_allocator_gave_out(kind):
    sizes = PartSizes(inner=200_000, halo=50_000, edges=4_000_000, train=50_000, sent=40_000)
    model = GNN(kind, 100, CLASSES, layers=3, hidden=64)
    how = {"in_features": 100, "num_classes": CLASSES, "device": "cuda"}
    trace = trace_graph_step(model, **how)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # they count as the process', and a trainer may use another stream
    before = torch.cuda.memory_allocated()
    trainer = graph_trainer(model, sizes, **how)
    run_steps(trainer, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run_steps(trainer, 1)
    torch.cuda.synchronize()
    memory = PredictedWork([DeviceWork(trace, FAST)] * 2, Links.equal(2, 1e10)).memory(0, sizes)
    used = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    used -= held - torch.cuda.memory_allocated()
    assert memory["step"] + memory["structure"] == pytest.approx(used, rel=0.05)


def test_sizes_and_links_that_do_not_fit_are_refused():
    trace = graph_trace("gcn", ranks=1)
    work = PredictedWork([DeviceWork(trace, FAST)])
    with pytest.raises(TraceError, match="recorded on one device, and the sizes have 3 halo rows"):
        work.seconds(0, PartSizes(inner=10, halo=3, edges=20))
    with pytest.raises(TraceError, match="these have batch alone"):
        work.bytes(0, PartSizes(batch=10))
    with pytest.raises(ValueError, match="2 devices, and links between 3 ranks"):
        PredictedWork([DeviceWork(trace, FAST)] * 2, Links.equal(3, 1e9))
    with pytest.raises(ValueError, match="must be none, backward, some or both"):
        PredictedWork([DeviceWork(trace, FAST)], overlap="sometimes")  # type: ignore[arg-type]


def test_tables_are_shared_between_devices_that_make_the_same_step(monkeypatch):
    calls = []
    monkeypatch.setattr(SLOW, "seconds", lambda record, storages: calls.append(record) or 1e-6)
    work = PredictedWork([DeviceWork(graph_trace("gcn"), SLOW)] * 8, Links.equal(8, 1e9))
    sizes = _some_sizes(1)[0]
    work.seconds(0, sizes)
    so_far = len(calls)
    for part in range(8):
        work.seconds(part, sizes)
    assert len(calls) == so_far > 0
    assert torch.is_grad_enabled()


def test_a_cpu_s_trace_stands_for_a_gpu_of_a_cluster_in_memory_and_passes():
    trace = graph_trace("gcn")
    device = ClusterDevice(host="one", profile=sheet_of("Tesla T4").as_profile())
    links = Links.equal(2, 1e9, is_nccl=True)
    model = predictor_for({"cpu": trace}, Cluster(devices=(device, device), links=links), overlap="on")
    gpu = DeviceWork(trace, model.devices[0].times, kind="cuda")
    sizes = PartSizes(inner=1000, halo=300, edges=50_000, train=100, sent=250)
    assert model.work.memory(0, sizes) == PredictedWork([gpu, gpu], links, overlap="some").memory(0, sizes)
    with pytest.raises(ValueError, match="must be auto, on, backward or off"):
        overlap_of("none", links)


def test_no_operator_is_asked_for_twice_where_only_overlap_differs():
    class Counting(LinearTimes):
        asked = 0

        def seconds(self, record, storages):
            self.asked += 1
            return super().seconds(record, storages)

    times, sizes = Counting(1e-9), PartSizes(inner=1000, halo=300, edges=50_000, train=100, sent=250)
    work = PredictedWork([DeviceWork(graph_trace("gcn"), times)] * 2, Links.equal(2, 1e9), overlap="backward")
    work.seconds(0, sizes)
    asked = times.asked
    other = work.among([0, 1], "both").seconds(1, sizes)
    assert times.asked == asked > 0
    fresh = PredictedWork([DeviceWork(graph_trace("gcn"), times)] * 2, Links.equal(2, 1e9), overlap="both")
    assert other == fresh.seconds(1, sizes)
