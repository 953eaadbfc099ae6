"""Traces of training steps: shapes scale, counts are exact, memory is what the allocator saw, and nothing changes."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from nugnn.comm.halo_wire import HaloWire
from nugnn.models import GNN, WithNodeEmbedding
from nugnn.networks import CNN, MLP, TransformerClassifier
from nugnn.planning.operator_costs import storage_bytes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.told_sizes import told
from nugnn.planning.trace import StepTrace, TraceError, read_trace
from nugnn.planning.trace_records import WorkspaceRecord
from nugnn.traced_step import (
    GRAPH_SIZES,
    graph_trainer,
    record_graph_step,
    record_sample_step,
    record_step,
    run_steps,
    sample_trainer,
    trace_graph_step,
    trace_sample_step,
)
from nugnn.trainer import Trainer

IN, CLASSES, HIDDEN = 20, 5, 16
PART = PartSizes(inner=1009, halo=401, edges=5003, train=307, sent=353)
WHOLE = PartSizes(inner=1009, edges=5003, train=307)
BATCH = PartSizes(batch=29)
GRAPHS: dict[str, dict[str, Any]] = {
    "gcn": {},
    "gcn, batch norm": {"norm": "batch", "residual": True},
    "sage": {},
    "sage, layer norm": {"norm": "layer", "activation": "elu", "input_dropout": 0.2},
    "sage, pool": {"aggregator": "pool"},
    "gat": {"heads": 3, "attention_dropout": 0.3},
    "gatv2": {"heads": 3},
    "gin": {},
    "gin, max": {"aggregator": "max"},
}


def _transformer(**options: Any) -> nn.Module:
    return TransformerClassifier(50, CLASSES, width=24, heads=4, layers=1, max_length=12, **options)


TOKENS = torch.full((12,), 49)
SAMPLES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (lambda: MLP(30, CLASSES, hidden=24, layers=3, norm="batch", dropout=0.3), torch.zeros(30)),
    "cnn": (lambda: CNN(3, CLASSES, widths=(8, 16)), torch.zeros(3, 10, 10)),
    "transformer": (_transformer, TOKENS),
    "transformer, no dropout": (lambda: _transformer(dropout=0.0, token_dropout=0.0, pooling="max"), TOKENS),
}


def _gnn(name: str, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return GNN(name.partition(",")[0], IN, CLASSES, layers=layers, hidden=HIDDEN, **GRAPHS[name])


@functools.cache
def _trace(name: str, ranks: int = 2, layers: int = 2) -> StepTrace:
    return trace_graph_step(_gnn(name, layers), in_features=IN, num_classes=CLASSES, ranks=ranks)


@functools.cache
def _of_samples(name: str, ranks: int = 1) -> tuple[nn.Module, StepTrace]:
    make, sample = SAMPLES[name]
    torch.manual_seed(0)
    model = make()
    return model, trace_sample_step(model, [sample], num_classes=CLASSES, ranks=ranks)


def _total(counts: dict[tuple[str, str], int], kind: str, phase: str) -> int:
    return counts.get((phase, kind), 0)


# -- 1: a trace at some sizes, scaled, is the trace at others ----------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_a_scaled_trace_of_a_part_is_the_one_recorded_there(name):
    recorded = record_graph_step(_gnn(name), PART, in_features=IN, num_classes=CLASSES)
    _assert_same(_trace(name).at(PART), recorded)


def test_sizes_of_the_other_family_are_refused():
    with pytest.raises(TraceError, match="the trace is of graph, whose sizes have inner; these have batch alone"):
        _trace("gcn").at(BATCH)
    with pytest.raises(TraceError, match="the trace is of samples, whose sizes have batch; these have inner alone"):
        _of_samples("mlp")[1].flops(WHOLE)


def test_more_rows_may_be_sent_than_there_are_nodes_where_several_read_them():
    sizes = PartSizes(inner=101, halo=40, edges=503, train=30, sent=150)
    recorded = record_graph_step(_gnn("gcn"), sizes, in_features=IN, num_classes=CLASSES, ranks=3)
    _assert_same(_trace("gcn", ranks=3).at(sizes), recorded)
    with pytest.raises(ValueError, match="there is no such part"):
        record_graph_step(_gnn("gcn"), sizes, in_features=IN, num_classes=CLASSES, ranks=2)


@pytest.mark.parametrize("name", ["gcn", "sage", "sage, pool", "gat", "gin"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_scaled_trace_on_sparse_features_is_the_one_recorded_there(name, precision):
    how = {"in_features": IN, "num_classes": CLASSES, "stored_features": 3, "precision": precision}
    trace = trace_graph_step(_gnn(name), **how)
    _assert_same(trace.at(PART), record_graph_step(_gnn(name), PART, **how))
    products = [o for o in trace.operators if o.kind == "sparse_product"]
    assert bool(products) == (name != "gin")  # which aggregates first, so that rows are made dense
    assert all(o.sizes["stored"] == "3*N" and o.sizes["columns"] == IN for o in products)
    assert not [o for o in trace.operators if o.kind == "other"]


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_scaled_trace_of_a_whole_graph_is_the_one_recorded_there(name):
    recorded = record_graph_step(_gnn(name), WHOLE, in_features=IN, num_classes=CLASSES, ranks=1)
    trace = _trace(name, ranks=1)
    _assert_same(trace.at(WHOLE), recorded)
    assert not any(o.kind == "exchange" for o in trace.operators)


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in SAMPLES), ("mlp", 2), ("cnn", 2)])
def test_a_scaled_trace_of_a_batch_is_the_one_recorded_there(name, ranks):
    model, trace = _of_samples(name, ranks)
    recorded = record_sample_step(model, [SAMPLES[name][1]], BATCH, num_classes=CLASSES, ranks=ranks)
    _assert_same(trace.at(BATCH), recorded)


def test_rows_of_a_node_embedding_count_nodes():
    def make(num_nodes: int) -> nn.Module:
        return WithNodeEmbedding(num_nodes, IN, _gnn("sage"))

    trace = trace_graph_step(make, in_features=None, num_classes=CLASSES)
    recorded = record_graph_step(make, PART, in_features=None, num_classes=CLASSES)
    _assert_same(trace.at(PART), recorded)
    assert [s.values for s in trace.storages if s.name.startswith("embedding")] == [f"{IN}*N"] * 2  # and its gradient


def _assert_same(scaled: StepTrace, recorded: StepTrace) -> None:
    for number, (one, other) in enumerate(itertools.zip_longest(scaled.operators, recorded.operators)):
        assert one == other, f"operator {number}"
    assert scaled == recorded


# -- 2: counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_flops_of_graph_layers_are_those_of_the_formula(name):
    flops = _trace(name, layers=3).flops(PART)
    widths = [(IN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES)]
    products = 1 if name == "gcn" else 2  # SAGE has one for the node and one for its neighbours
    forward = sum(2 * PART.inner * a * b * products for a, b in widths)
    of_inputs = forward - 2 * PART.inner * IN * HIDDEN * products  # the features need no gradient
    assert _total(flops, "product", "forward") == forward
    assert _total(flops, "product", "backward") == forward + of_inputs
    # both layers aggregate before the product unless rows get narrower
    messages = sum(PART.edges * (b if a > b else a) for a, b in widths)
    assert _total(flops, "spmm", "forward") == _total(flops, "spmm", "backward") == messages


def test_flops_of_a_perceptron_are_those_of_the_formula():
    trace = trace_sample_step(MLP(30, CLASSES, hidden=24, layers=3), [torch.zeros(30)], num_classes=CLASSES)
    flops = trace.flops(PartSizes(batch=1000))
    weights = 30 * 24 + 24 * 24 + 24 * CLASSES
    assert flops == {
        ("forward", "product"): 2 * 1000 * weights,
        ("backward", "product"): 2 * 1000 * (2 * weights - 30 * 24),
    }


def test_a_convolution_is_the_product_of_its_windows():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(800, CLASSES))
    trace = trace_sample_step(model, [torch.zeros(3, 10, 10)], num_classes=CLASSES)
    forward = 2 * (100 * 27 * 8 + 800 * CLASSES)
    assert trace.flops(PartSizes(batch=1))[("forward", "product")] == forward


def test_exchanges_say_what_arrives_and_what_leaves():
    exchanges = [o for o in _trace("gcn").operators if o.attrs.get("what") == "halo"]
    assert [(o.name, o.phase, o.sizes["received"], o.sizes["sent"], o.sizes["width"]) for o in exchanges] == [
        ("layers.0/spmm", "forward", "H", "S", HIDDEN),
        ("layers.1/spmm", "forward", "H", "S", CLASSES),
        ("layers.1/spmm", "backward", "S", "H", CLASSES),
        ("layers.0/spmm", "backward", "S", "H", HIDDEN),
    ]
    moved = sum(4 * (PART.halo + PART.sent) * width for width in (HIDDEN, CLASSES))
    totals = _trace("gcn").bytes_moved(PART)
    assert _total(totals, "exchange", "forward") == _total(totals, "exchange", "backward") == moved


def test_a_compressed_exchange_counts_the_bytes_of_its_wire():
    trace = trace_graph_step(_gnn("gcn"), in_features=IN, num_classes=CLASSES, halo_wire="int8")
    exchanges = [o for o in trace.operators if o.attrs.get("what") == "halo"]
    assert [(o.attrs["wire"], o.sizes["row_bytes"]) for o in exchanges[:2]] == [
        ("int8", HaloWire("int8").row_bytes(width, torch.float32)) for width in (HIDDEN, CLASSES)
    ]


def test_sparse_work_on_bfloat16_scales_though_its_memory_inside_has_other_peaks():
    recorded = record_graph_step(_gnn("gat"), PART, in_features=IN, num_classes=CLASSES, precision="bf16")
    trace = trace_graph_step(_gnn("gat"), in_features=IN, num_classes=CLASSES, precision="bf16")
    _assert_same(trace.at(PART), recorded)


def test_operators_of_attention_are_single_records_in_both_passes():
    trace = _trace("gat")
    kinds = {(o.phase, o.kind): o for o in trace.operators if o.name == "layers.0/edge_softmax"}
    assert kinds[("forward", "edge_softmax")].sizes == {"rows": "N", "sources": "L", "edges": "E", "width": 3}
    assert kinds[("backward", "edge_softmax")].sizes == kinds[("forward", "edge_softmax")].sizes
    assert {o.attrs["op"] for o in trace.operators if o.kind == "sddmm"} >= {"add", "dot"}
    assert not [o for o in trace.operators if o.kind == "other"]


def test_operators_depend_on_those_that_made_their_inputs():
    trace = _trace("gcn")
    names = {o.name: i for i, o in enumerate(trace.operators) if o.phase == "forward"}
    spmm = trace.operators[names["layers.0/spmm"]]
    (fetch,) = spmm.depends_on
    assert trace.operators[fetch].kind == "exchange"
    (product,) = trace.operators[fetch].depends_on
    assert trace.operators[product].name == "layers.0/matmul"
    assert all(earlier < i for i, o in enumerate(trace.operators) for earlier in o.depends_on)


# -- 3: recording changes nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gcn, batch norm", "gat"])
def test_a_recorded_step_on_a_graph_has_the_bits_of_any_other(name):
    _assert_same_bits(lambda: graph_trainer(_gnn(name), PART, in_features=IN, num_classes=CLASSES))


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_a_recorded_step_on_samples_has_the_bits_of_any_other(name):
    make, sample = SAMPLES[name]
    torch.manual_seed(0)
    model = make()
    _assert_same_bits(lambda: sample_trainer(model, [sample], BATCH, num_classes=CLASSES))


def _assert_same_bits(make: Callable[[], Trainer]) -> None:
    plain, watched = make(), make()
    losses = run_steps(plain, 4)
    recorded = record_step(watched).losses
    recorded += run_steps(watched, 1)  # and leaves nothing behind
    assert len(set(losses)) == 4
    if watched.family.steps_per_epoch == 1:
        assert torch.equal(torch.stack(losses), torch.stack(recorded))
    else:  # of samples, the last step begins the epoch anew
        assert torch.equal(torch.stack(losses[:3]), torch.stack(recorded[:3]))
        plain, watched = make(), make()
        run_steps(plain, 3)
        record_step(watched)
    state = watched.model.state_dict()
    assert all(torch.equal(x, state[key]) for key, x in plain.model.state_dict().items())


# -- 4: memory ---------------------------------------------------------------------------------------------------------

_SCALARS_BYTES = 1024
"""Torch makes scalars inside some operators, of which the dispatcher does not know: 16 bytes or fewer in each layer."""


def _allocated(trainer: Trainer) -> int:
    """The most bytes that a second step, unwatched, has of what it makes itself, by torch's allocator."""
    run_steps(trainer, 1)
    works = next(iter(trainer.family.steps(0)))
    gc.collect(1)
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            trainer.step(works)
    finally:
        gc.enable()
    events = measured.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    changes: list[tuple[int, int, int]] = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    made: set[int] = set()
    alive = most = 0
    for _, pointer, change in sorted(changes, key=lambda x: x[0]):
        if change > 0:
            made.add(pointer)
        elif pointer not in made:  # older than the step: of another test under a profiler, say
            continue
        else:
            made.remove(pointer)
        alive += change
        most = max(most, alive)
    return most


