"""Nodes move between the workers of `nugnn.fit` while these train, and all that a run holds for them follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from nugnn._counted import counted
from nugnn.balancer import Balancer
from nugnn.held_rows import HeldRows
from nugnn.node_move import NodeMove
from nugnn.own_rows import sharded_names
from nugnn.planning.imbalance import Levelling, RebalanceRules
from nugnn.planning.imbalance_watch import Shortfall
from nugnn.planning.work_model import WorkModel

if TYPE_CHECKING:
    from nugnn.graph_family import GraphFamily
    from nugnn.history import History
    from nugnn.trainer import Trainer

OnMove = Callable[[nn.Module, NodeMove], Any]
"""``on_move(model, move)``: called on each rank after a move, for whatever holds rows that nuGNN does not know."""

_CHOICES = "auto, off, or nugnn.RebalanceRules"


@dataclass(frozen=True, kw_only=True)
class PlannedBalance:
    """What a plan knows of moves: see the fields of `nugnn.planning.imbalance.RebalanceRules`."""

    work: WorkModel | None = None
    whole: WorkModel | None = None
    left_out: frozenset[int] = frozenset()


def checked_rules(choice: str | RebalanceRules, planned: PlannedBalance | None = None) -> RebalanceRules | None:
    """The rules that ``choice`` means; None for ``off``.

    Args:
        choice: One of the names, or rules.
        planned: What a plan knows; its models are left out where ``choice`` has one of its own.

    Raises:
        ValueError: There is no such choice.
    """
    if not isinstance(choice, RebalanceRules):
        if choice not in ("auto", "off"):
            raise ValueError(f"rebalance is {choice!r}, must be {_CHOICES}")
        if choice == "off":
            return None
        choice = RebalanceRules()
    if planned is None:
        return choice
    if choice.work is None:
        choice = replace(choice, work=planned.work, whole=planned.whole)
    return replace(choice, left_out=choice.left_out | planned.left_out)


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
        """Move nodes where that pays by now, or back; a collective call, after each epoch but the last.

        A move is added to ``history.moves``.

        Returns:
            A sentence for the user, if something was done, or cannot be done.
        """
        if self._is_off:
            return None
        seconds = history.epochs[-1].seconds
        self._balancer.note(seconds["compute"], seconds["epoch"])
        proposal = self._balancer.propose(self._family.graph, epochs_left)
        if proposal is None:
            shortfall = self._balancer.take_shortfall()
            return None if shortfall is None else shortfall_text(len(history.epochs), shortfall)
        trainer = self._trainer
        held = HeldRows(trainer.model, trainer.optimizer, self._family.graph, trusts_user=self._on_move is not None)
        if held.why_not is not None:
            self._is_off = True
            wish = (
                "epochs are longer since nodes moved" if proposal.level.is_return else "workers end at different times"
            )
            return f"{wish}, but no nodes move between them: {held.why_not}"
        move = self._family.move(proposal.destination, held, arranged_as=proposal.arranged_as)
        for name in sharded_names(trainer.model) & history.best_state.keys():
            history.best_state[name] = move.rows(history.best_state[name])
        trainer.forget_recorded()
        if self._on_move is not None:
            self._on_move(trainer.model, move)
        level, took, epoch_seconds = self._balancer.has_moved(move)
        record = move_record(len(history.epochs), move, level, epoch_seconds, took)
        said = return_text(record, history.moves[-1]) if level.is_return else move_text(record)
        history.moves.append(record)
        history.num_on_another_split = len(history.epochs)
        history.elapsed_seconds += took
        return said


def move_record(
    epoch: int, move: NodeMove, level: Levelling, epoch_seconds: float, took_seconds: float
) -> dict[str, Any]:
    """What is kept of a move: plain values, the same on every rank.

    What is predicted of a return is what was measured before the move that it takes back.

    Args:
        epoch: After which.
        move: As it was made.
        level: What was measured before it and is predicted.
        epoch_seconds: That passed in an epoch before.
        took_seconds: All that belongs to the move, from the choice of nodes on.
    """
    return {
        "after_epoch": epoch,
        "is_return": level.is_return,
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
    return (
        f"after epoch {record['after_epoch']}: worker {rank} computes for {_shown(slowest)} in an epoch, another one "
        f"for {_shown(fastest)}. Moved {_what_moved(record)}. The slowest should take {_shown(max(predicted))} now; "
        f"{_halo_rows(record)}"
    )


def return_text(record: dict[str, Any], taken_back: dict[str, Any]) -> str:
    """``record`` of a return, and that of the move which it takes back, in a sentence."""
    return (
        f"after epoch {record['after_epoch']}: an epoch takes {_shown(record['epoch_seconds'])} since nodes moved "
        f"after epoch {taken_back['after_epoch']}, and took {_shown(taken_back['epoch_seconds'])} before. Moved back "
        f"{_what_moved(record)}; {_halo_rows(record)}. The next move waits longer"
    )


def _what_moved(record: dict[str, Any]) -> str:
    ways = [f"{n:,} from worker {p} to {q}" for p, row in enumerate(record["counts"]) for q, n in enumerate(row) if n]
    shown = "; ".join(ways[:4]) + ("; …" if len(ways) > 4 else "")
    nodes = counted(f"{record['nodes']:,}", "node")
    return f"{nodes} ({record['share']:.1%}) in {_shown(record['seconds'])}: {shown}"


def _halo_rows(record: dict[str, Any]) -> str:
    before, now = record["halo_rows"]
    return f"halo rows {before:,} before, {now:,} now"


def shortfall_text(epoch: int, shortfall: Shortfall) -> str:
    """What came of a move, in a sentence."""
    if shortfall.longer > 0:
        came = f"epochs are {_shown(shortfall.longer)} longer than before"
    elif shortfall.brought > 0:
        came = f"brought {_shown(shortfall.brought)}"
    else:
        came = f"the slowest takes {_shown(-shortfall.brought)} longer than before"
    return (
        f"after epoch {epoch}: the last move was to save {_shown(shortfall.promised)} of an epoch, and {came}; the "
        "next one waits longer"
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
