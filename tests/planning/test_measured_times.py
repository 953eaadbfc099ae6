"""Tables of times: what was measured comes back, what was not is answered by the nearest, files are checked."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nugnn.models import GNN
from nugnn.networks import CNN, MLP, TransformerClassifier
from nugnn.planning.casts import CAST
from nugnn.planning.links import Links
from nugnn.planning.lone_step import alone_seconds
from nugnn.planning.measure_casts import measure_casts
from nugnn.planning.measured_peaks import MeasuredPeaks
from nugnn.planning.measured_times import MeasuredTimes, TimesError, read_times
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.replay import replay, replay_parts
from nugnn.planning.step_laps import StepLaps, seconds_of_records, watching_seconds
from nugnn.planning.time_curves import Amount
from nugnn.planning.timed_operators import TimedOperator, amount_of, is_large_sum
from nugnn.planning.times_of_steps import growth_moved, times_of, whole_over_sum
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import OperatorRecord, TensorRecord, TraceError
from nugnn.traced_step import trace_graph_step, trace_sample_step

IN, CLASSES, HIDDEN = 20, 5, 16
CPU = torch.device("cpu")
PARTS = [
    PartSizes(inner=n, halo=n // 4, edges=n * degree, train=n // 3, sent=n // 5)
    for n, degree in ((503, 7), (1009, 7), (1009, 3), (2003, 7))
]
BATCHES = [PartSizes(batch=n) for n in (7, 31, 64)]


def _gnn(kind: str, hidden: int = HIDDEN) -> nn.Module:
    torch.manual_seed(0)
    return GNN(kind, IN, CLASSES, layers=2, hidden=hidden, norm="layer" if kind == "sage" else "none")


@functools.cache
def _of_graph(kind: str, hidden: int = HIDDEN, precision: str = "fp32") -> StepTrace:
    return trace_graph_step(_gnn(kind, hidden), in_features=IN, num_classes=CLASSES, precision=precision)


@functools.cache
def _of_samples(kind: str) -> StepTrace:
    models: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "mlp": (MLP(30, CLASSES, hidden=24, norm="batch"), torch.zeros(30)),
        "cnn": (CNN(3, CLASSES, widths=(8, 16)), torch.zeros(3, 10, 10)),
        "transformer": (
            TransformerClassifier(50, CLASSES, width=24, layers=1, max_length=12),
            torch.full((12,), 49),
        ),
    }
    model, sample = models[kind]
    return trace_sample_step(model, [sample], num_classes=CLASSES)


TRACES = [*(("graph", kind) for kind in ("gcn", "sage", "gat", "gin")), *(("samples", k) for k in ("mlp", "cnn"))]
TRACES += [("samples", "transformer")]


def _trace(family: str, kind: str) -> tuple[StepTrace, list[PartSizes]]:
    return (_of_graph(kind), PARTS) if family == "graph" else (_of_samples(kind), BATCHES)


def _seconds(at: StepTrace, per_unit: float = 1e-9, fixed: float = 1e-6) -> list[float]:
    """A device on which seconds are straight in the work, twice as much in attention and products."""
    taken = []
    for record in at.operators:
        amount = amount_of(record, at.storages)
        taken.append(0.0 if record.kind == "metadata" else fixed + per_unit * (amount.edges + amount.rest))
    return taken


def _laps(at: StepTrace, laps: list[float]) -> StepLaps:
    """Three steps without noise."""
    whole = sum(laps)
    return StepLaps(tuple(o.op for o in at.operators), (tuple(laps),) * 3, (whole,) * 3, (whole,) * 3)


def _table(trace: StepTrace, sizes: list[PartSizes], **how: float) -> MeasuredTimes:
    steps = [trace.at(each) for each in sizes]
    found = [(each, _laps(at, _seconds(at, **how))) for each, at in zip(sizes, steps, strict=True)]
    return times_of(trace, found, CPU)


# -- what was measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), TRACES)
def test_every_operator_of_built_in_models_has_a_time_of_its_own(family, kind):
    trace, sizes = _trace(family, kind)
    times = _table(trace, sizes)
    for each in (*sizes, _half_way(sizes)):
        at = trace.at(each)
        assert times.fallbacks(at) == {}
        for record in at.operators:
            assert (times.seconds(record, at.storages) > 0) is (record.kind != "metadata")


@pytest.mark.parametrize(("family", "kind"), TRACES)
def test_a_device_that_is_straight_is_predicted_exactly_at_other_sizes(family, kind):
    trace, sizes = _trace(family, kind)
    times = _table(trace, sizes)
    in_proportion = _table(trace, sizes, fixed=0.0)
    for table, fixed, each in ((times, 1e-6, _half_way(sizes)), (in_proportion, 0.0, _half_way(sizes, 3.0))):
        at = trace.at(each)
        exact = _seconds(at, fixed=fixed)
        for record, seconds in zip(at.operators, exact, strict=True):
            assert table.seconds(record, at.storages) == pytest.approx(seconds, rel=1e-6)
        assert alone_seconds(at, table) == pytest.approx(sum(exact), rel=1e-6)
    for each in sizes:
        assert alone_seconds(trace.at(each), times) == pytest.approx(sum(_seconds(trace.at(each))), rel=1e-6)


def _half_way(sizes: list[PartSizes], factor: float = 0.6) -> PartSizes:
    last = sizes[-1]
    return PartSizes(**{key: int(factor * n) for key, n in dataclasses.asdict(last).items()})


def test_formats_have_times_of_their_own():
    times = _table(_of_graph("gcn"), PARTS)
    half = _table(_of_graph("gcn", precision="bf16"), PARTS, per_unit=3e-9)
    both = times.joined([half])
    for trace, alone in ((_of_graph("gcn"), times), (_of_graph("gcn", precision="bf16"), half)):
        at = trace.at(PARTS[2])
        products = [o for o in at.operators if o.kind == "product"]
        assert len(products) >= 4
        for record in products:
            assert both.seconds(record, at.storages) == alone.seconds(record, at.storages)


# -- what was not ------------------------------------------------------------------------------------------------------


def test_other_widths_are_answered_by_the_nearest_and_said():
    times = _table(_of_graph("gcn"), PARTS)
    at = _of_graph("gcn", hidden=12).at(PARTS[1])
    reasons = times.fallbacks(at)
    assert set(reasons) >= {"aten.mm (product, float32) was measured in other shapes"}
    assert all(reason.endswith("was measured in other shapes") for reason in reasons)
    for record, seconds in zip(at.operators, _seconds(at), strict=True):  # by what there is to do
        if record.kind in ("product", "spmm", "elementwise"):
            assert times.seconds(record, at.storages) == pytest.approx(seconds, rel=0.05)


def test_other_formats_and_kinds_are_answered_and_said():
    times = _table(_of_graph("gcn"), PARTS)
    at = _of_graph("gat", precision="bf16").at(PARTS[1])
    reasons = "\n".join(times.fallbacks(at))
    assert "aten.mm (product, bfloat16) was not measured: as aten.mm, of the same kind, in float32" in reasons
    assert "edge_softmax (edge_softmax, bfloat16) nothing of its kind was measured: as aten._log_softmax" in reasons
    assert all(times.seconds(o, at.storages) > 0 for o in at.operators if o.kind != "metadata")
    assert times.fallbacks(_of_graph("gcn").at(PARTS[1])) == {}


def test_large_sums_of_a_cpu_are_answered_by_small_ones_of_their_width_where_no_large_one_was_measured():
    trace = _of_graph("gin", hidden=64)
    sizes = [*PARTS, PartSizes(inner=20_000, halo=4000, edges=200_000, train=2000, sent=4000)]
    large = [o for o in trace.at(sizes[-1]).operators if is_large_sum(o)]
    assert {o.sizes["width"] for o in large} == {64} and {o.kind for o in large} == {"spmm"}
    small, both = _table(trace, PARTS), _table(trace, sizes)
    at = trace.at(sizes[-1])
    assert set(small.fallbacks(at).values()) == {1}
    assert set(small.fallbacks(at)) == {
        f"{o.op} (spmm, float32) was not measured: as {o.op}, of the same kind" for o in large
    }
    assert both.fallbacks(at) == {}
    for record in large:
        exact = _seconds(at)[at.operators.index(record)]
        assert both.seconds(record, at.storages) == pytest.approx(exact)
        assert small.seconds(record, at.storages) == pytest.approx(exact, rel=0.01)  # its device is straight


def test_casts_are_answered_by_both_types_and_grow():
    casts = measure_casts(CPU, seconds=0.05, most_values=1 << 17)
    assert {(c.inputs[0].dtype, c.outputs[0].dtype) for c in casts} == {
        (a, b) for a in ("float32", "bfloat16", "float16") for b in ("float32", "bfloat16", "float16") if a != b
    }
    times = _table(_of_graph("gcn"), PARTS).with_operators(casts)
    few, many = (times.cast_seconds(n, "float32", "bfloat16") for n in (1000, 1_000_000_000))
    assert 0 < few < many
    some = [c for c in casts if (c.inputs[0].dtype, c.outputs[0].dtype) == ("float32", "float16")]
    assert [[p.rest for p in cast.points] for cast in some] == 4 * [[6 << 12, 6 << 17]]  # of one to four axes
    images = {"shape": (32, 4, 8, 128), "storage": -1}
    one, other = (TensorRecord(dtype=dtype, **images) for dtype in ("float32", "bfloat16"))
    record = OperatorRecord(name="", op=CAST, kind="copy", phase="forward", inputs=(one,), outputs=(other,))
    found = times.lookup(record, ())
    assert found.fallback is None and found.seconds == pytest.approx(times.cast_seconds(1 << 17, "float32", "bfloat16"))


def test_an_entry_far_from_where_it_was_measured_gives_way_to_one_of_fewer_fixed_dimensions():
    def cast(columns: int | None, points: list[tuple[int, float]]) -> TimedOperator:
        one, other = (({"dtype": dtype, "shape": (None, columns)},) for dtype in ("float32", "bfloat16"))
        timed = [{"rest": rest, "seconds": seconds} for rest, seconds in points]
        return TimedOperator(kind="copy", op=CAST, inputs=one, outputs=other, points=timed)

    def seconds(rows: int, operators: list[TimedOperator]) -> float:
        one, other = (TensorRecord(storage=-1, shape=(rows, 32), dtype=dtype) for dtype in ("float32", "bfloat16"))
        record = OperatorRecord(name="", op=CAST, kind="copy", phase="forward", inputs=(one,), outputs=(other,))
        return _table(_of_graph("gcn"), PARTS).with_operators(operators).seconds(record, ())

    narrow, wide = (
        cast(32, [(6 * 32 * 8, 1.0), (6 * 32 * 16, 2.0)]),
        cast(None, [(6 * 32 * 16, 0.25), (6 * 32 * 4096, 64.0)]),
    )
    assert seconds(16, [narrow, wide]) == 2.0
    assert seconds(64, [narrow, wide]) == 8.0  # four times as much
    assert seconds(65, [narrow, wide]) < 2.0
    assert seconds(4096, [narrow, wide]) == 64.0
    assert seconds(4096, [narrow]) > 100.0  # nothing else was measured


# -- from laps to records ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_without_what_watching_takes_laps_add_up_to_the_step(laps, share):
    whole = share * sum(laps)
    watching = watching_seconds(laps, whole)
    assert sum(max(lap - watching, 0.0) for lap in laps) == pytest.approx(whole, rel=1e-6)
    assert watching_seconds(laps, 2 * sum(laps)) == 0


def test_a_step_s_seconds_are_those_of_its_records_and_metadata_has_none():
    at = _of_graph("gat").at(PARTS[0])
    laps = [1e-6 * (number + 1) for number in range(len(at.operators))]
    names = [o.op for o in at.operators]
    seconds = seconds_of_records(at, names, laps)
    assert sum(seconds) == pytest.approx(sum(laps))
    assert all(s == 0 for s, o in zip(seconds, at.operators, strict=True) if o.kind == "metadata")
    assert all(s > 0 for s, o in zip(seconds, at.operators, strict=True) if o.kind != "metadata")


def test_operators_that_run_in_place_of_others_give_them_their_time():
    at = _of_graph("gat").at(PARTS[0])
    names = [o.op for o in at.operators]
    first = names.index("dgl.spmm")
    assert names[first : first + 2] == ["dgl.spmm", "dgl.sddmm"]
    other = [*names[:first], "_VectorSum.backward", *names[first + 2 :]]
    laps = [1e-6] * len(other)
    laps[first] = 1e-3
    seconds = seconds_of_records(at, other, laps)
    assert sum(seconds) == pytest.approx(sum(laps))
    assert seconds[first] + seconds[first + 1] >= 1e-3 and min(seconds[first : first + 2]) > 1e-4
    with pytest.raises(TraceError, match=r"has other operators than the trace: .* alike; trace the model"):
        seconds_of_records(at, names[::-1], [1e-6] * len(names))


@given(st.data())
def test_what_constant_operators_take_longer_stays_within_its_step(data):
    num_records = data.draw(st.integers(1, 6))
    constant = data.draw(st.lists(st.booleans(), min_size=num_records, max_size=num_records))
    amounts = [[Amount(0.0, 1.0 if c else 1.0 + size) for c in constant] for size in range(3)]
    seconds = [data.draw(st.lists(st.floats(0, 1), min_size=num_records, max_size=num_records)) for _ in range(3)]
    before = [sum(each) for each in seconds]
    growth_moved(amounts, seconds)
    assert [sum(each) for each in seconds] == pytest.approx(before)
    if not all(constant):
        for i in range(num_records):
            assert not constant[i] or len({each[i] for each in seconds}) == 1
    assert min(min(each) for each in seconds) >= 0


def test_sums_of_operators_follow_the_step_beyond_their_noise_alone():
    def laps(seconds, inside):
        return StepLaps(("a",), tuple((x,) for x in inside), tuple(seconds), tuple(seconds))

    steady, wide = [1.0, 1.001, 0.999, 1.0, 1.0], [0.6, 0.8, 1.0, 1.25, 1.5]
    assert whole_over_sum(laps(steady, steady), 1.25) == pytest.approx(0.8, rel=1e-3)
    assert whole_over_sum(laps(wide, wide), 1.05) == 1.0
    assert 0.8 < whole_over_sum(laps(wide, steady), 1.5) < 1.0


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_a_gpu_s_operators_follow_a_step_only_where_the_host_is_ahead_of_it(slower):
    """Elsewhere a step is as long as its host, which needs now more and now less, and says nothing of operators."""
    trace = _of_samples("mlp").model_copy(update={"device": "cuda"})
    sizes = [PartSizes(batch=n) for n in (8, 32, 128)]
    steps = [trace.at(each) for each in sizes]
    inside = [_seconds(at) for at in steps]
    busy = [sum(laps) for laps in inside]
    hosts = [1.2 * busy[1] * noise for noise in (1.0, 1.3, 1.3, 1.3, 1.4)]
    assert busy[1] < min(hosts) and max(hosts) < busy[2]
    found = []
    for each, at, laps, total in zip(sizes, steps, inside, busy, strict=True):
        whole = tuple(max(host, slower * total) for host in hosts)
        names = tuple(o.op for o in at.operators)
        found.append((each, StepLaps(names, (tuple(laps),) * 5, whole, tuple(hosts))))
    times = times_of(trace, found, CPU)
    predicted = [alone_seconds(at, times, is_captured=True) for at in steps]
    assert predicted == pytest.approx([busy[0], busy[1], slower * busy[2]])


def test_a_host_that_was_disturbed_at_one_place_says_nothing_of_its_operators():
    trace = _of_samples("mlp").model_copy(update={"device": "cuda"})
    sizes = [PartSizes(batch=n) for n in (8, 512)]
    found = []
    for each, part in zip(sizes, (0.4, 1.3), strict=True):
        at = trace.at(each)
        laps = _seconds(at)
        host = part * sum(laps)
        whole = max(host, sum(laps))
        found.append((each, StepLaps(tuple(o.op for o in at.operators), (tuple(laps),) * 5, (whole,) * 5, (host,) * 5)))
    large = trace.at(sizes[1])
    assert alone_seconds(large, times_of(trace, found, CPU), is_captured=True) == pytest.approx(sum(_seconds(large)))


def test_what_the_host_does_for_a_captured_step_is_what_was_measured():
    trace = _of_samples("mlp").model_copy(update={"device": "cuda"})
    steps = [trace.at(each) for each in BATCHES]
    found = [(each, _laps(at, _seconds(at))) for each, at in zip(BATCHES, steps, strict=True)]
    longest = max(sum(_seconds(at)) for at in steps)
    times = times_of(trace, found, CPU, captured_seconds=3 * longest)
    for at in steps:
        assert alone_seconds(at, times, is_captured=True) == pytest.approx(3 * longest)
        assert alone_seconds(at, times) == alone_seconds(at, times_of(trace, found, CPU))
    for batch, at in zip(BATCHES, steps, strict=True):
        # the host is one launch before the device from the first to the last
        work = PredictedWork([DeviceWork(trace, times, is_captured=True)])
        assert 3 * longest <= work.seconds(0, batch) <= 4 * longest
        assert replay_parts(work, [batch]).makespan == pytest.approx(work.seconds(0, batch))
        assert replay([at], [times], Links.alone(), captured=True).makespan == pytest.approx(work.seconds(0, batch))
    assert MeasuredTimes.model_validate_json(times.to_json()) == times


def test_peaks_that_were_measured_correct_what_a_trace_says():
    trace = _of_samples("mlp")
    steps = [trace.at(each) for each in BATCHES]
    found = [(each, _laps(at, _seconds(at))) for each, at in zip(BATCHES, steps, strict=True)]
    times = times_of(trace, found, CPU, peaks=[2 * at.peak_bytes() + 1000 for at in steps])
    assert MeasuredTimes.model_validate_json(times.to_json()) == times
    plain, corrected = (PredictedWork([DeviceWork(trace, times, peaks=peaks)]) for peaks in (None, times.peaks))
    for each, at in zip(BATCHES, steps, strict=True):
        assert plain.memory(0, each)["step"] == at.peak_bytes()
        assert corrected.memory(0, each)["step"] == 2 * at.peak_bytes() + 1000
    between = _half_way(BATCHES)
    assert corrected.memory(0, between)["step"] == pytest.approx(2 * plain.memory(0, between)["step"] + 1000, rel=1e-6)


_BYTES = st.integers(1, 10**12)


@given(st.lists(st.tuples(_BYTES, _BYTES), min_size=1, max_size=6), _BYTES)
def test_peaks_are_exact_where_they_were_measured_and_between_their_neighbours_elsewhere(pairs, predicted):
    peaks = MeasuredPeaks.of(pairs)
    most = {p: max(m for q, m in pairs if q == p) for p, _ in pairs}
    for p, measured in most.items():
        assert peaks.bytes(p) == measured
    below, above = [p for p in most if p <= predicted], [p for p in most if p >= predicted]
    if below and above:
        low, high = sorted((most[max(below)], most[min(above)]))
        assert low - 1 <= peaks.bytes(predicted) <= high + 1
    with pytest.raises(ValueError, match="must grow"):
        MeasuredPeaks(points=(*peaks.points, peaks.points[0]))


def test_a_gpu_s_step_is_as_long_as_the_slower_of_host_and_device():
    trace = _of_samples("mlp")
    at = trace.at(BATCHES[0])
    times = _table(trace, BATCHES)
    busy = alone_seconds(at, times)
    launched = sum(o.launches for o in at.operators if o.kind != "metadata")
    host_bound = times.model_copy(update={"kind": "cuda", "launch_seconds": busy})
    assert alone_seconds(at, host_bound) == pytest.approx(launched * busy)
    after = sum(o.launches for o in at.operators if o.kind == "optimizer")
    assert after > 1 and alone_seconds(at, host_bound, is_captured=True) == pytest.approx((1 + after) * busy)


# -- files -------------------------------------------------------------------------------------------------------------


@functools.cache
def _gcn_times() -> MeasuredTimes:
    return _table(_of_graph("gcn"), PARTS)


def test_a_table_is_read_as_it_was_written(tmp_path):
    times = _gcn_times()
    path = tmp_path / "times.json"
    path.write_text(times.to_json())
    assert read_times(path) == times
    at = _of_graph("gcn").at(PARTS[1])
    assert alone_seconds(at, read_times(path)) == alone_seconds(at, times) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "nugnn.times/2"}, "schema is 'nugnn.times/2', must be 'nugnn.times/1'"),
        ({"operators": []}, "operators is empty: give one operator at least"),
        ({"speed": 1}, "unknown field 'speed'; known: "),
        ({"launch_seconds": -1}, "launch_seconds is -1, must be 0 or more"),
        ({"kind": "tpu"}, "kind is 'tpu', must be 'cuda' or 'cpu'"),
        (
            {"operators": [{"kind": "copy", "op": "a", "points": []}]},
            "operators.0.points is empty: give one point at least",
        ),
        ({"operators": [{"kind": "magic", "op": "a", "points": [{"rest": 1, "seconds": 1}]}]}, "operators.0.kind"),
        (
            {"operators": [{"kind": "copy", "op": "a", "points": [{"rest": 1, "seconds": 1e999}]}]},
            "seconds is inf, must be finite",
        ),
        (
            {"operators": [{"kind": "copy", "op": "a", "points": [{"rest": "1", "seconds": 1}]}]},
            "rest is '1', must be a number",
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, change: dict[str, Any], message):
    path = tmp_path / "times.json"
    path.write_text(json.dumps(json.loads(_gcn_times().to_json()) | change))
    with pytest.raises(TimesError, match=message) as raised:
        read_times(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)
    with pytest.raises(TimesError, match="cannot be read"):
        read_times(tmp_path / "nothing.json")


def test_tables_of_a_device_are_kept_together(tmp_path):
    one, other = _gcn_times(), _table(_of_graph("gat"), PARTS)
    assert one.keep(tmp_path) == one
    both = other.keep(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == one.file_name() and read_times(path) == both
    for trace in (_of_graph("gcn"), _of_graph("gat")):
        assert both.fallbacks(trace.at(PARTS[0])) == {}
    path.write_text("{}")
    assert one.keep(tmp_path) == one == read_times(path)


def test_tables_of_two_devices_are_not_joined():
    times = _gcn_times()
    for update in ({"uuid": "GPU-1"}, {"limits": "sms=32"}, {"versions": {}}):
        other = times.model_copy(update=update)
        with pytest.raises(TimesError, match=rf"two devices cannot be joined: {next(iter(update))} is"):
            times.joined([other])
        if "versions" not in update:
            assert other.file_name() != times.file_name()


def test_a_joined_table_has_the_seconds_of_both():
    times = _gcn_times()
    slower = [
        each.model_copy(update={"points": tuple(p.model_copy(update={"seconds": 2 * p.seconds}) for p in each.points)})
        for each in times.operators
    ]
    twice = times.model_copy(update={"operators": tuple(slower)})
    at = _of_graph("gcn").at(PARTS[0])
    assert alone_seconds(at, times.joined([twice])) == pytest.approx(1.5 * alone_seconds(at, times))
