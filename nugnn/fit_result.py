"""What a run learned, put together from what its ranks left."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.history import Epoch

if TYPE_CHECKING:
    from nugnn.held_run import HeldRun
    from nugnn.planning.plan import Plan
    from nugnn.planning.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run learned.

    Args:
        model: With the weights of the best validation epoch (node embeddings of all nodes, in original order).
        history: One `nugnn.history.Epoch` per epoch, as rank 0 saw it.
        best: The epoch the weights are from.
        logits: Of those weights: ``(num_nodes, C)`` in original node order, or of the test samples in their order,
            ``(0,)`` where there are none.
        rank_reports: For each rank: ``device`` (its name), ``peak_memory_bytes`` (allocated on a GPU, resident on the
            CPU), ``epoch_seconds`` (median), and its split into ``compute_seconds``, ``halo_seconds`` and
            ``sync_seconds``, ``core_wait`` (share of the time after the first epoch in which the worker was ready and
            others had its core; None where nobody says it), ``core_use`` (`nugnn.planning.in_use.CoreUse` over that
            time, as a dict; None where nobody says it, or it was too short to tell); of a graph ``nodes``, ``edges``,
            ``halo_rows`` and, where it is split, ``halo`` (the wire, bytes, and each exchange, see ``docs/halo.md``),
            of samples ``batch_samples`` (of this rank in a full batch) and ``samples`` (of all ranks in an epoch);
            ``grad_sync`` of several ranks: what gradients have sent, and how long they were waited for, see
            ``docs/communication.md``, with the ``choice`` of ``auto``, see
            `nugnn.comm.compression.choice.Choice`.
        time_to_best_seconds: From the first epoch's start to the end of the best one.
        notes: Sentences for the user, on how the data were divided.
        timeline: A step of all ranks, of the last ones that with the median time, where the option ``timeline`` was on;
            None otherwise. See `nugnn.planning.timeline.Timeline`: a picture in text, JSON for Perfetto.
        moves: Moves of nodes between workers, in order: ``after_epoch``, ``is_return`` (whether it takes back the one
            before), ``seconds``, ``nodes``, ``share`` of all nodes, ``counts`` (from each worker to each),
            ``compute_seconds`` of each worker before and ``predicted_compute_seconds``, ``halo_rows`` (before, after),
            ``epoch_seconds`` before.
        plan: What was expected, where a plan was made.
        held: The run beside that, and how far such plans have been off so far; see `nugnn.held_run.HeldRun`.
    """

    model: nn.Module
    history: list[Epoch]
    best: Epoch
    logits: Tensor
    rank_reports: list[dict[str, Any]]
    time_to_best_seconds: float
    notes: tuple[str, ...] = field(default=())
    timeline: Timeline | None = None
    moves: tuple[dict[str, Any], ...] = field(default=())
    plan: Plan | None = None
    held: HeldRun | None = None

    def __repr__(self) -> str:
        best = f"epoch {self.best.number} of {len(self.history)}, val {self.best.val:.4f}, test {self.best.test:.4f}"
        return f"FitResult({type(self.model).__name__}, best {best}, {counted(len(self.rank_reports), 'worker')})"

    @property
    def epoch_seconds(self) -> float:
        """Median over epochs, of the slowest rank."""
        return max(report["epoch_seconds"] for report in self.rank_reports)

    @property
    def batch_split(self) -> tuple[int, ...]:
        """Samples of each rank in a full batch; nothing for a graph."""
        return tuple(report["batch_samples"] for report in self.rank_reports if "batch_samples" in report)

    @property
    def samples_per_second(self) -> float | None:
        """Training samples of all ranks in a second; None for a graph."""
        samples = self.rank_reports[0].get("samples")
        return None if samples is None else samples / self.epoch_seconds


def result_of(model: nn.Module, outcomes: list[dict[str, Any]], notes: Sequence[str]) -> FitResult:
    """``outcomes`` of all ranks, from `nugnn.train_rank.train_rank`; only the first needs weights and logits."""
    trained = copy.deepcopy(model)
    trained.load_state_dict(outcomes[0]["state"])
    trained.eval()
    reports = [dict(outcome["report"]) for outcome in outcomes]
    steps = [report.pop("steps", None) for report in reports]
    return FitResult(
        model=trained,
        history=[Epoch(**epoch) for epoch in outcomes[0]["epochs"]],
        best=Epoch(**outcomes[0]["best"]),
        logits=outcomes[0]["logits"],
        rank_reports=reports,
        time_to_best_seconds=outcomes[0]["time_to_best_seconds"],
        notes=tuple(notes),
        timeline=_timeline(steps, [report["device"] for report in reports]),
        moves=tuple(outcomes[0].get("moves", ())),
    )


def _timeline(steps: Sequence[Any], names: Sequence[str]) -> Timeline | None:
    if steps[0] is None:
        return None
    from nugnn.measured_timeline import measured_timeline  # runs without do not load it

    return measured_timeline(steps, names)
