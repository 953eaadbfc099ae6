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
ways take turns in the same processes; a step's time is that of the slowest rank. ``auto of sums`` is ``auto`` without
its trial of steps; ``int2+4bit`` are rows of ``int2`` with gradients of 4 bits, the fewest that ``auto`` takes.

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
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lab_ranks
import torch
from harness import code_version
from lab_ranks import limit_rate
from link_lab import INTERFACE
from link_rows import PAYLOAD_SHARE, PEER_WAYS, Row, predicted_seconds, spread
from link_tables import heading, summary, table
from link_ways import HALO_WAYS, SAMPLE_WAYS, OfPeer, OfTrainer, Way, halo_ways, sample_ways

MODELS = ("transformer", "mlp", "gnn")
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 9
_PROBE_SECONDS = 0.2
_STILL_SECONDS = 0.4
"""Longer than TCP waits before it sends again what was dropped."""


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
