"""Peak memory and time of an epoch for each ``--activations``, on deep models.

    python benchmarks/gpu_activations.py --out rows                 # SAGE and GAT of 8 layers, a quarter of full size
    python benchmarks/gpu_activations.py --device cpu --nodes 2000 --arcs 20000 --epochs 2

``blocks`` is a model whose layers are modules of its own: `SAGEConv`, layer norm, relu and dropout in each. The losses
of all epochs have to be the bits of ``keep``; a choice whose losses differ has no times.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import nugnn  # before dgl: it lets DGL import beside a torch newer than its binaries

# isort: split
import torch
from dgl.nn import SAGEConv
from gpu_epoch import Case, Run, adam, time_epochs
from harness import Recorder, brief, free_memory, timing_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES

MODELS = ("blocks", "sage", "gat")
CHOICES = ("keep", "recompute", "offload")


class _Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = SAGEConv(width, out, "mean"), nn.LayerNorm(out), nn.Dropout(0.3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.drop(F.relu(self.norm(self.conv(graph, x))))  # type: ignore[no-any-return]


class _Blocks(nn.Module):
    def __init__(self, num_features: int, num_classes: int, layers: int, hidden: int) -> None:
        super().__init__()
        widths = [num_features] + [hidden] * (layers - 1)
        self.blocks = nn.ModuleList(_Block(a, b) for a, b in pairwise(widths))
        self.last = SAGEConv(hidden, num_classes, "mean")

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(graph, x)
        return self.last(graph, x)  # type: ignore[no-any-return]


def make_run(model: str, case: Case, activations: str, precision: str, arguments: argparse.Namespace) -> Run:
    """A trainer on the graph of ``case``, over all of whose nodes the loss is taken."""
    torch.manual_seed(arguments.seed)
    sizes = (case.num_features, case.num_classes)
    layers, hidden = arguments.layers, arguments.hidden
    if model == "blocks":
        net: nn.Module = _Blocks(*sizes, layers, hidden)
    else:
        heads = 4 if model == "gat" else 1
        net = nugnn.GNN(model, *sizes, layers=layers, hidden=hidden // heads, heads=heads, dropout=0.3)
    graph = case.shard_graph("none")
    rows = {"train": torch.arange(case.num_nodes, device=case.device)}
    net.to(case.device)
    family = nugnn.GraphFamily(net, graph, rows, precision=precision, activations=activations)
    trainer = nugnn.Trainer(family, make_optimizer=lambda model: adam(model.parameters(), case.device))
    return Run(lambda: torch.as_tensor(trainer.train_epoch()), lambda: family.predict(trainer.num_steps))


def measure(recorder: Recorder, case: Case, model: str, precision: str, arguments: argparse.Namespace) -> None:
    """A row for each choice."""
    expected: list[float] = []
    for activations in CHOICES:
        row = {"kind": "activations", "system": activations, "model": model, "graph": case.name, "dtype": precision}
        row |= {"shape": f"{model} {arguments.layers}x{arguments.hidden}", "num_nodes": case.num_nodes}
        row |= {"num_edges": case.num_edges, "seed": arguments.seed, "dropout": 0.3}
        run, timing = None, None
        try:
            run = make_run(model, case, activations, precision, arguments)
            free_memory()
            samples, losses, most = time_epochs(run, arguments.epochs, case.device)
            expected = expected or losses
            row |= {"losses": losses, "peak_bytes": most, "samples_ms": samples}
            if losses == expected:
                timing = timing_of(samples)
            else:
                row |= {"error": f"losses {losses} are not {expected}"}
        except Exception as error:
            row |= {"error": brief(error)}
        del run
        free_memory()
        recorder.add(row, timing)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nodes", type=int, default=FULL_NODES // 4)
    parser.add_argument("--arcs", type=int, default=FULL_ARCS // 4 & -2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "tf32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for gpu_activations.jsonl")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device(arguments.device)
    recorder = Recorder(None if arguments.out is None else arguments.out / "gpu_activations.jsonl", device)
    case = Case("products-like", arguments.nodes, arguments.arcs, arguments.seed, device)
    for model in arguments.models:
        for precision in arguments.precisions:
            measure(recorder, case, model, precision, arguments)


if __name__ == "__main__":
    main()
