"""Steps of two workers on CPUs with each of the things turned off by which they wait less for each other.

    python benchmarks/rank_waits.py                             # 12 configurations; 6 minutes of two idle cores
    python benchmarks/rank_waits.py --rows rows/rank_waits.jsonl
    python benchmarks/rank_waits.py --samples 1 --graphs 0 --rounds 2
    python benchmarks/rank_waits.py --report rows/rank_waits.jsonl       # a table of kept rows

The workers are the product's, started by `nugnn.launch` with the cores that `nugnn.fit` gives them; configurations are
those of `replay_links.py`. In each round the same two processes train some steps in every way, in an order drawn anew:

- ``product``: as it is;
- ``gloo sums``: sums of few values are gloo's, not sent directly (`nugnn.comm.direct_sums`);
- ``in a hurry``: gloo's reading threads push aside who computes (`nugnn.comm.gloo_threads` off);
- ``no pause``: an exchange begins within a slice of time (no ``sched_yield`` in `nugnn.comm.byte_exchange`);
- ``any core``: threads run wherever the system puts them (`nugnn.worker_cores.equal_cores` off);
- ``none``: all four are off.

Half of the rounds have the machine for themselves; in the other half a third process computes on any core
(``beside``). A step is the slower worker's. What is compared is a way's mean in a round with the product's in the same
one. Parameters of both workers have to be the same bits at the end, or a configuration has no times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import Recorder, brief, markdown, read_rows
from replay_cases import Case
from replay_links import add_options
from replay_pairs import Pair, cases_of, stepped
from torch import Tensor

from nugnn.comm import gloo_threads
from nugnn.comm.direct_sums import DirectSums
from nugnn.comm.gradients import equal_everywhere
from nugnn.comm.groups import Ranks, gather_texts, join_ranks
from nugnn.failure import WorkerFailed
from nugnn.job import private_job_folder, read_job, write_job
from nugnn.launch import launch
from nugnn.limited import cores_on
from nugnn.worker_cores import given_cores, own_cores, stay_on
from nugnn.worker_process import WorkerContext

_NUM_RANKS = 2
_STEPS_BEFORE = 4
"""Gradients travel beside backward from the second step on; memory and connections are there."""
_STEPS_AFTER_CHANGE = 1
_SPIN = "while True: pass"

OFF: dict[str, frozenset[str]] = {
    "product": frozenset(),
    "gloo sums": frozenset({"direct"}),
    "in a hurry": frozenset({"batch"}),
    "no pause": frozenset({"yield"}),
    "any core": frozenset({"cores"}),
    "none": frozenset({"direct", "batch", "yield", "cores"}),
}
"""Of each way, what is turned off."""


# -- a worker ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def way(off: frozenset[str], all_cores: Sequence[int]) -> Iterator[None]:
    """This process while those things are off; then as the product is."""
    own = given_cores()
    with contextlib.ExitStack() as stack:
        if "direct" in off:
            stack.enter_context(mock.patch.object(DirectSums, "takes", lambda self, x: False))
        if "yield" in off:
            stack.enter_context(mock.patch.object(os, "sched_yield", lambda: None))
        if "batch" in off:
            stack.callback(gloo_threads.let_gloo_wait_its_turn)
            hurry(gloo_threads.reading_threads())
        if "cores" in off and own is not None:
            stack.callback(stay_on, own)
            stay_on(all_cores)
        yield


def hurry(threads: Sequence[int]) -> None:
    """As the system starts threads."""
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def main(context: WorkerContext) -> None:
    """A worker: all configurations; rank 0 reports rows as they come."""
    job = read_job(context.job_folder)
    torch.set_num_threads(1)
    context.init_process_group()
    ranks = join_ranks(context.timeout, context.pulse, torch.device("cpu"))
    for number, case in enumerate(cases_of(job["samples"], job["graphs"], job["seed"], job["scale"])):
        for row in rows_of(case, ranks, job):
            context.emit(number=number, **row)
    torch.distributed.barrier()


@dataclass(eq=False)
class Run:
    """A configuration in which the workers have trained.

    Args:
        case: Which.
        seconds: By load and way, the mean step of each round.
        problem: Why there are no times; empty where there are.
    """

    case: str
    seconds: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {load: {name: [] for name in OFF} for load in ("alone", "beside")}
    )
    problem: str = ""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each load."""
        for load, of_ways in self.seconds.items():
            row: dict[str, Any] = {"case": self.case, "load": load}
            yield row | ({"error": self.problem} if self.problem else {"round_seconds": of_ways})


