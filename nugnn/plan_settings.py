"""Options of a run that seconds and bytes depend on, as a plan keeps them; what a run has other than its plan."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from torch import nn

from nugnn.fit_options import FitOptions
from nugnn.planning.cluster_links import uses_nccl
from nugnn.planning.in_words import in_bytes
from nugnn.planning.part_memory import KeptStructure, PeakTable
from nugnn.planning.plan import Plain, Plan, PlanError
from nugnn.planning.process_memory import RUNTIME_BYTES, limited_runtime_bytes
from nugnn.planning.step_program import Passes, passes_of
from nugnn.planning.trace import StepTrace
from nugnn.sample_options import SampleOptions

_OF_GRAPHS = (*("precision", "overlap", "cuda_graphs", "activations", "halo_wire", "halo_mode", "recompute_inputs"),)
_OF_SAMPLES = ("precision", "cuda_graphs", "batch_norm", "micro_batches")
_KEPT_BY_OPTIMIZERS = ("momentum", "amsgrad", "centered")
"""Options of torch's optimizers that each take a copy of the parameters."""
_PRINTED = "printed"
"""Of the settings: a digest of the model as torch prints it, which shows dropout and activations; shapes do not."""


def settings_of(options: FitOptions | SampleOptions, model: nn.Module) -> dict[str, Plain]:
    """Of a run.

    Args:
        options: How it trains.
        model: What.
    """
    names = _OF_GRAPHS if isinstance(options, FitOptions) else _OF_SAMPLES
    printed = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # where a function lies is another place in every process
    digest = hashlib.sha256(printed.encode()).hexdigest()[:16]
    plain = {name: getattr(options, name) for name in names} | _optimizer_of(options, model)
    return plain | {"grad_sync": str(options.compression), _PRINTED: digest}


def _optimizer_of(options: FitOptions | SampleOptions, model: nn.Module) -> dict[str, Plain]:
    """Its class, and what of its settings makes it keep more; nothing where it cannot be made of the whole model."""
    try:
        optimizer = options.build_optimizer(model)
    except Exception:  # whatever the user's own says to a model that is on no worker yet
        return {}
    more = [name for name in _KEPT_BY_OPTIMIZERS if any(group.get(name) for group in optimizer.param_groups)]
    return {"optimizer": type(optimizer).__name__ + (f" with {', '.join(more)}" if more else "")}


def other_settings(planned: Mapping[str, Plain], now: Mapping[str, Plain]) -> str:
    """What differs, in words; empty where nothing does that both know.

    >>> other_settings({"precision": "fp32", "overlap": "auto"}, {"precision": "bf16", "halo_mode": "exact"})
    'precision fp32, and this run has bf16'
    """
    found = [name for name in planned if name in now and planned[name] != now[name]]
    said = [f"{name} {planned[name]}, and this run has {now[name]}" for name in found if name != _PRINTED]
    if _PRINTED in found:
        said.append("a model that prints in another way, by its dropout or activation")
    return "; for ".join(said)


def check_memory(plan: Plan, traces: Mapping[str, StepTrace], said: str, overlap: str = "off") -> None:
    """Refuse a plan whose parts the memories do not hold under other options.

    Args:
        plan: Made for others.
        traces: Of the step under those of the run, by kind of device.
        said: From `other_settings`.
        overlap: Of the run, as ``--overlap``; it decides what is kept for sums that begin early.

    Raises:
        PlanError: Says which worker lacks how much.
    """
    lacking, passes = [], _passes(plan, overlap)
    for rank, device in enumerate(plan.devices):
        trace, sizes = traces[device.kind], device.sizes.sizes
        is_limited = device.kind == "cpu" and device.memory_fraction is not None
        need = limited_runtime_bytes(device.multiprocessors) if is_limited else RUNTIME_BYTES[device.kind]
        need += PeakTable(trace).bytes(sizes) + KeptStructure(trace, passes, device=device.kind).bytes(sizes)
        if need > max(device.memory_limit_bytes, device.memory_bytes):
            lacking.append(f"worker {rank} would need {in_bytes(need)} and has {in_bytes(device.memory_limit_bytes)}")
    if lacking:
        more = "" if len(lacking) <= 4 else f"; and {len(lacking) - 4} more"
        raise PlanError(
            f"the plan was made for {said}, so that its parts do not fit: {'; '.join(lacking[:4])}{more}. Make one for "
            "this run with nugnn plan"
        )


def _passes(plan: Plan, overlap: str) -> Passes:
    """In which sums overlap with exchanges on the devices of a plan."""
    if len(plan.devices) == 1:
        return "none"
    hosts = [device.host for device in plan.devices]
    return passes_of(overlap, is_nccl=uses_nccl(hosts, plan.devices), num_hosts=len(set(hosts)))
