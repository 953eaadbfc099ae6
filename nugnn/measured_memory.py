"""The most memory that a training step takes, as torch's allocator gives it out."""

from __future__ import annotations

import gc
import itertools

import torch
from torch.profiler import ProfilerActivity, profile

from nugnn.planning.operator_costs import storage_bytes
from nugnn.planning.trace import StepTrace
from nugnn.trainer import Trainer


def peak_of_step(trainer: Trainer, trace: StepTrace) -> int:
    """Bytes at the peak of a step that runs as ever but for CUDA graphs.

    What was there before the step counts as the trace has it: lists that are kept from step to step, and what other
    trainers hold, are not in it.

    Args:
        trainer: That has made some steps, without CUDA graphs.
        trace: Of its step, at its sizes.
    """
    kinds = [o.kind for o in trace.operators]
    first = next((i for i, kind in enumerate(kinds) if kind in ("product", "exchange", "spmm", "rows")), 0)
    there = [s for s in trace.storages if s.made_by == -1]
    before = sum(storage_bytes(s) for s in there if s.freed_by is None or s.freed_by >= first)
    works = next(iter(trainer.family.steps(0)))
    trainer.optimizer.zero_grad(set_to_none=True)  # as the step does first
    gc.collect()
    return before + (_on_gpu if trace.device == "cuda" else _on_cpu)(trainer, works)


def _on_gpu(trainer: Trainer, works: object) -> int:
    device = trainer.family.ranks.device
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    trainer.step(works)  # type: ignore[arg-type]
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held


def _on_cpu(trainer: Trainer, works: object) -> int:
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            trainer.step(works)  # type: ignore[arg-type]
    finally:
        gc.enable()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))
