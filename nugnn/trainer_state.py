"""What a trainer has to remember to go on later, by name, and how it comes back on the same or on another split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nugnn.checkpoint import Checkpoint, CheckpointError
from nugnn.checkpoint_tree import Tree
from nugnn.comm.compression.gradient_sync import add_residuals, even_share
from nugnn.fingerprint import differences
from nugnn.own_rows import sharded_names

if TYPE_CHECKING:
    from nugnn.history import History
    from nugnn.trainer import Trainer

_SECONDS = ("epoch", "compute", "halo", "sync", "evaluate")


def capture(trainer: Trainer, history: History) -> tuple[Tree, Tree]:
    """``(shared, own)``: what is the same on every rank, and what this rank alone knows; nothing is copied.

    ``own`` holds the rows of node embeddings and of their optimizer state, with the global ids of the nodes.
    """
    optimizer, names = trainer.optimizer, _parameter_names(trainer.model)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise ValueError(
                    f"the optimizer holds a tensor of shape {tuple(p.shape)} that is no parameter of the model; a "
                    "checkpoint could not bring it back"
                )
    sharded, device = sharded_names(trainer.model), trainer.ranks.device
    model, best = _whole_state(trainer.model), history.best_state
    states = {names[id(p)]: dict(state) for p, state in optimizer.state.items()}
    epochs = history.epochs
    shared = {
        "num_nodes": trainer.family.num_rows_global,
        "num_steps": trainer.num_steps,
        "loss_scale": trainer.loss_scale.state(),
        "model": {name: value for name, value in model.items() if name not in sharded},
        "best_model": {name: value for name, value in best.items() if name not in sharded},
        "optimizer": {name: state for name, state in states.items() if name not in sharded},
        "optimizer_kind": type(optimizer).__qualname__,
        "first_groups": trainer.first_groups,
        "groups": plain_groups(optimizer, names),
        "schedule": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "schedule_kind": _schedule_kind(trainer),
        "epochs": torch.tensor([[e.loss, e.train, e.val, e.test] for e in epochs], dtype=torch.float64),
        "best_epoch": 0 if history.best is None else history.best.number,
        "elapsed_seconds": history.elapsed_seconds,
        "time_to_best_seconds": history.time_to_best_seconds,
        "weight_in_progress": trainer.in_progress.weight,
        "grad_sync": trainer.grad_sync.shared_state(),
        "moves": list(history.moves),
        "num_on_another_split": history.num_on_another_split,
    }
    own = {
        "node_ids": trainer.family.row_ids,
        "first_split": trainer.family.first_split,
        "division": list(trainer.family.division),
        "model": {name: value for name, value in model.items() if name in sharded},
        "best_model": {name: value for name, value in best.items() if name in sharded},
        "optimizer": {name: state for name, state in states.items() if name in sharded},
        "random_state": torch.get_rng_state(),
        "gpu_random_state": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "seconds": torch.tensor([[e.seconds[name] for name in _SECONDS] for e in epochs], dtype=torch.float64),
        "in_progress": {"loss": trainer.in_progress.loss, "seconds": dict(trainer.in_progress.seconds)},
        "residuals": trainer.grad_sync.residuals,
        "family_rows": trainer.family.own_rows(),
        "family_state": trainer.family.own_state(),
    }
    return shared, own


def restore(trainer: Trainer, checkpoint: Checkpoint) -> History:
    """Put ``trainer`` where the checkpoint was written; a collective call.

    With the split of the checkpoint every bit comes back; with another one the rows of node embeddings go to the ranks
    that own the nodes now. Where rows had moved since the run began on the present split, they move again first.

    Raises:
        CheckpointError: The optimizer or the schedule is another one, listing what differs; or rows had moved, and the
            model does not let them move here.
    """
    shared = checkpoint.read_shared()
    _check_optimizer(trainer, shared, checkpoint)
    if shared.get("moves"):
        _move_as_then(trainer, checkpoint)
    same_split, own = _own_part(trainer, checkpoint)
    state = {**shared["model"], **own["model"]}
    _load_state(trainer.model, state, checkpoint)
    _load_optimizer(trainer.optimizer, {**shared["optimizer"], **own["optimizer"]}, shared["groups"], trainer.model)
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(shared["schedule"])
    trainer.num_steps = shared["num_steps"]
    _load_in_progress(trainer, shared, own)
    trainer.grad_sync.load(shared.get("grad_sync"), own.get("residuals", {}))
    trainer.family.load_own_rows(own.get("family_rows", {}))
    trainer.family.load_own_state(own.get("family_state", {}))
    if "loss_scale" in shared:  # not in checkpoints written before there was one
        trainer.loss_scale.load(shared["loss_scale"])
    torch.set_rng_state(own["random_state"].clone())
    if trainer.ranks.device.type == "cuda" and own.get("gpu_random_state") is not None:
        torch.cuda.set_rng_state(own["gpu_random_state"].clone(), trainer.ranks.device)
    return _history(shared, own, is_same_split=same_split)


def _move_as_then(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Bring rows to the ranks that had them, if the run had begun with the split of this one; a collective call."""
    ranks, differs = trainer.ranks, True
    if ranks.world_size == checkpoint.num_parts:
        first = checkpoint.read_rank(ranks.rank, ("first_split",)).get("first_split")
        differs = first is None or first != trainer.family.first_split
    if not bool(ranks.max_(torch.tensor([float(differs)]))):
        why_not = trainer.family.move_as(lambda rank: checkpoint.read_rank(rank, ("node_ids",))["node_ids"], trainer)
        if why_not is not None:
            raise CheckpointError(
                f"{checkpoint.folder} is of a run whose nodes moved between workers, and here they cannot: {why_not}"
                ". Give rebalance and on_move as that run had them, or go on with other shares, on which nodes stay "
                "where they are"
            )