def _has_storage(x: Any) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided  # other tests may have left others


def _saved(trainer: Trainer) -> int:
    """Bytes that autograd keeps of what a second step has made, by torch's hooks."""
    run_steps(trainer, 1)
    works = next(iter(trainer.family.steps(0)))
    trainer.optimizer.zero_grad(set_to_none=True)  # as the step would: what it makes may lie in the same places
    gc.collect(1)
    before = {x.untyped_storage().data_ptr() for x in gc.get_objects() if _has_storage(x)}
    held: dict[int, Tensor] = {}  # alive until all are there, so that no address comes twice

    def pack(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trainer.step(works)
    return sum(x.untyped_storage().nbytes() for pointer, x in held.items() if pointer not in before)


@pytest.mark.parametrize("name", ["gcn", "sage", "sage, pool", "gat", "gin"])
def test_memory_of_a_graph_step_is_what_the_allocator_and_autograd_say(name):
    sizes = PartSizes(inner=4001, halo=1501, edges=20011, train=1307, sent=1353)
    _assert_memory(
        _trace(name).at(sizes),
        lambda: graph_trainer(_gnn(name), sizes, in_features=IN, num_classes=CLASSES),
    )


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_memory_of_a_sample_step_is_what_the_allocator_and_autograd_say(name):
    (model, trace), sizes = _of_samples(name), PartSizes(batch=293)
    _assert_memory(
        trace.at(sizes),
        lambda: sample_trainer(model, [SAMPLES[name][1]], sizes, num_classes=CLASSES),
    )


def _assert_memory(trace: StepTrace, make: Callable[[], Trainer]) -> None:
    # the last step's gradients are let go of first; of memory older than itself the profiler does not see that
    first = next(number for number, o in enumerate(trace.operators) if o.kind in ("product", "exchange", "spmm"))
    there = [s for s in trace.storages if s.made_by == -1]
    before = sum(storage_bytes(s) for s in there if s.freed_by is None or s.freed_by >= first)
    assert all(s.category == "gradient" for s in there if s.freed_by is not None and s.freed_by < first)
    assert abs(trace.peak_bytes() - before - _allocated(make())) <= _SCALARS_BYTES
    assert abs(trace.saved_bytes() - _saved(make())) <= _SCALARS_BYTES
    _, held = trace.at_peak()
    parameters = sum(p.numel() * 4 for p in make().model.parameters())
    assert held["parameter"] == parameters and sum(held.values()) == trace.peak_bytes()
    assert held["optimizer"] - 2 * parameters <= 4 * len(list(make().model.parameters()))  # Adam's counts of steps


# -- 5: what is not known, and what cannot be told ---------------------------------------------------------------------


class _Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.fft.fft(x).real)  # type: ignore[no-any-return]


