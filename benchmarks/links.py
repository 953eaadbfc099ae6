"""Training steps over links of limited rate, each way of sending gradients and halo rows in turn; needs root and tc.

    python benchmarks/links.py                              # 2 and 4 ranks, 0.1 to 3 Gb/s; 15 idle minutes
    python benchmarks/links.py --models gnn --ranks 2 --rates 0.1 1
    python benchmarks/links.py --models transformer --columns fp32 4bit auto --json rows.jsonl

Each rank is a process in a network namespace of its own; what it sends passes a token bucket (`link_lab`). The ranks
share the cores of this machine, so they compute more slowly than on as many hosts; traffic is real TCP through gloo.

``transformer`` and ``mlp`` have more than 20 M parameters and a small batch, trained by `nugnn.Trainer` on a
`nugnn.SampleFamily`; ``gnn`` is a 3-layer SAGE of width 256 on a graph shaped like ogbn-products, cut by METIS. Its
ways name halo rows (``fp32``, ``bf16``, ``int8``, ``int4``, ``int2``), and gradients travel in as many bits; beside
them plain rows with PowerSGD of gradients, and the late and the sampled rows of ``--halo-mode`` with plain gradients.
Peers are torch's DistributedDataParallel with buckets as views of gradients and a static graph: float32; its hook to
float16 (the one to bfloat16 is refused without NCCL); its PowerSGD hook of rank 2 with error feedback and a warm start,
in a single bucket (it begins sums from callbacks of others, in no fixed order over buckets, at which gloo aborts). All
ways take turns in the same processes; a step's time is that of the slowest rank.

**The model of a step** is ``compute and codec + bytes / (0.956 rate)``: one after the other, nothing hidden. Compute
and codec are the processor's time for a step of the slowest rank without a limit, all threads together and the copies
of TCP included: other work on the machine makes steps longer and leaves it as it is. ``bytes`` are those a rank hands
over, 0.956 the share of payload in TCP's packets on Ethernet (1,448 of 1,514 bytes). Sums that leave while backward
runs make a step shorter than the model. Two ways cross, by the model, at
``8 (bytes - bytes') / (0.956 (local' - local))``; measured, between two rates on a logarithmic scale. ``compute`` is
the same step without other ranks, all at the same time; what a float32 step takes beyond its processor's time is
communication.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import lab_ranks
import torch
import torch.distributed as dist
from harness import code_version
from lab_ranks import limit_rate
from link_lab import INTERFACE
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

PAYLOAD_SHARE = 1448 / 1514
"""Of what the token bucket counts: frames of 1,514 bytes carry 1,448 of TCP with time stamps."""
SAMPLE_WAYS = ("fp32", "bf16", "8bit", "4bit", "2bit", "powersgd", "auto")
PEER_WAYS = ("ddp", "ddp fp16", "ddp powersgd")
HALO_WAYS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {"halo_wire": "bf16"}),
    "int8": ("8bit", {"halo_wire": "int8"}),
    "int4": ("4bit", {"halo_wire": "int4"}),
    "int2": ("2bit", {"halo_wire": "int2"}),
    "powersgd": ("powersgd", {}),
    "stale": ("fp32", {"halo_mode": "stale"}),
    "sampled:0.1": ("fp32", {"halo_mode": "sampled:0.1"}),
    "auto": ("auto", {"halo_wire": "auto"}),
}
"""Of a graph: what gradients travel as, and how halo rows do."""
MEASURED = ("fp32", "bf16", "8bit", "4bit", "int8", "int4", "int2")
"""The ways that ``auto`` is compared with; gradients get no fewer than 4 bits, rows ``fp16`` for ``bf16``."""
MODELS = ("transformer", "mlp", "gnn")
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 9
_PROBE_SECONDS = 0.2
_STILL_SECONDS = 0.4
"""Longer than TCP waits before it sends again what was dropped."""
_BATCH, _TOKENS = 2, 8
_ONE_BUCKET_MB = 4096
_STEPS_TO_CHOOSE = 6
"""After which ``auto`` has chosen, for gradients and for halo rows, and sums begin in backward."""


# -- arithmetic --------------------------------------------------------------------------------------------------------


def predicted_seconds(local: float, num_bytes: float, gbit_per_second: float | None) -> float:
    """Of a step that computes and encodes for ``local`` seconds and sends ``num_bytes``; without a limit when None.

    >>> round(predicted_seconds(0.5, 1448 / 1514 * 12.5e6, 0.1), 9)
    1.5
    """
    return local if gbit_per_second is None else local + 8 * num_bytes / (PAYLOAD_SHARE * 1e9 * gbit_per_second)


def predicted_crossover(exact: tuple[float, float], short: tuple[float, float]) -> float:
    """Gb/s below which ``short`` is faster, each ``(local seconds, bytes)``; infinite for always, 0 for never."""
    more_local, fewer_bytes = short[0] - exact[0], exact[1] - short[1]
    if more_local <= 0:
        return math.inf if fewer_bytes >= 0 else 0.0
    return max(0.0, 8 * fewer_bytes / (PAYLOAD_SHARE * 1e9 * more_local))


def measured_crossover(exact: Mapping[float, float], short: Mapping[float, float]) -> float:
    """Gb/s below which ``short`` was faster, of seconds by rate; infinite where it was at all rates, 0 at none.

    Between the two rates where it changes, the logarithm of the ratio is a straight line over that of the rate.

    >>> measured_crossover({0.1: 8, 1: 4}, {0.1: 4, 1: 8})
    0.31622776601683794
    """
    won = math.inf
    rates = sorted(exact)
    gains = [math.log(exact[rate] / short[rate]) for rate in rates]
    if gains[0] <= 0:
        return 0.0
    for at in range(1, len(rates)):
        if gains[at] <= 0:
            part = gains[at - 1] / (gains[at - 1] - gains[at])
            won = rates[at - 1] * (rates[at] / rates[at - 1]) ** part
            break
    return won


def spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile.

    >>> spread([5, 1, 2, 3, 4])
    (3, 2, 4)
    """
    ordered, last = sorted(seconds), len(seconds) - 1
    return statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]


