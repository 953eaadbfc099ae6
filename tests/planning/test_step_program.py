"""What the host launches in a step: each operator, or a graph and what follows it; an optimizer's as many as it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from nugnn.models import GNN
from nugnn.planning.links import Links
from nugnn.planning.lone_step import alone_seconds
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.replay import replay
from nugnn.planning.step_program import Do, after_passes, make_program
from nugnn.planning.trace import SCHEMA, StepTrace
from nugnn.planning.trace_records import OperatorRecord, Storage, TensorRecord
from nugnn.traced_step import trace_graph_step
from step_traces import CLASSES, IN

LAUNCH = 1e-5
SIZES = PartSizes(inner=100, edges=300, train=10)
GRADIENT = TensorRecord(storage=0, shape=(8,), dtype="float32")


class OfLaunches:
    """Seconds for each launch of an operator."""

    launch_seconds = LAUNCH
    captured_launch_seconds = None
    after_rest = None
    multiprocessors = 1

    def __init__(self, each: float) -> None:
        self.each = each

    def seconds(self, record: OperatorRecord, storages: Sequence[Storage]) -> float:
        return 0.0 if record.kind == "metadata" else self.each * record.launches


def by_hand(optimizer: Sequence[int], *, clips: bool, ranks: int) -> StepTrace:
    """Two products, a sum of gradients where there are ranks, a norm where it clips, and the optimizer by launches."""
    operators = [
        OperatorRecord(name="layer", op="aten.mm", kind="product", phase="forward", outputs=(GRADIENT,)),
        OperatorRecord(name="layer", op="aten.t", kind="metadata", phase="backward"),
        OperatorRecord(name="layer", op="aten.mm", kind="product", phase="backward", outputs=(GRADIENT,)),
    ]
    if ranks > 1:  # packed after backward, as a graph's gradients are
        operators.append(OperatorRecord(name="cat", op="aten.cat", kind="copy", phase="optimizer"))
        sizes = {"width": 8, "row_bytes": 4, "sent": 8, "received": 8}
        operators.append(
            OperatorRecord(
                name="sum", op="all_reduce", kind="exchange", phase="optimizer", inputs=(GRADIENT,), sizes=sizes,
                attrs={"what": "all_reduce"},
            )
        )  # fmt: skip
    if clips:
        operators.append(OperatorRecord(name="norm", op="aten.norm", kind="reduction", phase="optimizer"))
    operators += [
        OperatorRecord(name="optimizer", op="optimizer", kind="optimizer", phase="optimizer", launches=n)
        for n in optimizer
    ]
    storages = (Storage(values=8, dtype="float32", category="gradient", made_by=0),)
    return StepTrace(
        schema=SCHEMA, family="graph", ranks=ranks, device="cuda", operators=tuple(operators), storages=storages
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_a_graph_is_one_launch_and_what_follows_is_launched_one_by_one(ranks: int, clips: bool) -> None:
    trace = by_hand([7], clips=clips, ranks=ranks)
    program = make_program(trace, sums_in_backward=False)
    numbers = [number for do, number, _ in program.instructions if do <= Do.RUN_HALO]

    def launched(*, is_captured: bool) -> list[int]:
        counts = program.launched(trace, is_captured=is_captured)
        exchanges = [n for n, (do, _, _) in zip(counts, program.instructions, strict=True) if do > Do.RUN_HALO]
        assert not any(exchanges)
        return [n for n, (do, _, _) in zip(counts, program.instructions, strict=True) if do <= Do.RUN_HALO]

    in_graph = 2 + 2 * (ranks > 1)
    assert len(numbers) == in_graph + clips + 1
    assert launched(is_captured=False) == [1] * (in_graph + clips) + [7]
    assert launched(is_captured=True) == [1] + [0] * (in_graph - 1) + [1] * clips + [7]
    assert trace.operators[after_passes(trace)].name == ("norm" if clips else "optimizer")
    outside = 7 + clips
    assert alone_seconds(trace, OfLaunches(0.0), is_captured=True) == pytest.approx(LAUNCH * (1 + outside))
    assert alone_seconds(trace, OfLaunches(0.0)) == pytest.approx(LAUNCH * (in_graph + outside))


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("each", [0.0, 3e-6, 9.9e-6, 1e-5, 4e-5])
def test_several_launches_of_a_record_are_as_many_records(each: float, is_captured: bool) -> None:
    one, many = (by_hand(launches, clips=True, ranks=1) for launches in ([6], [1] * 6))
    seconds = []
    for trace in (one, many):
        replayed = replay([trace], [OfLaunches(each)], Links.alone(), captured=is_captured)
        device = DeviceWork(trace, OfLaunches(each), is_captured=is_captured)
        seconds += [replayed.makespan, PredictedWork([device]).seconds(0, SIZES)]
        assert sum(event.seconds for event in replayed.events[0] if event.lane == "host") == pytest.approx(
            LAUNCH * (8 if is_captured else 9)
        )
    assert seconds == pytest.approx([seconds[0]] * 4)


def _adam(**how: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=0.01, **how)  # type: ignore[arg-type]


def _sgd(**how: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **how)  # type: ignore[arg-type]


def _launches(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[int, int]:
    """Of the optimizer's record, and its parameters."""
    model = GNN("gcn", IN, CLASSES, layers=2, hidden=16)
    trace = trace_graph_step(model, in_features=IN, num_classes=CLASSES, ranks=1, make_optimizer=make_optimizer)
    (record,) = (record for record in trace.operators if record.kind == "optimizer")
    assert StepTrace.model_validate_json(trace.to_json()) == trace
    assert {other.launches for other in trace.operators if other is not record} == {1}
    return record.launches, len(list(model.parameters()))


@pytest.mark.parametrize("make", [_adam, _sgd])
def test_an_optimizer_on_a_cpu_counts_as_the_lists_that_a_gpu_takes(
    make: Callable[..., Callable[[nn.Module], torch.optim.Optimizer]],
) -> None:
    (left_to_torch, num_tensors), (in_lists, _), (one_by_one, _) = (
        _launches(make(**how)) for how in ({}, {"foreach": True}, {"foreach": False})
    )
    assert left_to_torch == in_lists > 1
    assert one_by_one == num_tensors * in_lists