class _Gram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((x @ x.t()) @ x)  # type: ignore[no-any-return]


class _Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.sin() if len(x) > 8 else x)  # type: ignore[no-any-return]


def test_an_operator_that_nobody_knows_is_another_one_with_its_bytes():
    trace = trace_sample_step(_Spectrum(), [torch.zeros(8)], num_classes=CLASSES)
    others = [o for o in trace.operators if o.kind == "other"]
    assert [(o.name, o.op) for o in others] == [("aten._fft_r2c", "aten._fft_r2c")]
    assert trace.bytes_moved(PartSizes(batch=10))[("forward", "other")] == 10 * 8 * (4 + 8)


def test_a_dimension_that_fits_no_count_is_named_and_never_scaled():
    trace = trace_sample_step(_Gram(), [torch.zeros(8)], num_classes=CLASSES)
    assert any("49 and 121" in place for place in trace.untold())  # B * B values
    with pytest.raises(TraceError, match=r"not known: .*49 and 121"):
        trace.at(BATCH)


def test_a_model_that_does_other_things_at_other_sizes_is_refused():
    with pytest.raises(TraceError, match=r"depends on the sizes: number \d+ is .* at one, aten.sin"):
        trace_sample_step(_Moody(), [torch.zeros(8)], num_classes=CLASSES)