def rows_of(case: Case, ranks: Ranks, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each load; a collective call. What cannot be made on one rank is an error on all."""
    run, trainer = Run(case.name), None
    try:
        pair = Pair.of(case)
        trainer = pair.trainer(ranks)
    except Exception as error:  # a configuration that cannot run is rows, too
        run.problem = brief(error)
    run.problem = next((each for each in gather_texts(ranks, run.problem) if each), "")
    if trainer is not None and not run.problem:
        step = stepped(trainer)
        for _ in range(_STEPS_BEFORE):
            step()
        draw = random.Random(job["seed"])  # the same order on both ranks
        for _ in range(job["rounds"]):
            for load in draw.sample(list(run.seconds), len(run.seconds)):
                with foreign_process(load == "beside" and ranks.rank == 0, job["cores"]):
                    for name in draw.sample(list(OFF), len(OFF)):
                        run.seconds[load][name].append(mean_step(step, ranks, OFF[name], job))
        if not equal_everywhere(list(trainer.model.parameters()), ranks):
            run.problem = "ranks do not agree"
    yield from run.rows()


def mean_step(step: Callable[[], Tensor | float], ranks: Ranks, off: frozenset[str], job: dict[str, Any]) -> float:
    """Of some steps in one way, which both ranks begin at once; the slower rank's."""
    with way(off, job["cores"]):
        for _ in range(_STEPS_AFTER_CHANGE):
            step()
        taken = []
        for _ in range(job["steps"]):
            ranks.sum_(torch.zeros(1))
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
    both = torch.zeros(_NUM_RANKS, len(taken), dtype=torch.float64)
    both[ranks.rank] = torch.tensor(taken, dtype=torch.float64)
    return float(ranks.sum_(both).amax(0).mean())


@contextlib.contextmanager
def foreign_process(is_there: bool, cores: Sequence[int]) -> Iterator[None]:
    """One that computes on any core, in this process's place of the machine, while the block runs."""
    if not is_there:
        yield
        return
    process = subprocess.Popen([sys.executable, "-S", "-c", _SPIN])
    try:
        os.sched_setaffinity(process.pid, cores)
        time.sleep(0.05)  # it has started
        yield
    finally:
        process.kill()
        process.wait()


# -- rows --------------------------------------------------------------------------------------------------------------


def ratios(row: dict[str, Any], name: str) -> list[float]:
    """Of each round: a way's step for the product's; above 1 the product is faster.

    >>> ratios({"round_seconds": {"product": [1.0, 2.0], "none": [1.5, 2.0]}}, "none")
    [1.5, 1.0]
    """
    own, product = row["round_seconds"][name], row["round_seconds"]["product"]
    return [one / other for one, other in zip(own, product, strict=True)]


def line(row: dict[str, Any]) -> str:
    """A row for people, at most 80 columns: milliseconds of the product, and every other way's for them."""
    head = f"{row['case'].removesuffix(' fp32')[:29]:29} {row['load']:6}"
    if "error" in row:
        return f"{head} {row['error']}"[:80]
    words = [f"{statistics.median(ratios(row, name)):7.2f}" for name in OFF if name != "product"]
    return f"{head}{1e3 * statistics.median(row['round_seconds']['product']):8.1f}{''.join(words)}"


HEADING = f"{'':29} {'':6}{'':>8}{'gloo':>7}{'in a':>7}{'no':>7}{'any':>7}{'':>7}\n" + (
    f"{'configuration':29} {'':6}{'ms':>8}{'sums':>7}{'hurry':>7}{'pause':>7}{'core':>7}{'none':>7}"
)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Over all configurations: geometric means of the ratios, the least and the largest of them."""
    found = [f"{'times as long as the product':29} {'':6} {'mean':>6} {'least':>6} {'most':>6}"]
    for load in ("alone", "beside"):
        good = [row for row in rows if row["load"] == load and "error" not in row]
        for name in OFF:
            if name == "product" or not good:
                continue
            medians = [statistics.median(ratios(row, name)) for row in good]
            mean = statistics.geometric_mean(medians)
            found.append(f"{name:29} {load:6} {mean:6.2f} {min(medians):6.2f} {max(medians):6.2f}")
    if failed := sum("error" in row for row in rows):
        found.append(f"{failed} rows without a time")
    return found


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The same of kept rows, as a table for a page: mean, and from least to most, alone and beside another process."""
    lines = []
    for name in OFF:
        cells = [name]
        for load in ("alone", "beside"):
            medians = [
                statistics.median(ratios(row, name)) for row in rows if row["load"] == load and "error" not in row
            ]
            cells.append(f"{statistics.geometric_mean(medians):.2f} ({min(medians):.2f} to {max(medians):.2f})")
        if name != "product":
            lines.append(cells)
    return markdown(["times as long as the product", "alone", "beside another process"], lines)


# -- the run -----------------------------------------------------------------------------------------------------------


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=9, help="of all ways, for each load")
    parser.add_argument("--steps", type=int, default=4, help="timed in a round and way")
    arguments = parser.parse_args(given)
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps: 1 at least")
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Print rows and what they come to; 0, 1 where a worker failed, 2 where there is nothing to turn off."""
    if arguments.report is not None:
        print(report(read_rows(arguments.report)))
        return 0
    if not hasattr(os, "SCHED_BATCH"):
        print("rank_waits.py: policies and cores of threads are Linux's; run this on Linux", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # as the workers, for the rows
    begin, recorder = time.perf_counter(), Recorder(arguments.rows, torch.device("cpu"), line)
    job = {name: getattr(arguments, name) for name in ("samples", "graphs", "rounds", "steps", "scale", "seed")}
    job["cores"] = own_cores()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(HEADING, flush=True)
    try:
        with private_job_folder() as folder:
            write_job(folder, job)
            cores = cores_on([torch.device("cpu")] * _NUM_RANKS, None)
            launch(
                folder, _NUM_RANKS, module=Path(__file__).stem, cores=cores,
                on_event=lambda row: recorder.add({"kind": "waits of two ranks", "steps": arguments.steps} | row),
            )  # fmt: skip
    except WorkerFailed as failed:
        print(f"rank_waits.py: {failed.message}", file=sys.stderr)
        return 1
    if cores is None:
        print("workers have no cores of their own here: `any core` is the product's way, too")
    print("", *summary(recorder.rows), f"{time.perf_counter() - begin:.0f} s", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(run(parse()))
    except KeyboardInterrupt:
        sys.exit(130)
