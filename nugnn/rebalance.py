"""Nodes move between the workers of `nugnn.fit` while these train, and all that a run holds for them follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from nugnn.balancer import Balancer
from nugnn.held_rows import HeldRows
from nugnn.node_move import NodeMove
from nugnn.own_rows import sharded_names
from nugnn.planning.imbalance import Levelling, RebalanceRules
from nugnn.planning.work_model import WorkModel

if TYPE_CHECKING:
    from nugnn.graph_family import GraphFamily
    from nugnn.trainer import History, Trainer

OnMove = Callable[[nn.Module, NodeMove], Any]
"""``on_move(model, move)``: called on each rank after a move, for whatever holds rows that nuGNN does not know."""

_CHOICES = "auto, off, or nugnn.RebalanceRules"


def checked_rules(choice: str | RebalanceRules, work: WorkModel | None = None) -> RebalanceRules | None:
    """The rules that ``choice`` means; None for ``off``.

    Args:
        choice: One of the names, or rules.
        work: What parts are predicted by where ``choice`` has nothing of its own for that.

    Raises:
        ValueError: There is no such choice.
    """
    if isinstance(choice, RebalanceRules):
        return choice if work is None or choice.work is not None else replace(choice, work=work)
    if choice not in ("auto", "off"):
        raise ValueError(f"rebalance is {choice!r}, must be {_CHOICES}")
    return RebalanceRules(work=work) if choice == "auto" else None


class Rebalancer:
    """Watches over a trainer's epochs and moves nodes; every rank has one.

    Args:
        trainer: Of ``family``.
        family: Whose nodes move.
        rules: When.
        on_move: Called on each rank after a move.
    """

    def __init__(
        self, trainer: Trainer, family: GraphFamily, rules: RebalanceRules, on_move: OnMove | None = None
    ) -> None:
        self._trainer, self._family, self._on_move = trainer, family, on_move
        self._balancer = Balancer(family.ranks, rules)
        self._is_off = False

    def between_epochs(self, history: History, epochs_left: int) -> str | None:
        """Move nodes where that pays by now; a collective call, after each epoch but the last.

        A move is added to ``history.moves``.

        Returns:
            A sentence for the user, if something was done, or cannot be done.
        """
        if self._is_off:
            return None
        seconds = history.epochs[-1].seconds
        self._balancer.note(seconds["compute"], seconds["epoch"])
        destination = self._balancer.propose(self._family.graph, epochs_left)
        if destination is None:
            shortfall = self._balancer.take_shortfall()
            return None if shortfall is None else shortfall_text(len(history.epochs), *shortfall)
        trainer = self._trainer
        held = HeldRows(trainer.model, trainer.optimizer, self._family.graph, trusts_user=self._on_move is not None)
        if held.why_not is not None:
            self._is_off = True
            return f"workers end at different times, but no nodes move between them: {held.why_not}"
        move = self._family.move(destination, held)
        for name in sharded_names(trainer.model) & history.best_state.keys():
            history.best_state[name] = move.rows(history.best_state[name])
        trainer.forget_recorded()
        if self._on_move is not None:
            self._on_move(trainer.model, move)
        level, took, epoch_seconds = self._balancer.has_moved()
        record = move_record(len(history.epochs), move, level, epoch_seconds, took)
        history.moves.append(record)
        history.num_on_another_split = len(history.epochs)
        history.elapsed_seconds += took
        return move_text(record)


def move_record(
    epoch: int, move: NodeMove, level: Levelling, epoch_seconds: float, took_seconds: float
) -> dict[str, Any]:
    """What is kept of a move: plain values, the same on every rank.

    Args:
        epoch: After which.
        move: As it was made.
        level: What was measured before it and is predicted.
        epoch_seconds: That passed in an epoch before.
        took_seconds: All that belongs to the move, from the choice of nodes on.
    """
    return {
        "after_epoch": epoch,
        "seconds": took_seconds,
        "nodes": move.num_moved,
        "share": move.num_moved / move.graph.num_nodes_global(),
        "counts": [[n if p != q else 0 for q, n in enumerate(row)] for p, row in enumerate(move.counts)],
        "compute_seconds": list(level.seconds),
        "predicted_compute_seconds": list(level.predicted),
        "halo_rows": list(move.num_halo),
        "epoch_seconds": epoch_seconds,
    }


def move_text(record: dict[str, Any]) -> str:
    """``record``, from `move_record`, in a sentence."""
    seconds, predicted = record["compute_seconds"], record["predicted_compute_seconds"]
    slowest, fastest = max(seconds), min(seconds)
    rank = seconds.index(slowest)
    ways = [f"{n:,} from worker {p} to {q}" for p, row in enumerate(record["counts"]) for q, n in enumerate(row) if n]
    shown = "; ".join(ways[:4]) + ("; …" if len(ways) > 4 else "")
    halo_before, halo_now = record["halo_rows"]
    return (
        f"after epoch {record['after_epoch']}: worker {rank} computes for {_shown(slowest)} in an epoch, another one "
        f"for {_shown(fastest)}. Moved {record['nodes']:,} nodes ({record['share']:.1%}) in "
        f"{_shown(record['seconds'])}: {shown}. The slowest should take {_shown(max(predicted))} now; "
        f"halo rows {halo_before:,} before, {halo_now:,} now"
    )


def shortfall_text(epoch: int, promised: float, brought: float) -> str:
    """What came of a move, where that is less than half of what was promised."""
    came = f"brought {_shown(brought)}" if brought > 0 else f"the slowest takes {_shown(-brought)} longer than before"
    return (
        f"after epoch {epoch}: the last move was to save {_shown(promised)} of an epoch, and {came}; the next one "
        "waits longer"
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