@dataclass(frozen=True)
class Row:
    """One way at one rate.

    Args:
        model: Of `MODELS`.
        ranks: P.
        rate: Gb/s of each rank; None without a limit.
        link_rate: Gb/s of payload that a bare exchange reached.
        way: Of `SAMPLE_WAYS`, `PEER_WAYS` or `HALO_WAYS`; ``compute`` is a step without other ranks.
        seconds: Median over rounds of the slowest rank; ``p20`` and ``p80`` likewise.
        rounds: That were timed.
        sent_bytes: A rank hands over in a step, by our reports, the mean over ranks; of which halo rows
            ``halo_bytes``. Of a peer, what its interface sent.
        interface_bytes: That the interface of a rank sent in a step.
        local_seconds: Compute and codec of the slowest rank, by its processor, as measured without a limit; None where
            ``auto`` chose what is not among the ways.
        predicted_seconds: By the model.
        chosen: What ``auto`` chose; of a graph for gradients and for most of the rows.
    """

    model: str
    ranks: int
    rate: float | None
    link_rate: float
    way: str
    seconds: float
    p20: float
    p80: float
    rounds: int
    sent_bytes: float
    halo_bytes: float
    interface_bytes: float
    local_seconds: float | None
    predicted_seconds: float | None
    chosen: str | None = None


