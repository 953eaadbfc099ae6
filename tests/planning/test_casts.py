"""Other formats for a step's operators: casts where ends differ, as torch's autocast makes them, and nowhere else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from nugnn.networks import MLP, TransformerClassifier
from nugnn.planning.casts import CAST, FLOATING, with_formats
from nugnn.planning.operator_costs import tensor_bytes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import OperatorRecord, Storage, TensorRecord
from nugnn.traced_step import trace_sample_step
from step_traces import CLASSES, graph_trace, sample_trace

BATCH, PART = PartSizes(batch=64), PartSizes(inner=1009, halo=401, edges=5003, train=307, sent=353)


def _mlp(precision: str, layers: int = 3) -> StepTrace:
    torch.manual_seed(0)
    model = MLP(30, CLASSES, hidden=24, layers=layers)
    return trace_sample_step(model, [torch.zeros(30)], num_classes=CLASSES, precision=precision)


def _casts(trace: StepTrace) -> list[OperatorRecord]:
    """From one floating type to another one."""
    return [r for r in trace.operators if r.op == CAST and r.inputs[0].dtype in FLOATING]


def _moved(trace: StepTrace) -> Counter:
    return Counter(
        (r.phase, r.inputs[0].dtype, r.outputs[0].dtype, tensor_bytes(r.inputs[0]), tensor_bytes(r.outputs[0]))
        for r in _casts(trace)
    )


def _products(trace: StepTrace) -> list[tuple]:
    return [
        (r.name, r.op, r.phase, tuple(sorted(r.sizes.items())), tuple(x.dtype for x in (*r.inputs, *r.outputs)))
        for r in trace.operators
        if r.kind == "product"
    ]


def _names(trace: StepTrace, *kinds: str) -> set[str]:
    return {r.name for r in trace.operators if r.kind in kinds and r.phase == "forward"}


@pytest.mark.parametrize("trace", [lambda: graph_trace("gcn"), lambda: graph_trace("gat"), sample_trace])
def test_the_format_in_which_it_was_recorded_changes_nothing(trace):
    given = trace()
    assert with_formats(given, {}) == given
    floating = {r.name: "float32" for r in given.operators if {x.dtype for x in (*r.inputs, *r.outputs)} <= {"float32"}}
    assert with_formats(given, floating) == given


def test_products_in_bfloat16_are_cast_as_autocast_does_it():
    given, recorded = _mlp("fp32"), _mlp("amp").at(BATCH)
    predicted = with_formats(given, dict.fromkeys(_names(given, "product"), "bfloat16")).at(BATCH)
    assert _moved(predicted) == _moved(recorded)
    assert len(_casts(predicted)) > 10
    assert _products(predicted) == _products(recorded)
    relu = [{x.dtype for x in (*r.inputs, *r.outputs)} for r in predicted.operators if r.op == "aten.relu"]
    assert relu == [{"bfloat16"}] * 2  # between two products in bfloat16
    losses = [r for r in predicted.operators if r.kind in ("loss", "normalisation")]
    assert all(x.dtype in ("float32", "int64") for r in losses for x in r.inputs)
    assert predicted.peak_bytes() == recorded.peak_bytes()
    assert predicted.saved_bytes() == recorded.saved_bytes()


def test_one_layer_in_bfloat16_is_cast_on_all_of_its_edges():
    given = _mlp("fp32")
    first, second, last = sorted(_names(given, "product"))
    step = with_formats(given, {second: "bfloat16"}).at(BATCH)
    around = Counter((r.name, r.phase, r.outputs[0].dtype) for r in _casts(step))
    relu = [name for name in _names(given, "elementwise") if "relu" in name]
    forward = {key: count for key, count in around.items() if key[1] == "forward"}
    # weight, bias and input; the activation behind follows, and the layer after it takes it back
    assert forward == {(second, "forward", "bfloat16"): 3, (last, "forward", "float32"): 1}
    assert sum(count for (_, phase, _), count in around.items() if phase == "backward") == 4
    assert any(name in relu and dtype == "bfloat16" for name, phase, dtype in around if phase == "backward")
    dtypes = {r.name: r.outputs[0].dtype for r in step.operators if r.kind == "product" and r.phase == "forward"}
    assert dtypes == {first: "float32", second: "bfloat16", last: "float32"}


def test_the_gradient_of_a_view_has_its_format_and_what_was_cast_is_kept_as_its_cast():
    torch.manual_seed(0)
    model = TransformerClassifier(50, CLASSES, width=32, layers=1, max_length=16, convolution=0)
    given = trace_sample_step(model, [torch.full((16,), 49)], num_classes=CLASSES).at(BATCH)
    step = with_formats(given, {"blocks.0.attention.project/linear": "bfloat16"})
    (joined,) = (r for r in step.operators if r.op == "aten.cat")  # gradients of queries, keys and values
    assert [x.dtype for x in (*joined.inputs, *joined.outputs)] == 4 * ["bfloat16"]
    around = Counter((r.name, r.phase) for r in _casts(step) if r.name.startswith("blocks.0.attention/"))
    matmul = "blocks.0.attention/matmul"
    forward = {key: count for key, count in around.items() if key[1] == "forward"}
    assert forward == {(matmul, "forward"): 2, (f"{matmul}#1", "forward"): 1}
    assert sum(count for (_, phase), count in around.items() if phase == "backward") == 3
    clones = {number for number, r in enumerate(step.operators) if r.op == "aten.clone" and r.phase == "forward"}
    kept = [s.is_saved for s in step.storages if s.made_by in clones and s.dtype == "bfloat16"]
    assert kept == 3 * [False]  # their casts are what the products keep


def test_formats_and_sizes_may_come_in_any_order():
    for given, sizes in ((_mlp("fp32"), BATCH), (graph_trace("gcn"), PART)):
        names = dict.fromkeys(_names(given, "product", "spmm"), "float16")
        assert with_formats(given, names).at(sizes) == with_formats(given.at(sizes), names)


def test_halo_rows_travel_in_the_format_in_which_they_are_made():
    given = graph_trace("gcn")
    half = with_formats(given, dict.fromkeys(_names(given, "product", "spmm"), "bfloat16"))
    rows = [[r for r in trace.operators if r.attrs.get("what") == "halo"] for trace in (given, half)]
    assert len(rows[0]) == len(rows[1]) > 0
    for whole, short in zip(*rows, strict=True):
        assert short.sizes["row_bytes"] * 2 == whole.sizes["row_bytes"]
        assert short.attrs["wire"] == "bfloat16"
    sums = [r for r in half.operators if r.attrs.get("what") == "all_reduce"]
    assert [r.sizes["row_bytes"] for r in sums] == [4]  # gradients are those of float32 parameters
    assert half.at(PART).peak_bytes() < given.at(PART).peak_bytes()
    rows = with_formats(given, {"aten.index_select": "bfloat16"})
    picked = [[r for r in trace.operators if "picked_bytes" in r.sizes] for trace in (given, rows)]
    assert [trace[0].sizes["picked_bytes"] for trace in picked] == [f"{4 * CLASSES}*T", f"{2 * CLASSES}*T"]


def _diamond() -> StepTrace:
    """``relu(a(x) + b(x))``, read by ``c``."""

    def made(number: int) -> TensorRecord:
        return TensorRecord(storage=number, shape=("B", 8), dtype="float32")

    layout = [("a", "product", (0,)), ("b", "product", (0,)), ("add", "elementwise", (1, 2))]
    layout += [("relu", "elementwise", (3,)), ("c", "product", (4,))]
    operators = [
        OperatorRecord(
            name=name, op=name, kind=kind, phase="forward", inputs=tuple(map(made, reads)), outputs=(made(place + 1),),
            depends_on=tuple(read - 1 for read in reads if read),
        )
        for place, (name, kind, reads) in enumerate(layout)
    ]  # fmt: skip
    storages = [Storage(values="8*B", dtype="float32", category="input", made_by=-1)]
    storages += [
        Storage(values="8*B", dtype="float32", category="activation", made_by=i, freed_by=min(i + 2, 4))
        for i in range(5)
    ]
    return StepTrace(
        schema="nugnn.trace/1", family="samples", ranks=1, device="cpu", operators=operators, storages=storages
    )


def _dtypes(trace: StepTrace) -> dict[str, str]:
    return {r.name: r.outputs[0].dtype for r in trace.operators if r.op != CAST}


def test_what_can_do_with_any_format_follows_if_all_before_it_agree():
    both = with_formats(_diamond(), {"a": "bfloat16", "b": "bfloat16"})
    assert _dtypes(both) == dict(a="bfloat16", b="bfloat16", add="bfloat16", relu="bfloat16", c="float32")
    assert [r.name for r in _casts(both)] == ["a", "b", "c"]  # x for each of the two, and back for the last
    one = with_formats(_diamond(), {"a": "bfloat16"})
    assert _dtypes(one) == dict(a="bfloat16", b="float32", add="float32", relu="float32", c="float32")
    assert [(r.name, r.outputs[0].dtype) for r in _casts(one)] == [("a", "bfloat16"), ("add", "float32")]
    all_three = with_formats(_diamond(), dict.fromkeys("abc", "bfloat16"))
    assert [r.name for r in _casts(all_three)] == ["a", "b"]
    pinned = with_formats(_diamond(), {"a": "bfloat16", "b": "bfloat16", "add": "float32"})
    assert [r.name for r in _casts(pinned)] == ["a", "b", "add", "add"]
    assert _dtypes(pinned)["relu"] == "float32"


def test_batch_norm_over_ranks_computes_in_float32_whatever_its_records_are_called():
    torch.manual_seed(0)
    model = MLP(30, CLASSES, hidden=24, layers=2, norm="batch")
    given = trace_sample_step(model, [torch.zeros(30)], num_classes=CLASSES, ranks=2)
    inside = [i for i, record in enumerate(given.operators) if record.within == "batch_norm"]
    assert len(inside) > 10 and {given.operators[i].phase for i in inside} == {"forward"}
    renamed = given.model_copy(
        update={"operators": tuple(r.model_copy(update={"name": r.name.replace("batch", "")}) for r in given.operators)}
    )
    for trace in (given, renamed):
        found = with_formats(trace, dict.fromkeys(_names(trace, "product"), "bfloat16"))
        norm = [record for record in found.operators if record.within == "batch_norm"]
        assert len(norm) == len(inside)
        assert {x.dtype for record in norm for x in (*record.inputs, *record.outputs)} == {"float32"}
        (name,) = {record.name for record in norm}
        assert [cast.outputs[0].dtype for cast in _casts(found) if (cast.name, cast.phase) == (name, "forward")] == [
            "float32"
        ]


def test_a_cast_depends_on_what_it_reads_and_is_read_in_its_place():
    step = with_formats(_diamond(), {"c": "float16"})
    (cast,) = _casts(step)
    number = step.operators.index(cast)
    reader = step.operators[number + 1]
    assert reader.name == "c" and number in reader.depends_on
    assert step.operators[cast.depends_on[0]].name == "relu"
    assert reader.inputs == cast.outputs
    made = step.storages[cast.outputs[0].storage]
    assert (made.made_by, made.dtype, made.values) == (number, "float16", "8*B")


def test_names_and_formats_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="the trace has no operator 'addd'; did you mean 'add'"):
        with_formats(_diamond(), {"addd": "float16"})
    with pytest.raises(ValueError, match="'int8' is no format that can be asked for; choose float64, float32"):
        with_formats(_diamond(), {"a": "int8"})


def test_a_loss_of_ours_reads_logits_as_they_are_and_gives_gradients_in_their_format():
    """As its kernel on a GPU does; losses of torch's, in float32, have casts in front of them and behind."""
    shapes = {"logits": (20, 5), "loss": (20,), "grad": (20,), "back": (20, 5)}
    numbers = {name: number for number, name in enumerate(shapes)}

    def record(name: str, op: str, kind: str, phase: str, reads: tuple[str, ...], makes: str | None) -> OperatorRecord:
        x = {n: TensorRecord(storage=numbers[n], shape=shape, dtype="float32") for n, shape in shapes.items()}
        made = () if makes is None else (x[makes],)
        return OperatorRecord(name=name, op=op, kind=kind, phase=phase, inputs=tuple(x[n] for n in reads), outputs=made)

    def step(loss: str) -> StepTrace:
        operators = (
            record("fc/linear", "aten.mm", "product", "forward", (), "logits"),
            record("loss", loss, "loss", "loss", ("logits",), "loss"),
            record("loss", "aten.ones_like", "elementwise", "backward", ("loss",), "grad"),
            record("loss", f"{loss}.backward", "loss", "backward", ("grad",), "back"),
            record("fc/linear", "aten.mm", "product", "backward", ("back",), None),
        )
        storages = tuple(
            Storage(
                values=shape[0] * (shape[1] if len(shape) > 1 else 1), dtype="float32", category="activation", made_by=i
            )
            for i, shape in enumerate(shapes.values())
        )
        return sample_trace().model_copy(update={"operators": operators, "storages": storages})

    ours = with_formats(step("_CrossEntropy"), {"fc/linear": "bfloat16"})
    assert [s.dtype for s in ours.storages] == ["bfloat16", "float32", "float32", "bfloat16"]
    assert not _casts(ours) and len(ours.operators) == 5
    torchs = with_formats(step("aten.cross_entropy_loss"), {"fc/linear": "bfloat16"})
    assert len(_casts(torchs)) >= 2
