"""A step traced on a GPU by a process of its own, which takes its context and memory with it when it ends."""

from __future__ import annotations

from collections.abc import Callable

from nugnn.job import private_job_folder, read_job, write_job
from nugnn.launch import launch
from nugnn.planning.trace import StepTrace, read_trace
from nugnn.worker_process import WorkerContext

_TRACE = "trace.json"
_STALL_SECONDS = 300.0


def traced_elsewhere(make: Callable[[], StepTrace]) -> StepTrace:
    """What ``make`` returns in another process.

    Args:
        make: Picklable by cloudpickle.

    Raises:
        WorkerFailed: It raised, with what it said.
    """
    with private_job_folder() as folder:
        write_job(folder, {"make": make})
        launch(folder, 1, module="nugnn.trace_worker", timeout=_STALL_SECONDS)
        return read_trace(folder / _TRACE)


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    trace: StepTrace = read_job(context.job_folder)["make"]()
    (context.job_folder / _TRACE).write_text(trace.to_json(), encoding="utf-8")