# -- ways --------------------------------------------------------------------------------------------------------------


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
        name: ``grad_sync``.
        lead_in: See `Way`.
    """

    def __init__(self, model: nn.Module, family_of: Callable[[nn.Module], Any], name: str, lead_in: int = 0) -> None:
        self._model, self._family_of, self._name, self.lead_in = model, family_of, name, lead_in
        self._steps = 0
        self._begin()

    def _begin(self) -> None:
        import nugnn

        self._family = self._family_of(copy.deepcopy(self._model))
        self.trainer = nugnn.Trainer(self._family, make_optimizer=sgd, grad_sync=self._name, check_replicas=0)

    def step(self) -> None:
        self.trainer.train_epoch()
        self._steps += 1

    def renew(self) -> str | None:
        if self._name != "auto":
            return None
        self._begin()
        for _ in range(_STEPS_TO_CHOOSE):
            self.step()
        chosen = str(self.trainer.grad_sync.report()["choice"]["name"])
        values = self._family.report().get("halo", {}).get("plan", {}).get("values", {})
        of_rows = max(values, key=values.get, default=None)
        return chosen if of_rows is None else f"{chosen}+{of_rows}"

    def counts(self) -> tuple[float, float]:
        report = self.trainer.grad_sync.report() or {}
        gradients = report.get("sent_bytes")
        if gradients is None:  # the process group's own: what a ring of all-reduce sends
            parameters = list(self.trainer.model.parameters())
            num_values = sum(p.numel() for p in parameters) + len(parameters)  # and a flag for each
            size = self._family.ranks.world_size
            gradients = self._steps * 2 * (size - 1) / size * 4 * num_values
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


# -- a rank ------------------------------------------------------------------------------------------------------------


def worker(arguments: argparse.Namespace) -> None:
    """One rank: all models at all rates; rank 0 appends rows to a file as they come."""
    ranks = lab_ranks.joined(arguments.rank, arguments.num_ranks)
    for model in arguments.models:
        for found in measured_model(model, ranks, arguments):
            if ranks.rank == 0:
                lab_ranks.report(arguments.rows, found)
    lab_ranks.leave()


def measured_model(model: str, ranks: Any, arguments: argparse.Namespace) -> Iterator[Any]:
    """What the model is, then a list of rows for each rate; that without a limit first."""
    limit_rate(None)
    if model == "gnn":
        size, ways = halo_ways(ranks, arguments.columns, arguments.nodes, arguments.seed)
    else:
        size, ways = sample_ways(model, ranks, arguments.columns, arguments.seed)
    if not ways or list(ways) == ["compute"]:
        return
    yield {"about": model, "ranks": ranks.world_size, "size": _over_ranks(ranks, size)}
    for way in ways.values():  # compiles; sums begin in backward from the second step on
        for _ in range(4):
            way.step()
            _forget_gradients(way)
    local: dict[str, float] = {}
    for rate in [None, *arguments.rates]:
        limit_rate(rate)
        link_rate = probed(ranks, rate)
        chosen = {name: way.renew() for name, way in ways.items()}
        cells = timed(ways, ranks, arguments.seconds)
        if rate is None:
            local = {name: cell["local"] for name, cell in cells.items()}
        rows = []
        for name, cell in cells.items():
            median, p20, p80 = spread(cell["seconds"])
            own = local.get(chosen[name] or name)  # of auto: that of what it chose
            predicted = None if own is None else predicted_seconds(own, cell["sent"], rate)
            row = Row(
                model, ranks.world_size, rate, link_rate, name, median, p20, p80, len(cell["seconds"]), cell["sent"],
                cell["halo"], cell["interface"], own, predicted, chosen[name],
            )  # fmt: skip
            rows.append(asdict(row))
        yield rows
    limit_rate(None)


def probed(ranks: Any, rate: float | None) -> float:
    """Gb/s of payload in a bare exchange between all ranks."""
    from nugnn.comm.compression.link import Link

    others = ranks.world_size - 1
    each = round(_PROBE_SECONDS * (10.0 if rate is None else rate) * 1e9 / 8 / others)
    link, sizes = Link.of(ranks), [0 if rank == ranks.rank else each for rank in range(ranks.world_size)]
    rows = torch.zeros(others * each, dtype=torch.uint8)
    for _ in range(2):  # the first finds the rate
        ranks.sum_(torch.zeros(1))
        begin = time.perf_counter()
        link.exchange(rows, sizes, sizes)
        seconds = time.perf_counter() - begin
    return 8e-9 * others * each / _over_ranks(ranks, seconds)


def timed(ways: Mapping[str, Way], ranks: Any, budget_seconds: float) -> dict[str, dict[str, Any]]:
    """Rounds of a step in each way, until the budget is spent; what is said of each is the same on all ranks.

    Returns:
        Of each way: ``seconds`` of each round, of the slowest rank; bytes of a step ``sent``, ``halo`` of them and
        those of the ``interface``, means over ranks; ``local`` seconds of the processor, median, of the slowest rank.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    bytes_seen = dict.fromkeys(ways, 0)
    before = {name: way.counts() for name, way in ways.items()}
    spent = 0.0
    for number in range(_MOST_ROUNDS):
        began = time.perf_counter()
        order = list(ways.items())
        for name, way in order if number % 2 == 0 else reversed(order):
            ranks.sum_(torch.zeros(1))
            seen = interface_bytes()
            for _ in range(way.lead_in):
                way.step()
            begin, used = time.perf_counter(), time.process_time()
            way.step()
            seconds[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - used)
            if way.lead_in:
                wait_until_still()
            ranks.sum_(torch.zeros(1))  # all have sent what they had to
            bytes_seen[name] += interface_bytes() - seen
            _forget_gradients(way)
        spent += _over_ranks(ranks, time.perf_counter() - began)
        if number + 1 >= _LEAST_ROUNDS and spent * (number + 2) / (number + 1) > budget_seconds:
            break
    found = {}
    for name, way in ways.items():
        steps = len(seconds[name]) * (1 + way.lead_in)
        sent, halo = (after - first for after, first in zip(way.counts(), before[name], strict=True))
        means = torch.tensor([sent, halo, bytes_seen[name]], dtype=torch.float64) / steps / ranks.world_size
        sent, halo, seen_mean = ranks.sum_(means).tolist()
        is_peer = isinstance(way, OfPeer)
        found[name] = {
            "seconds": ranks.max_(torch.tensor(seconds[name], dtype=torch.float64)).tolist(),
            "sent": seen_mean * PAYLOAD_SHARE if is_peer else sent,
            "halo": halo,
            "interface": seen_mean,
            "local": _over_ranks(ranks, statistics.median(processor[name])),
        }
    return found