def test_a_layer_whose_steps_follow_from_the_degrees_is_refused():
    model = GNN("sage", IN, CLASSES, layers=1, aggregator="lstm")
    with pytest.raises(TraceError, match="depends on the sizes"):
        trace_graph_step(model, in_features=IN, num_classes=CLASSES)


def test_a_trace_without_other_devices_has_no_halo():
    with pytest.raises(TraceError, match="401 halo rows"):
        _trace("gcn", ranks=1).at(PART)


def test_two_counts_that_both_fit_a_dimension_are_named_and_neither_is_taken():
    sizes = PartSizes(inner=100, edges=200, train=50), PartSizes(inner=110, edges=220, train=57)
    model = _gnn("gcn")
    one, other = (record_graph_step(model, s, in_features=IN, num_classes=CLASSES, ranks=1) for s in sizes)
    trace = told(one, sizes[0], other, sizes[1])
    assert any(place.endswith("edges: 200 and 220, 2*N or E") for place in trace.untold())


def _with_workspace(trace, values):
    """``trace`` whose first operator takes so many float32 values while it runs."""
    first = trace.operators[0].model_copy(
        update={"workspace": (WorkspaceRecord(storage=-1, shape=(values,), dtype="float32", freed=1),)}
    )
    return trace.model_copy(update={"operators": (first, *trace.operators[1:])})


