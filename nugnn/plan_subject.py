"""What a plan is made for: model, data and options, as traces of a step, counts and plain values."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nugnn.activations import Offloaded
from nugnn.comm.halo_mode import HaloMode
from nugnn.fit_options import FitOptions
from nugnn.graph_family import why_halo_is_not_recorded
from nugnn.known_models import is_known
from nugnn.measured_step import measure_graph_step, measure_sample_step
from nugnn.models import WithNodeEmbedding
from nugnn.plan_settings import settings_of
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import DataFacts, Plain
from nugnn.planning.profiles import DeviceKind
from nugnn.planning.trace import StepTrace, TraceError
from nugnn.sample_family import why_batch_is_not_recorded
from nugnn.sample_options import SampleOptions
from nugnn.step_graphs import StepFacts, counts_as_compressed, has_triton
from nugnn.trace_worker import traced_elsewhere
from nugnn.traced_step import trace_graph_step, trace_sample_step
from nugnn.train_options import TrainOptions

Tracing = Callable[[], StepTrace]

_NARROW = {"fp16": "bf16"}
"""Formats that a CPU's message passing does not take, and what stands in for them in a trace: as wide, as fast."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanSubject:
    """What a plan is made for.

    Args:
        family: Of the data.
        traces: A step by kind of device.
        measure: What times the operators of such a step: ``measure(trace, parts, seconds=..., device=...,
            limits=...)``, see `nugnn.measured_step`.
        whole: Of the graph; of samples the batch.
        data: Facts of the data.
        model: Facts of the model.
        settings: Of the run, as far as seconds depend on them.
        precision: As ``--precision``.
        overlap: As ``--overlap``.
        is_captured: Whether steps of GPUs run as CUDA graphs, as `nugnn.step_graphs.StepFacts` says of training.
        steps_per_epoch: 1 for a graph.
        row_bytes: Of a halo row, about.
        notes: What had to be said.
    """

    family: Literal["graph", "samples"]
    traces: Mapping[str, StepTrace]
    measure: Callable[..., MeasuredTimes]
    whole: PartSizes
    data: DataFacts
    model: dict[str, Plain]
    settings: dict[str, Plain]
    precision: str
    overlap: str = "off"
    is_captured: bool = False
    steps_per_epoch: int = 1
    row_bytes: float = 1024.0
    notes: tuple[str, ...] = ()


