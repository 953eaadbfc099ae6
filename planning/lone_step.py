"""Seconds of a step on one device that waits for nobody."""

from __future__ import annotations

from nugnn.planning.operator_times import OperatorTimes, host_seconds_of_launch
from nugnn.planning.step_program import launches_of_graph
from nugnn.planning.trace import StepTrace


def alone_seconds(trace: StepTrace, times: OperatorTimes, *, is_captured: bool = False) -> float:
    """Seconds of a step on one device that waits for nobody.

    A CPU does one operator after the other. A GPU does, too, while the host puts them into its queue: the slower one of
    the two sets the pace of many steps.

    Args:
        trace: At numbers.
        times: Of its operators.
        is_captured: Whether its passes run as a CUDA graph: one launch, and those of what follows.
    """
    busy = sum(times.seconds(record, trace.storages) for record in trace.operators)
    every_one = sum(record.launches for record in trace.operators if record.kind != "metadata")
    launched = launches_of_graph(trace) if is_captured else every_one
    return max(busy, launched * host_seconds_of_launch(times, is_captured=is_captured))