def interface_bytes() -> int:
    """This rank's interface has sent so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def wait_until_still() -> None:
    """Until this rank's interface sends nothing more: late rows would slow down the way whose turn comes next."""
    seen = -1
    while (now := interface_bytes()) != seen:
        seen = now
        time.sleep(_STILL_SECONDS)


def _forget_gradients(way: Way) -> None:
    """Many models are in memory, one is at work."""
    if isinstance(way, OfTrainer):
        way.trainer.optimizer.zero_grad(set_to_none=True)


def _over_ranks(ranks: Any, value: float) -> float:
    """The largest of all ranks."""
    return float(ranks.max_(torch.tensor(value, dtype=torch.float64)))


# -- what is shown -----------------------------------------------------------------------------------------------------


def heading(about: Mapping[str, Any]) -> str:
    """Of a model on some ranks."""
    what = "halo rows of a rank at most" if about["about"] == "gnn" else "parameters"
    return f"{about['about']}, {about['size']:,.0f} {what}, {about['ranks']} ranks"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of one rate, at most 80 columns."""
    cell = {row.way: row for row in rows}
    exact, half = cell.get("fp32"), cell.get("bf16")
    said = "no limit" if rows[0].rate is None else f"{rows[0].rate:g} Gb/s"
    said += f" (a bare exchange: {rows[0].link_rate:.3g}), {rows[0].rounds} rounds"
    if (share := communication_share(cell)) is not None:
        said += f", {100 * share:.0f} % of fp32 is communication"
    yield said
    yield f"{'way':13}{'ms':>8}{'p20':>8}{'p80':>8}{'model':>8}{'fp32 /':>8}{'bf16 /':>8}{'MB sent':>9}"
    for row in rows:
        model = "-" if row.predicted_seconds is None else f"{1000 * row.predicted_seconds:.0f}"
        gain, gain_16 = (f"{other.seconds / row.seconds:.2f}" if other else "-" for other in (exact, half))
        yield (
            f"{row.way:13}{1000 * row.seconds:8.0f}{1000 * row.p20:8.0f}{1000 * row.p80:8.0f}{model:>8}"
            f"{gain:>8}{gain_16:>8}{row.sent_bytes / 1e6:9.2f}" + (f" {row.chosen}" if row.chosen else "")
        )


def communication_share(cell: Mapping[str, Row]) -> float | None:
    """Of the float32 step at one rate: what it takes beyond computation."""
    exact = cell.get("fp32")
    if exact is None or exact.local_seconds is None:
        return None
    return max(0.0, 1 - exact.local_seconds / exact.seconds)


def crossovers(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """Gb/s below which 4 bits are faster, ``(measured, by the model)``, by ``(way of 4 bits, way of more)``."""
    by_way = _by_way(rows)
    unlimited = {row.way: row for row in rows if row.rate is None}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for short in ("4bit", "int4"):
        for exact in ("fp32", "bf16"):
            if short not in by_way or exact not in by_way:
                continue
            sides = [(unlimited[way].local_seconds, unlimited[way].sent_bytes) for way in (exact, short)]
            seconds = [{rate: row.seconds for rate, row in by_way[way].items()} for way in (exact, short)]
            found[short, exact] = measured_crossover(*seconds), predicted_crossover(*sides)  # type: ignore[arg-type]
    return found


def interface_ratios(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Least and most bytes of interfaces beside those of the reports, where these are many."""
    ratios = [row.interface_bytes / row.sent_bytes for row in rows if row.way not in PEER_WAYS and row.sent_bytes > 1e5]
    return (min(ratios), max(ratios)) if ratios else None


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What comes of the rows of a model on some ranks: crossovers, bytes, ``auto``."""
    for (short, exact), (measured, predicted) in crossovers(rows).items():
        yield f"{short} beats {exact} {below(measured)}; by the model, {below(predicted)}"
    if (ratios := interface_ratios(rows)) is not None:
        yield f"interfaces sent {ratios[0]:.3f} to {ratios[1]:.3f} times the bytes of the reports"
    by_way = _by_way(rows)
    for rate, row in by_way.get("auto", {}).items():
        best = min(
            (by_way[way][rate] for way in MEASURED if way in by_way),
            key=lambda other: other.seconds,
            default=row,
        )
        yield (
            f"auto at {rate:g} Gb/s: {row.chosen}, {100 * (row.seconds / best.seconds - 1):+.0f} % "
            f"beside the fastest, {best.way}"
        )


def _by_way(rows: Sequence[Row]) -> dict[str, dict[float, Row]]:
    """By way and rate; none without a limit."""
    found: dict[str, dict[float, Row]] = {}
    for row in rows:
        if row.rate is not None:
            found.setdefault(row.way, {})[row.rate] = row
    return found


def below(rate: float) -> str:
    """Of a rate below which something is so, in words."""
    return "at no rate" if rate == 0 else "at every rate" if math.isinf(rate) else f"below {rate:.2g} Gb/s"


# -- the run -----------------------------------------------------------------------------------------------------------


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*dict.fromkeys((*SAMPLE_WAYS, *PEER_WAYS, *HALO_WAYS))]
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.1, 0.3, 1, 3], help="Gb/s")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["transformer", "gnn"])
    parser.add_argument("--columns", nargs="+", choices=known, default=known, metavar="WAY", help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=8.0, help="for each rate, or 3 rounds, if they take longer")
    parser.add_argument("--nodes", type=int, default=12_000, help="of the graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the rows here, as JSON lines")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--num-ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if min(arguments.ranks) < 2 or max(arguments.ranks) > 200:
        parser.error("--ranks: from 2 to 200, or nothing travels")
    if min(arguments.rates) <= 0:
        parser.error("--rates: Gb/s above 0")
    return arguments


def run(num_ranks: int, arguments: argparse.Namespace, on_line: Callable[[Any], None]) -> None:
    """Everything on ``num_ranks`` ranks; see `lab_ranks.run`."""
    options = ["--rates", *map(str, arguments.rates), "--models", *arguments.models, "--columns", *arguments.columns]
    options += [f"--seconds={arguments.seconds}", f"--nodes={arguments.nodes}", f"--seed={arguments.seed}"]
    lab_ranks.run(num_ranks, __file__, options, on_line)


class _Shown:
    """Prints what ranks report, and keeps rows in a file of JSON lines where there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: list[Row] = []

    def take(self, said: Any) -> None:
        if isinstance(said, dict):
            self.sum_up()
            print(heading(said), flush=True)
            return
        rows = [Row(**row) for row in said]
        self._rows += rows
        print("", *table(rows), sep="\n", flush=True)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(asdict(row) | {"code": code_version(), "torch": torch.__version__}) + "\n")

    def sum_up(self) -> None:
        """The model that was reported so far."""
        rows, self._rows = self._rows, []
        if rows:
            print("", *summary(rows), "", sep="\n", flush=True)


def main(given: list[str] | None = None) -> int:
    """Print tables; 0, or 2 where such links cannot be made."""
    arguments = parse(given)
    if (code := lab_ranks.begin(__file__, arguments, worker)) is not None:
        return code
    for num_ranks in arguments.ranks:
        begin, shown = time.perf_counter(), _Shown(arguments.json)
        try:
            run(num_ranks, arguments, shown.take)
        except RuntimeError as error:
            print(f"links.py: {error}", file=sys.stderr)
            return 1
        finally:
            shown.sum_up()
        print(f"{num_ranks} ranks: {time.perf_counter() - begin:.0f} s\n", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