def graph_subject(
    model: nn.Module,
    options: FitOptions,
    data: DataFacts,
    *,
    features: int | None,
    multilabel: bool,
    kinds: Sequence[DeviceKind],
    workers: int,
    is_nccl: bool = True,
    stored_features: int | None = None,
) -> PlanSubject:
    """A model on a graph.

    Args:
        model: Before training; left as it is.
        options: How it will be trained.
        data: Facts of the graph.
        features: Width of its features; None without any.
        multilabel: Whether a label is a row of zeros and ones.
        kinds: Of devices in use.
        workers: How many.
        is_nccl: Whether GPUs of several workers exchange directly, as where each has one of its own.
        stored_features: Of a row of sparse features, in the mean; None for dense ones.

    Raises:
        TraceError: The model's step cannot be foreseen: says why.
    """
    how: dict[str, Any] = {
        "in_features": features,
        "stored_features": stored_features,
        "num_classes": data.classes,
        "multilabel": multilabel,
        "ranks": min(workers, 2),
        "loss": options.loss,
        "class_weights": options.class_weights,
        "label_smoothing": options.label_smoothing,
        "recompute_inputs": options.recompute_inputs,
        "activations": options.activations,
        "make_optimizer": options.build_optimizer,
        "regularizer": options.regularizer,
    }
    notes = []
    for name, exact in (("halo_mode", "exact"), ("halo_wire", "fp32")):
        value = getattr(options, name)
        if value != exact and (name == "halo_mode" or value == "auto"):
            notes.append(f"predicted as if {name} were {exact}, and not {value}")
        elif name == "halo_wire":
            how["halo_wire"] = value
    if options.compression.wire != "fp32" and workers > 1:
        notes.append(f"sums of gradients are predicted as if grad_sync were fp32, and not {options.compression}")
    if options.activations == "offload" and "cuda" in kinds:
        notes.append(
            "predicted as if activations were keep, and not offload: of a GPU more memory is predicted than it will "
            "need, and less time"
        )
    maker = _for_any_size(model)

    def how_on(kind: str) -> dict[str, Any]:
        """Beside a GPU, or in place of one, a CPU keeps what a GPU would move to the host's memory."""
        keeps = options.activations == "offload" and kind == "cpu" and "cuda" in kinds
        return how | {"activations": "keep"} if keeps else how

    def tracing(kind: DeviceKind, precision: str) -> Tracing:
        return functools.partial(trace_graph_step, maker, device=kind, precision=precision, **how_on(kind))

    of_halo = why_halo_is_not_recorded(options.halo_wire, HaloMode.parse(options.halo_mode)) if workers > 1 else None
    offloads = Offloaded.why_not_recorded if options.activations == "offload" else None
    is_captured = _is_captured(
        model, options, workers, of_halo or offloads, is_nccl=is_nccl, exchanges_rows=workers > 1
    )
    trained: dict[str, Any] = {"precision": options.precision, "captured": is_captured}

    def measure(trace: StepTrace, parts: Sequence[Any], **more: Any) -> MeasuredTimes:
        return measure_graph_step(maker, trace, parts, **trained, **how_on(trace.device), **more)

    traces = _traces(kinds, options.precision, tracing, notes, elsewhere=workers > 1)
    return PlanSubject(
        family="graph",
        traces=traces,
        measure=measure,
        whole=PartSizes(inner=data.nodes, edges=data.edges, train=data.train),
        data=data,
        model=model_facts(model),
        settings=settings_of(options, model),
        precision=options.precision,
        overlap=options.overlap,
        is_captured=is_captured,
        row_bytes=_row_bytes(next(iter(traces.values()))),
        notes=tuple(notes),
    )


def sample_subject(
    model: nn.Module,
    options: SampleOptions,
    data: DataFacts,
    sample: Sequence[Tensor],
    *,
    batch: int,
    kinds: Sequence[DeviceKind],
    workers: int,
    is_nccl: bool = True,
) -> PlanSubject:
    """A model on batches of samples.

    Args:
        model: Before training; left as it is.
        options: How it will be trained.
        data: Facts of the samples.
        sample: What the model is called with for one, without the axis of samples.
        batch: Samples of all workers together.
        kinds: Of devices in use.
        workers: How many.
        is_nccl: Whether GPUs of several workers exchange directly, as where each has one of its own.

    Raises:
        TraceError: The model's step cannot be foreseen: says why.
    """
    how: dict[str, Any] = {
        "num_classes": data.classes,
        "ranks": min(workers, 2),
        "loss": options.loss,
        "class_weights": options.class_weights,
        "label_smoothing": options.label_smoothing,
        "batch_norm": options.batch_norm,
        "make_optimizer": options.build_optimizer,
        "regularizer": options.regularizer,
        "clip_norm": options.clip_norm,
    }
    notes = []
    if options.micro_batches > 1:
        notes.append(f"predicted as if a batch ran at once, and not in {options.micro_batches} micro-batches")
    if options.compression.wire != "fp32" and workers > 1:
        notes.append(f"sums of gradients are predicted as if grad_sync were fp32, and not {options.compression}")

    def tracing(kind: DeviceKind, precision: str) -> Tracing:
        return functools.partial(trace_sample_step, model, sample, device=kind, precision=precision, **how)

    of_batch = why_batch_is_not_recorded(options.micro_batches)
    is_captured = _is_captured(model, options, workers, of_batch, is_nccl=is_nccl, exchanges_rows=False)
    trained: dict[str, Any] = {"precision": options.precision, "captured": is_captured}

    def measure(trace: StepTrace, sizes: Sequence[PartSizes], **more: Any) -> MeasuredTimes:
        return measure_sample_step(model, trace, sample, sizes, **trained, **how, **more)

    traces = _traces(kinds, options.precision, tracing, notes, elsewhere=workers > 1)
    steps = data.samples // batch if options.drop_last else -(-data.samples // batch)
    return PlanSubject(
        family="samples",
        traces=traces,
        measure=measure,
        whole=PartSizes(batch=batch),
        data=data,
        model=model_facts(model),
        settings=settings_of(options, model) | {"batch_size": batch},
        precision=options.precision,
        is_captured=is_captured,
        steps_per_epoch=max(1, steps),
        notes=tuple(notes),
    )