def test_memory_inside_an_operator_is_told_as_the_least_multiple_that_is_enough():
    def told_of(values):
        one, other = (
            _with_workspace(record_graph_step(_gnn("gcn"), s, in_features=IN, num_classes=CLASSES), values(s))
            for s in GRAPH_SIZES
        )
        return told(one, GRAPH_SIZES[0], other, GRAPH_SIZES[1])

    def partial_sums(sizes):  # a row of 47 for each program of 32 rows
        return -(-sizes.inner // 32) * 47

    bounded = told_of(partial_sums)
    assert bounded.operators[0].workspace[0].shape == ("2*N",)
    for inner in (31, 1000, 123_457):
        at = bounded.at(PartSizes(inner=inner, edges=1, train=1)).operators[0].workspace[0].shape[0]
        assert at >= partial_sums(PartSizes(inner=inner))
    squared = told_of(lambda sizes: sizes.inner * sizes.edges)  # faster than any count: no multiple is enough
    assert any(place.startswith("operator 0") and "workspace" in place for place in squared.untold())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gin"])
def test_a_step_is_traced_on_a_gpu(kind, precision):
    trace = trace_graph_step(_gnn(kind), in_features=IN, num_classes=CLASSES, device="cuda", precision=precision)
    assert not trace.untold()
    assert trace.device == "cuda"
    assert trace.peak_bytes(PART) > 0


def test_sizes_are_no_less_than_nothing():
    with pytest.raises(ValueError, match="edges is -1"):
        PartSizes(inner=1, edges=-1)


# -- 6: as JSON --------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trace = _trace("gat")
    path = tmp_path / "trace.json"
    path.write_text(trace.to_json())
    assert read_trace(path) == trace
    assert read_trace(path).at(PART).peak_bytes() == trace.peak_bytes(PART)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"nugnn.trace/1"', '"nugnn.trace/2"', "schema"),
        ('"kind":"product"', '"kind":"magic"', "kind"),
        ('"m":"N"', '"m":"N*N"', "operators.*m"),
        ('"ranks": 2', '"ranks": 2, "more": 1', "more"),
        ("{", "", "JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, old, new, message):
    path = tmp_path / "trace.json"
    path.write_text(_GCN.to_json().replace(old, new, 1))
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nothing.json")


_GCN = StepTrace.model_validate(
    {
        "schema": "nugnn.trace/1",
        "family": "graph",
        "ranks": 2,
        "device": "cpu",
        "storages": [],
        "operators": [{"name": "a", "op": "aten.mm", "kind": "product", "phase": "forward", "sizes": {"m": "N"}}],
    }
)
