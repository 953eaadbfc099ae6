"""The trainer on batches of samples beside a plain loop of PyTorch with DistributedDataParallel: samples a second.

    python benchmarks/dnn_throughput.py                             # CPU, 2 ranks, gloo; a few minutes
    python benchmarks/dnn_throughput.py --device cuda --ranks 1 2   # GPUs, NCCL; fp32, tf32 and amp; under 100 s

Both loops train in the same processes, in turn, round by round: the same model with the same weights, the same
samples in the same even batches through the same kind of loader, the same fused optimizer, the same rounding of
products and convolutions. On GPUs our steps are what a user gets who asks for nothing (``--cuda-graphs auto``): CUDA
graphs, for these models; rows say so. The plain loop has none, as most loops do not. There is a row for each
precision: ``fp32`` (IEEE, convolutions too: torch's default rounds those to TF32), ``tf32`` (products and
convolutions), ``amp`` (autocast to bfloat16); images and convolutions are channels-last on both sides.
DistributedDataParallel runs with ``gradient_as_bucket_view`` and ``static_graph``.

The ratio of a row is the median over rounds of ours / plain; the smallest and largest stand beside it. Beside the time
by the clock stands that of the processor, which means something where other work keeps the machine busy. Batch norm:
each rank's own rows, as DistributedDataParallel has it (``local``; both make running statistics equal in each step),
and over all ranks beside SyncBatchNorm on GPUs (``all``). First the losses of both without dropout have to agree; a row
whose do not has no speed. On one rank the plain loop runs without DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
CUDA_GRAPHS = ("auto", "on", "off")
LOSS_RTOL = {"fp32": 1e-4, "tf32": 1e-2, "amp": 2e-2}
"""Two float32 steps whose sums are in another order; TF32 and bfloat16 keep 11 and 8 bits of a factor."""


@dataclass(frozen=True)
class Case:
    """One model at one size.

    Args:
        name: Of the row.
        make: Gives the model.
        x: Gives the inputs of ``n`` samples.
        num_classes: Width of the result.
        batch: Samples of a rank in a batch.
        has_batch_norm: Whether there is a choice of whose rows it counts.
        is_channels_last: Whether images and weights of convolutions lie channel by channel last, for both loops.
    """

    name: str
    make: Callable[[], nn.Module]
    x: Callable[[int], Tensor]
    num_classes: int
    batch: int
    has_batch_norm: bool = False
    is_channels_last: bool = False

    def model(self) -> nn.Module:
        return self.make().to(memory_format=torch.channels_last) if self.is_channels_last else self.make()

    def data(self, num: int) -> TensorDataset:
        x = self.x(num)
        x = x.contiguous(memory_format=torch.channels_last) if self.is_channels_last else x
        return TensorDataset(x, torch.randint(0, self.num_classes, (num,)))


def cases(device: str, names: list[str] | None) -> list[Case]:
    """What runs on ``device``; ResNet-50 where torchvision is."""
    from nugnn.networks import CNN, MLP, TransformerClassifier

    def images(*shape: int) -> Callable[[int], Tensor]:
        return lambda n: torch.rand(n, *shape)

    def tokens(vocabulary: int, length: int) -> Callable[[int], Tensor]:
        return lambda n: torch.randint(1, vocabulary, (n, length))

    if device == "cpu":
        found = [
            Case("mlp", lambda: MLP(784, 10, hidden=512, layers=3, dropout=0.2), images(1, 28, 28), 10, 64),
            Case("cnn", lambda: CNN(1, 10), images(1, 28, 28), 10, 32, has_batch_norm=True),
            Case("transformer", lambda: TransformerClassifier(4000, 6, max_length=48), tokens(4000, 48), 6, 32),
        ]
    else:
        wide = functools.partial(TransformerClassifier, 30_000, 10, width=768, heads=12, layers=12, max_length=128)
        found = [Case("transformer", wide, tokens(30_000, 128), 10, 64)]
        try:
            from torchvision.models import resnet50  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            print("torchvision is not installed: ResNet-50 is left out, a CNN takes its place", flush=True)
            cnn = functools.partial(CNN, 3, 100, widths=(64, 128, 256, 512))
            found.append(Case("cnn", cnn, images(3, 64, 64), 100, 128, has_batch_norm=True, is_channels_last=True))
        else:
            of_images = {"has_batch_norm": True, "is_channels_last": True}
            found.append(Case("resnet50", resnet50, images(3, 224, 224), 1000, 64, **of_images))
    unknown = set(names or ()) - {case.name for case in found}
    if unknown:
        raise SystemExit(f"no model {', '.join(sorted(unknown))} here: {', '.join(case.name for case in found)}")
    return [case for case in found if not names or case.name in names]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@contextmanager
def rounding(precision: str) -> Iterator[None]:
    """Products and convolutions in TF32 under ``tf32``, in IEEE float32 otherwise, as `nugnn` has them."""
    before, in_cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = in_cudnn


class Plain:
    """A loop as a user of PyTorch writes it: loader, forward, backward, step; the mean loss over an epoch."""

    def __init__(
        self, model: nn.Module, data: TensorDataset, ranks: Any, precision: str, group: Any, order: Any
    ) -> None:
        self.device, self.order, self.batch = ranks.device, order, 0
        self.world_size, self.rank, self.group = ranks.world_size, ranks.rank, group
        self.model = model
        if ranks.is_split:
            devices = [self.device] if self.device.type == "cuda" else None
            is_synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
            self.model = nn.parallel.DistributedDataParallel(
                model, device_ids=devices, process_group=self.group, broadcast_buffers=not is_synced,
                gradient_as_bucket_view=True, static_graph=True,
            )  # fmt: skip
        self.optimizer = adamw(model)
        self.data, self.epoch = data, 0
        self.precision = precision

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        share = self.batch // self.world_size
        mine = [ids.split(share)[self.rank].tolist() for ids in self.order(self.epoch).split(self.batch)]
        self.epoch += 1
        is_gpu = self.device.type == "cuda"
        loader = DataLoader(_AtOnce(self.data), batch_sampler=mine, collate_fn=_as_it_is, pin_memory=is_gpu)
        for x, y in loader:
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def train_epoch(self) -> float:
        self.model.train()
        total, num = torch.zeros((), device=self.device), 0
        is_amp = self.precision == "amp"
        with rounding(self.precision):
            for x, y in self.batches():
                with torch.autocast(self.device.type, torch.bfloat16) if is_amp else nullcontext():
                    loss = F.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                total += loss.detach()
                num += 1
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return float(total) / num / self.world_size


class _AtOnce:
    """Batches by one indexing, as `nugnn.batch_loader` reads them."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, ...]:
        index = torch.tensor(ids)
        return tuple(x[index] for x in self.data.tensors)