def _is_captured(
    model: nn.Module,
    options: TrainOptions,
    workers: int,
    why_not_family: str | None,
    *,
    is_nccl: bool,
    exchanges_rows: bool,
) -> bool:
    """Whether training records its steps on GPUs; a GPU that is described is taken to be on a host with Triton."""
    return StepFacts(
        choice=options.cuda_graphs,
        is_known=options.loss is None and options.regularizer is None and is_known(model),
        is_on_gpu=True,
        is_split=workers > 1,
        carries_cuda=is_nccl,
        exchanges_rows=exchanges_rows,
        compresses=counts_as_compressed(options.compression.wire, options.cuda_graphs),
        precision=options.precision,
        why_not_family=why_not_family,
        has_triton=not torch.cuda.is_available() or has_triton(),
    ).is_recorded


def model_facts(model: nn.Module) -> dict[str, Plain]:
    """Plain values that are the same for models of the same kind and size, whatever their weights."""
    shapes = {name: list(x.shape) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    own = {name: getattr(model, name, None) for name in ("kind", "hidden")}
    return {name: value for name, value in own.items() if type(value) in (str, int)} | {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "shapes": hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16],
    }


def _traces(
    kinds: Sequence[DeviceKind],
    precision: str,
    tracing: Callable[[DeviceKind, str], Tracing],
    notes: list[str],
    *,
    elsewhere: bool,
) -> dict[str, StepTrace]:
    """A trace of each kind of device; of a GPU, where there is none, that of a CPU stands in.

    Where workers follow, the GPU is left to them, and traced on by a process that ends before.
    """
    found: dict[str, StepTrace] = {}
    with torch.random.fork_rng():
        for kind in dict.fromkeys(kinds):
            if kind == "cuda" and torch.cuda.is_available():
                make = tracing("cuda", precision)
                found[kind] = traced_elsewhere(make) if elsewhere else make()
                continue
            if kind == "cuda":
                notes.append("there is no GPU here to record a step on: its operators are taken to be those of a CPU")
            on_cpu = {"tf32": "fp32", **_NARROW}.get(precision, precision)
            if on_cpu != precision and precision in _NARROW:
                notes.append(f"predicted as if precision were {on_cpu}, which is as wide as {precision}")
            found[kind] = found.get("cpu") or tracing("cpu", on_cpu)()
    for trace in found.values():
        if untold := trace.untold():
            raise TraceError(f"what a step of this model does at other sizes is not known: {'; '.join(untold[:3])}")
    return found


def _for_any_size(model: nn.Module) -> nn.Module | Callable[[int], nn.Module]:
    """A model with a row for each node is made anew for the nodes of a trace."""
    if not isinstance(model, WithNodeEmbedding):
        return model
    width = model.embedding.weight.shape[1]
    return lambda num_nodes: WithNodeEmbedding(num_nodes, width, copy.deepcopy(model.model))


def _row_bytes(trace: StepTrace) -> float:
    """Of a halo row on the wire, the widest one."""
    widths = [record.sizes.get("row_bytes") for record in trace.operators if record.kind == "exchange"]
    return float(max((width for width in widths if isinstance(width, int)), default=1024))
