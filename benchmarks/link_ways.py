"""The ways in which `links.py` makes steps: those of our trainer on samples and on a graph, those of torch's peers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from link_rows import PEER_WAYS
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

AUTO_OF_SUMS = "auto of sums"
"""``auto`` that takes what sums alone say, and tries no steps."""
SAMPLE_WAYS = ("fp32", "bf16", "8bit", "4bit", "2bit", "powersgd", "auto", AUTO_OF_SUMS)
HALO_WAYS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {"halo_wire": "bf16"}),
    "int8": ("8bit", {"halo_wire": "int8"}),
    "int4": ("4bit", {"halo_wire": "int4"}),
    "int2": ("2bit", {"halo_wire": "int2"}),
    "int2+4bit": ("4bit", {"halo_wire": "int2"}),
    "powersgd": ("powersgd", {}),
    "stale": ("fp32", {"halo_mode": "stale"}),
    "sampled:0.1": ("fp32", {"halo_mode": "sampled:0.1"}),
    "auto": ("auto", {"halo_wire": "auto"}),
}
"""Of a graph: what gradients travel as, and how halo rows do."""
_BATCH, _TOKENS = 2, 8
_ONE_BUCKET_MB = 4096
_STEPS_TO_CHOOSE = 6
"""After which ``auto`` has chosen, for gradients and for halo rows, and sums begin in backward."""


class Way(Protocol):
    """One way for a model's steps."""

    lead_in: int
    """Steps before one that counts: late rows of a step travel during the next one."""

    def step(self) -> None:
        """One optimizer step."""
        ...

    def renew(self) -> str | None:
        """Decide anew what depends on the link; what was chosen."""
        ...

    def counts(self) -> tuple[float, float]:
        """``(bytes handed over, halo rows among them)`` so far."""
        ...


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)


class OfTrainer:
    """Steps of our trainer.

    Args:
        model: On this rank; a copy is trained.
        family_of: Gives the copy's family, with one step an epoch.
        name: ``grad_sync``, or `AUTO_OF_SUMS`.
        lead_in: See `Way`.
    """

    def __init__(self, model: nn.Module, family_of: Callable[[nn.Module], Any], name: str, lead_in: int = 0) -> None:
        self._model, self._family_of, self._name, self.lead_in = model, family_of, name, lead_in
        self._begin()

    def _begin(self) -> None:
        import nugnn

        self._family = self._family_of(copy.deepcopy(self._model))
        grad_sync = "auto" if self._name == AUTO_OF_SUMS else self._name
        self.trainer = nugnn.Trainer(self._family, make_optimizer=sgd, grad_sync=grad_sync, check_replicas=0)
        if self._name == AUTO_OF_SUMS:
            self.trainer.grad_sync.open(1.0)  # once a step has begun, no others are tried

    def step(self) -> None:
        self.trainer.train_epoch()

    def renew(self) -> str | None:
        if self._name not in ("auto", AUTO_OF_SUMS):
            return None
        self._begin()
        for _ in range(_STEPS_TO_CHOOSE):
            self.step()
        chosen = str(self.trainer.grad_sync.report()["choice"]["name"])
        values = self._family.report().get("halo", {}).get("plan", {}).get("values", {})
        of_rows = max(values, key=values.get, default=None)
        return chosen if of_rows is None else f"{chosen}+{of_rows}"

    def counts(self) -> tuple[float, float]:
        gradients = (self.trainer.grad_sync.report() or {"sent_bytes": 0})["sent_bytes"]
        halo = self._family.report().get("halo", {})
        rows = halo.get("forward_bytes", 0) + halo.get("gradient_bytes", 0)
        return gradients + rows, rows


class OfPeer:
    """Steps of torch's DistributedDataParallel.

    Args:
        model: On this rank.
        batch: Of this rank, the same in each step.
        ranks: Who takes part.
        hook: ``ddp``, ``ddp fp16`` or ``ddp powersgd``.
    """

    lead_in = 0

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor], ranks: Any, hook: str) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        group = dist.new_group(backend="gloo")
        self._batch, self._optimizer = batch, sgd(model)
        whole = {"bucket_cap_mb": _ONE_BUCKET_MB} if hook == "ddp powersgd" else {}
        self._model = nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True, static_graph=True, **whole
        )
        if hook == "ddp fp16":
            self._model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        elif hook == "ddp powersgd":
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
            self._model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step(self) -> None:
        x, labels = self._batch
        loss = F.cross_entropy(self._model(x), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()

    def renew(self) -> str | None:
        return None

    def counts(self) -> tuple[float, float]:
        return 0.0, 0.0


def sample_ways(name: str, ranks: Any, columns: Sequence[str], seed: int) -> tuple[int, dict[str, Way]]:
    """``(parameters, ways)`` of ``transformer`` or ``mlp``."""
    import nugnn
    from nugnn.comm.groups import Ranks
    from nugnn.networks import MLP, TransformerClassifier

    torch.manual_seed(seed)
    num = _BATCH * ranks.world_size
    if name == "mlp":
        model: nn.Module = MLP(784, 10, hidden=3072, layers=4, dropout=0.1)
        x = torch.rand(num, 784)
    else:
        model = TransformerClassifier(4000, 10, width=512, heads=8, layers=6, max_length=16)
        x = torch.randint(2, 4000, (num, _TOKENS))
    data = TensorDataset(x, torch.arange(num) % 10)
    own = TensorDataset(*(part[ranks.rank * _BATCH :][:_BATCH] for part in data.tensors))

    def ours(way: str) -> Way:
        alone = way == "compute"
        family_of = functools.partial(
            nugnn.SampleFamily,
            train=own if alone else data,
            ranks=Ranks() if alone else ranks,
            sizes=(_BATCH,) * (1 if alone else ranks.world_size),
        )
        return OfTrainer(model, family_of, "fp32" if alone else way)

    found: dict[str, Way] = {"compute": ours("compute")}
    found |= {way: ours(way) for way in SAMPLE_WAYS if way in columns}
    for way in PEER_WAYS:
        if way in columns:
            found[way] = OfPeer(copy.deepcopy(model), own.tensors, ranks, way)  # type: ignore[arg-type]
    return sum(p.numel() for p in model.parameters()), found


def halo_ways(ranks: Any, columns: Sequence[str], num_nodes: int, seed: int) -> tuple[int, dict[str, Way]]:
    """``(halo rows of this rank, ways)`` of the graph."""
    import nugnn
    from nugnn.datasets import products_like

    data = products_like(num_nodes, seed=seed)
    graph = nugnn.shard(data, ranks)
    torch.manual_seed(seed)
    model = nugnn.GNN("sage", data.num_features, data.num_classes, layers=3, hidden=256, aggregator="mean", dropout=0.5)
    rows = torch.arange(graph.num_nodes())
    splits = {"train": rows, "val": rows[:0], "test": rows[:0]}
    found: dict[str, Way] = {}
    for way, (gradients, how) in HALO_WAYS.items():
        if way in columns:
            family_of = functools.partial(nugnn.GraphFamily, graph=graph, rows=splits, **how)
            found[way] = OfTrainer(model, family_of, gradients, lead_in=int(way == "stale"))
    return graph.index.plan.num_halo, found