def _as_it_is(batch: Any) -> Any:
    return batch


def worker(args: argparse.Namespace) -> None:
    """One rank: measures every case; rank 0 writes the rows."""
    import nugnn

    ranks = nugnn.init(device=args.device)
    args.group = None
    if ranks.is_split:
        args.group = dist.new_group(backend="nccl" if ranks.carries_cuda and args.device == "cuda" else "gloo")
    rows = []
    for case in cases(args.device, args.models):
        norms = ["local"] if case.has_batch_norm else ["-"]
        if case.has_batch_norm and ranks.is_split and args.device == "cuda":
            norms.append("all")  # PyTorch has SyncBatchNorm on GPUs only
        data = case.data(case.batch * ranks.world_size * args.steps)
        for precision, norm, how in itertools.product(args.precision, norms, args.cuda_graphs):
            args.how = how
            row = measure(case, data, precision, norm, ranks, args)
            rows.append(row)
            if ranks.rank == 0:
                print(_line(row), flush=True)
    if ranks.rank == 0:
        Path(args.rows).write_text(json.dumps(rows))


def measure(
    case: Case, data: TensorDataset, precision: str, norm: str, ranks: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """A row: speeds of both loops, or what was wrong."""
    world, sizes = ranks.world_size, (case.batch,) * ranks.world_size
    torch.manual_seed(0)
    model = case.model()
    num = sum(sizes) * args.steps
    quiet = copy.deepcopy(model)
    for module in quiet.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    few = TensorDataset(*(x[: 2 * sum(sizes)] for x in data.tensors))
    losses = [loop.train_epoch() for loop in _pair(quiet, few, precision, norm, sizes, ranks, args)]
    row: dict[str, Any] = {
        "model": case.name, "batch_norm": norm, "ranks": world, "device": args.device, "card": _card(ranks.device),
        "cuda_graphs": args.how, "precision": precision, "batch": sum(sizes), "steps": args.steps,
        "rounds": args.rounds, "torch": torch.__version__, "loss_ours": losses[0], "loss_plain": losses[1],
    }  # fmt: skip
    if not abs(losses[0] - losses[1]) <= LOSS_RTOL[precision] * abs(losses[1]):
        return row | {"error": f"losses {losses[0]:.6f} and {losses[1]:.6f} without dropout differ"}
    loops = _pair(model, data, precision, norm, sizes, ranks, args)
    for loop in loops:
        loop.train_epoch()  # compiles, allocates, tunes
    speeds: list[list[float]] = [[], []]
    processor: list[list[float]] = [[], []]
    for number in range(args.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            _wait(ranks)
            begin, used = time.perf_counter(), time.process_time()
            loops[which].train_epoch()
            _wait(ranks)
            speeds[which].append(num / (time.perf_counter() - begin))
            processor[which].append((time.process_time() - used) / args.steps)
    ratios = [ours / plain for ours, plain in zip(*speeds, strict=True)]
    row["is_recorded"] = loops[0].num_recorded > 0
    row["processor_seconds"] = [statistics.median(seconds) for seconds in processor]
    for name, values in (("ours", speeds[0]), ("plain", speeds[1]), ("ratio", ratios)):
        row |= {name: statistics.median(values), f"{name}_least": min(values), f"{name}_most": max(values)}
    return row


def _pair(
    model: nn.Module, data: TensorDataset, precision: str, norm: str, sizes: tuple[int, ...], ranks: Any,
    args: argparse.Namespace,
) -> tuple[Any, Plain]:  # fmt: skip
    """Our trainer and the plain loop, each with a copy of the model."""
    import nugnn

    options = {"batch_norm": norm} if norm != "-" else {}
    family = nugnn.SampleFamily(
        copy.deepcopy(model).to(ranks.device), data, ranks, sizes=sizes, precision=precision, **options
    )
    theirs = copy.deepcopy(model).to(ranks.device)
    if norm == "all":
        theirs = nn.SyncBatchNorm.convert_sync_batchnorm(theirs, args.group)
    plain = Plain(theirs, data, ranks, precision, args.group, family.sampler.order)
    plain.batch = sum(sizes)
    return nugnn.Trainer(family, make_optimizer=adamw, cuda_graphs=args.how), plain


def _wait(ranks: Any) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    if ranks.is_split:
        dist.barrier(group=ranks.control)


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _line(row: dict[str, Any]) -> str:
    name = (
        f"{row['model']:<12} {row['precision']:<4} batch norm {row['batch_norm']:<5} {row['ranks']} x {row['device']}"
    )
    name += "  recorded" if row.get("is_recorded") else ""
    if "error" in row:
        return f"{name}  {row['error']}"
    return (
        f"{name}  ours {row['ours']:9.1f}  plain {row['plain']:9.1f} samples/s  "
        f"ratio {row['ratio']:.3f} ({row['ratio_least']:.3f} to {row['ratio_most']:.3f})  processor, ms a step: "
        f"ours {1000 * row['processor_seconds'][0]:.1f}, plain {1000 * row['processor_seconds'][1]:.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="processes, one run for each number")
    parser.add_argument("--models", nargs="+", help="some of the models only")
    parser.add_argument("--precision", choices=sorted(LOSS_RTOL), nargs="+", help="fp32 on a CPU, all on GPUs")
    parser.add_argument("--cuda-graphs", choices=CUDA_GRAPHS, nargs="+", help="ours; auto on GPUs, else off")
    parser.add_argument("--steps", type=int, help="optimizer steps of a round")
    parser.add_argument("--rounds", type=int, help="in turn, ours and plain")
    parser.add_argument("--json", type=Path, help="keep the rows here")
    parser.add_argument("--rows", help=argparse.SUPPRESS)  # of a worker
    args = parser.parse_args()
    args.precision = args.precision or (["fp32"] if args.device == "cpu" else ["fp32", "tf32", "amp"])
    args.cuda_graphs = args.cuda_graphs or (["off"] if args.device == "cpu" else ["auto"])
    args.steps = args.steps or (20 if args.device == "cpu" else 8)
    args.rounds = args.rounds or (9 if args.device == "cpu" else 5)
    if args.rows:
        worker(args)
        return 0
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            options = [f"--device={args.device}", "--precision", *args.precision, f"--steps={args.steps}"]
            options += ["--cuda-graphs", *args.cuda_graphs]
            options += [f"--rounds={args.rounds}", f"--rows={found}"]
            options += ["--models", *args.models] if args.models else []
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))} | os.environ
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *start, str(Path(__file__).resolve()), *options], env=environment, check=False
            )
            print(f"{ranks} ranks: {time.perf_counter() - begin:.0f} s", flush=True)
            if done.returncode != 0:
                return done.returncode
            rows += json.loads(found.read_text())
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