def _load_in_progress(trainer: Trainer, shared: Tree, own: Tree) -> None:
    """What the steps of an epoch in progress have left; nothing, in checkpoints written before there were such."""
    from nugnn.history import EpochInProgress

    trainer.in_progress = EpochInProgress()
    if "in_progress" in own:
        weight, saved = shared["weight_in_progress"], own["in_progress"]
        trainer.in_progress = EpochInProgress(
            loss=saved["loss"].clone(), weight=_on(weight, trainer.ranks.device), seconds=dict(saved["seconds"])
        )


def recorded_history(checkpoint: Checkpoint) -> History:
    """The epochs of a checkpoint as rank 0 saw them, without weights."""
    shared = checkpoint.read_shared()
    shared["best_model"] = {}
    own = checkpoint.read_rank(0)
    return _history(shared, {"seconds": own["seconds"], "best_model": {}}, is_same_split=True)


def plain_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[dict[str, Any]]:
    """The optimizer's groups as they are now, by names of parameters; a tensor of another place is called ``?``."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        | {"params": [names.get(id(p), "?") for p in group["params"]]}
        for group in optimizer.param_groups
    ]


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def _whole_state(model: nn.Module) -> dict[str, Any]:
    """``state_dict`` and the buffers that it leaves out: they too may change from step to step."""
    return {**dict(model.named_buffers()), **model.state_dict()}


def _load_state(model: nn.Module, state: dict[str, Any], checkpoint: Checkpoint) -> None:
    persistent = model.state_dict().keys()
    try:
        model.load_state_dict({name: value for name, value in state.items() if name in persistent})
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.folder} does not fit the model: {' '.join(str(error).split())}") from None
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in state and name not in persistent:
                buffer.copy_(state[name])


# -- optimizer -----------------------------------------------------------------------------------------------------


def _check_optimizer(trainer: Trainer, shared: Tree, checkpoint: Checkpoint) -> None:
    """The optimizer as it was made, and the kind of schedule, are those of the checkpoint."""
    changes = differences(
        "",
        {
            "optimizer": shared["optimizer_kind"],
            "schedule": shared["schedule_kind"],
            "number of optimizer groups": len(shared["first_groups"]),
        },
        {
            "optimizer": type(trainer.optimizer).__qualname__,
            "schedule": _schedule_kind(trainer),
            "number of optimizer groups": len(trainer.first_groups),
        },
    )
    if not changes:
        for number, (before, now) in enumerate(zip(shared["first_groups"], trainer.first_groups, strict=True)):
            changes += differences(f"optimizer group {number}: ", before, now)
    if changes:
        raise CheckpointError(
            f"{checkpoint.folder} is of another run: {'; '.join(changes)}. Give what was given then, or train without "
            "--resume to start anew"
        )


def _schedule_kind(trainer: Trainer) -> str | None:
    if trainer.schedule is not None:
        return repr(trainer.schedule)
    return None if trainer.scheduler is None else type(trainer.scheduler).__qualname__


def _load_optimizer(
    optimizer: torch.optim.Optimizer, states: dict[str, Any], groups: list[dict[str, Any]], model: nn.Module
) -> None:
    """Values as they were saved: `Optimizer.load_state_dict` would cast state to the parameter's type."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for name, state in states.items():
        device = parameters[name].device
        optimizer.state[parameters[name]] = {
            # torch keeps the count of steps on the CPU
            key: _on(value, torch.device("cpu") if key == "step" else device)
            for key, value in state.items()
        }
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _on(value: Tree, device: torch.device) -> Tree:
    """Tensors in memory of their own on ``device``."""
    if isinstance(value, Tensor):
        return value.clone().to(device)
    if isinstance(value, dict):
        return {key: _on(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on(item, device) for item in value)
    return value


# -- rows of this rank ---------------------------------------------------------------------------------------------


def _own_part(trainer: Trainer, checkpoint: Checkpoint) -> tuple[bool, Tree]:
    """Whether the split is the checkpoint's, on every rank, and what this rank has to know."""
    ranks, node_ids = trainer.ranks, trainer.family.row_ids
    own = checkpoint.read_rank(ranks.rank) if ranks.rank < checkpoint.num_parts else None
    differs = ranks.world_size != checkpoint.num_parts or own is None or not torch.equal(own["node_ids"], node_ids)
    differs = differs or own is None or own.get("division", []) != list(trainer.family.division)
    if not bool(ranks.max_(torch.tensor([float(differs)]))):
        assert own is not None
        return True, own
    gathered: _Rows | None = None
    first: Tree = None
    loss_in_progress = torch.zeros((), dtype=torch.float64)
    owed: dict[str, Tensor] = {}
    for rank in range(checkpoint.num_parts):  # one at a time: no rank ever holds all rows
        part = checkpoint.read_rank(rank)
        loss_in_progress += part.get("in_progress", {}).get("loss", 0.0)
        add_residuals(owed, part.get("residuals", {}))
        leaves: dict[tuple[str, ...], Any] = {}
        for kind in ("model", "best_model"):
            leaves |= {(kind, name): value for name, value in part[kind].items()}
        for name, state in part["optimizer"].items():
            leaves |= {("optimizer", name, key): value for key, value in state.items()}
        if gathered is None:
            gathered, first = _Rows(node_ids, {}), part
        leaves |= {("family_rows", name): rows for name, rows in part.get("family_rows", {}).items()}
        gathered.add(part["node_ids"], leaves)
    assert gathered is not None
    moved: dict[str, Any] = {"model": {}, "best_model": {}, "optimizer": {}, "family_rows": {}}
    for (kind, *path), value in gathered.leaves.items():
        if kind == "optimizer":
            moved[kind].setdefault(path[0], {})[path[1]] = value
        else:
            moved[kind][path[0]] = value
    # what is drawn at random on a split graph is the same on every rank, so their generators are too
    others = {name: first[name] for name in ("random_state", "seconds", "in_progress") if name in first}
    if "in_progress" in others:  # the shares of all ranks, on one of them
        others["in_progress"] = others["in_progress"] | {"loss": loss_in_progress * (ranks.rank == 0)}
    return False, moved | others | {"residuals": even_share(owed, ranks.world_size)}


@dataclass
class _Rows:
    """Collects the rows of some nodes from parts that hold them in another order.

    Args:
        node_ids: ``(N,)`` global ids; their rows are wanted in this order.
        leaves: What was collected, by path.
    """

    node_ids: Tensor
    leaves: dict[tuple[str, ...], Any]

    def add(self, part_ids: Tensor, leaves: dict[tuple[str, ...], Any]) -> None:
        """Take what is wanted out of one part."""
        sorted_ids, order = self.node_ids.sort()
        place = torch.searchsorted(sorted_ids, part_ids).clamp(max=len(sorted_ids) - 1)
        is_wanted = sorted_ids[place] == part_ids
        to = order[place[is_wanted]]
        for path, value in leaves.items():
            if isinstance(value, Tensor) and value.dim() and len(value) == len(part_ids):
                if path not in self.leaves:
                    self.leaves[path] = value.new_empty((len(self.node_ids), *value.shape[1:]))
                self.leaves[path][to] = value[is_wanted]
            elif path not in self.leaves:
                self.leaves[path] = value
            elif not _same(self.leaves[path], value):
                raise CheckpointError(
                    f"{'.'.join(path)} differs from worker to worker and is not one row for each node, so it cannot "
                    "be split in another way; resume with the workers and shares of the checkpoint"
                )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


# -- history -------------------------------------------------------------------------------------------------------


def _history(shared: Tree, own: Tree, *, is_same_split: bool) -> History:
    from nugnn.history import History

    epochs = list(_epochs(shared["epochs"].tolist(), own["seconds"].tolist()))
    return History(
        epochs=epochs,
        best=epochs[shared["best_epoch"] - 1] if shared["best_epoch"] else None,
        best_state={name: _on(value, torch.device("cpu")) for name, value in shared["best_model"].items()}
        | {name: _on(value, torch.device("cpu")) for name, value in own["best_model"].items()},
        elapsed_seconds=shared["elapsed_seconds"],
        time_to_best_seconds=shared["time_to_best_seconds"],
        num_on_another_split=shared.get("num_on_another_split", 0) if is_same_split else len(epochs),
        moves=list(shared.get("moves", [])),
    )


def _epochs(scores: list[list[float]], seconds: list[list[float]]) -> Iterator[Any]:
    from nugnn.history import Epoch

    for number, ((loss, train, val, test), times) in enumerate(zip(scores, seconds, strict=True), 1):
        yield Epoch(number, loss, train, val, test, dict(zip(_SECONDS, times, strict=True)))
