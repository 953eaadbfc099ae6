"""Training steps of two ranks over links of limited rate: predicted from measured parts, and trained; needs root, tc.

    python benchmarks/replay_links.py                          # 8, 8 and 4 configurations; 5 minutes of two idle cores
    python benchmarks/replay_links.py --rows rows/replay_links.jsonl
    python benchmarks/replay_links.py --report rows/replay_links.jsonl      # a table of kept rows
    python benchmarks/replay_links.py --samples 1 --mixed 0 --graphs 0 --rates 1 --rounds 3

Each rank is a process in a network namespace of its own; what it sends passes a token bucket (`link_lab`). Models,
widths, batches and parts are drawn by a seed before anything is measured (`replay_pairs`); a batch is split unevenly,
and so are the nodes of a graph. In ``mixed`` ones each linear layer and convolution computes in float32 or bfloat16
(`replay_mixed`): operators are timed in steps that are all in one format and in the other, and casts by themselves. All
configurations are reported, failures too.

**Predicted** (`nugnn.planning.replay`) from three things that know nothing of the step: its trace; its operators,
timed inside steps of one rank whose peer is not there, at other sizes, by both ranks at the same time, as they share
the machine in the run; and the links, measured between the ranks at each rate as ``nugnn profile`` does, medians of
three turns.
**Measured**: steps of the trainer on both ranks, at each rate in turn with the timing of operators, the slowest rank;
of a graph with the sum of the loss over ranks that ends an epoch. Loss and parameters of both ranks have to be the
same bits, or the configuration has no time. ``comm`` is the share of a step in which ranks wait for bytes or for each
other, the mean of both ranks, by the replay and by the trainer's clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lab_ranks
import torch
from harness import Recorder, brief, markdown, read_rows
from replay_cases import Case
from replay_mixed import Drawn
from replay_pairs import NUM_RANKS, Pair, cases_of, stepped
from torch import Tensor

from nugnn.comm.gradients import equal_everywhere
from nugnn.comm.groups import Ranks, gather_texts
from nugnn.planning.links import Links
from nugnn.planning.measure_casts import measure_casts
from nugnn.planning.measure_links import as_links, measure_exchanges, measure_sums
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.profiles import LinkProfile
from nugnn.planning.replay import replay
from nugnn.planning.step_program import passes_of
from nugnn.planning.timed_operators import TimedOperator
from nugnn.planning.timeline import Timeline
from nugnn.planning.trace import StepTrace
from nugnn.timed_place import Place

RATES = (0.3, 1.0, 3.0)
"""Gb/s; steps without a limit are measured besides."""
_STEPS_BEFORE = 4
"""Gradients travel beside backward from the second step on; memory and connections are there."""
_STEPS_AFTER_CHANGE = 2
"""In which TCP finds the new rate."""
_STEPS_IN_A_ROUND = 2
_LINK_TURNS = 3
"""So that what happens beside one measurement is in none of the medians."""
_STEPS_REPLAYED = 3
_SECONDS_OF_CASTS, _MOST_VALUES_CAST = 1.0, 1 << 22
_DRAWN_BY = ("samples", "mixed", "graphs", "rounds", "scale", "seed")
"""Options that ranks get, too."""


# -- a rank ------------------------------------------------------------------------------------------------------------


def worker(arguments: argparse.Namespace) -> None:
    """One rank: all configurations; rank 0 reports rows as they come."""
    ranks: Ranks = lab_ranks.joined(arguments.rank, arguments.num_ranks)
    rates = [None, *arguments.rates]
    links = measured_links(ranks, rates, arguments.link_seconds)
    cases = drawn_cases(arguments)
    casts: Sequence[TimedOperator] = ()
    if arguments.mixed:
        casts = measure_casts(ranks.device, seconds=_SECONDS_OF_CASTS, most_values=_MOST_VALUES_CAST)
    for number, case in enumerate(cases):
        for row in rows_of(case, ranks, rates, links, casts, arguments.rounds):
            if ranks.rank == 0:
                lab_ranks.report(arguments.rows, {"number": number, **row})
    lab_ranks.leave()


def drawn_cases(arguments: argparse.Namespace) -> list[Case | Drawn]:
    """Those that were asked for."""
    return cases_of(arguments.samples, arguments.graphs, arguments.seed, arguments.scale, arguments.mixed)


def measured_links(ranks: Ranks, rates: Sequence[float | None], seconds: float) -> list[Links]:
    """At each rate in turn, medians of some turns: as a cluster of one host has them; a collective call."""
    turns = [[_measured_link(ranks, rate, seconds / _LINK_TURNS) for rate in rates] for _ in range(_LINK_TURNS)]
    medians = [median_link(found) for found in zip(*turns, strict=True)]
    return [Links.of_host(ranks.world_size, link) for link in medians]


def _measured_link(ranks: Ranks, rate: float | None, seconds: float) -> LinkProfile:
    """As ``nugnn profile`` measures it."""
    lab_ranks.limit_rate(rate)
    exchanges = measure_exchanges(ranks, seconds=seconds / 2)
    sums = measure_sums(ranks, seconds=seconds / 2)
    (found,) = as_links(exchanges, ["cpu"] * ranks.world_size, is_nccl=ranks.carries_cuda, sums=sums)
    return found


def median_link(found: Sequence[LinkProfile]) -> LinkProfile:
    """Each number's median; one that a measurement has not seen is 0 there.

    >>> link = LinkProfile(between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-4)
    >>> others = [link.model_copy(update={"latency_seconds": s, "burst_seconds": 2 * s}) for s in (9e-2, 2e-4)]
    >>> median = median_link([link, *others])
    >>> median.bytes_per_second, median.latency_seconds, median.burst_seconds, median.few_seconds
    (1000000000.0, 0.0002, 0.0004, None)
    """
    numbers = {}
    for name in (name for name in LinkProfile.model_fields if name.endswith(("_second", "_seconds", "_per_byte"))):
        values = [getattr(each, name) for each in found]
        if any(value is not None for value in values):
            numbers[name] = statistics.median(value or 0.0 for value in values)
    return found[0].model_copy(update=numbers)


def rows_of(
    case: Case | Drawn,
    ranks: Ranks,
    rates: Sequence[float | None],
    links: Sequence[Links],
    casts: Sequence[TimedOperator],
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """A row for each rate; a collective call. What cannot be made on one rank is an error on all."""
    lab_ranks.limit_rate(None)
    said: dict[str, Any] = about(case)
    problem, pair, places = "", None, []
    try:
        pair = Pair.of(case)
        places = pair.places()
    except Exception as error:  # a configuration that cannot run is rows, too
        problem = brief(error)
    problems = [each for each in gather_texts(ranks, problem) if each]
    if problems or pair is None:
        yield from ({**said, "rate": rate, "error": problems[0]} for rate in rates)
        return
    said["sizes"] = [dataclasses.asdict(each) for each in pair.sizes]
    table, runs = measured(pair, places, ranks, rates, rounds)
    if isinstance(case, Drawn):
        table = table.with_operators([*table.operators, *casts])
    lab_ranks.limit_rate(None)
    texts = gather_texts(ranks, json.dumps({"table": table.to_json(), "runs": [run.seconds for run in runs]}))
    same = all(run.is_agreed for run in runs)
    if ranks.rank != 0:
        return
    all_said = [json.loads(each) for each in texts]
    tables = [MeasuredTimes.model_validate_json(each["table"]) for each in all_said]
    for number, (rate, link) in enumerate(zip(rates, links, strict=True)):
        row = {**said, "rate": rate, **predicted(pair, tables, link)}
        row |= told([each["runs"][number] for each in all_said]) if same else {"error": "ranks do not agree"}
        yield row


def about(case: Case | Drawn) -> dict[str, Any]:
    """Columns of a row that are known before anything is measured."""
    if isinstance(case, Drawn):
        return {"case": case.name, "family": "mixed", "precision": "mixed", "formats": case.formats}
    return {"case": case.name, "family": case.family, "precision": case.precision}


@dataclasses.dataclass(eq=False)
class Run:
    """Steps of the trainer at one rate, on this rank.

    Args:
        seconds: Of each, ``step``, and of it ``halo`` and ``sync``.
        is_agreed: Whether losses were the same numbers on all ranks, and parameters the same bits at the end.
    """

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"step": [], "halo": [], "sync": []})
    is_agreed: bool = True


def measured(
    pair: Pair, places: Sequence[Sequence[Place]], ranks: Ranks, rates: Sequence[float | None], rounds: int
) -> tuple[MeasuredTimes, list[Run]]:
    """Operators of this rank, and steps of both at each rate, in turns; a collective call."""
    trainer = pair.trainer(ranks)
    step = stepped(trainer)
    for _ in range(_STEPS_BEFORE):
        step()
    runs = [Run() for _ in rates]
    for _ in range(rounds):
        lab_ranks.limit_rate(None)
        for place in itertools.chain(*places):
            _meet(ranks)
            place.time_whole()
            _meet(ranks)
            place.time_inside()
            _meet(ranks)
            place.time_rested()
        for rate, run in zip(rates, runs, strict=True):
            lab_ranks.limit_rate(rate)
            for _ in range(_STEPS_AFTER_CHANGE):
                step()
            losses = [timed(step, ranks, run) for _ in range(_STEPS_IN_A_ROUND)]
            known = [torch.tensor(losses), *trainer.model.parameters()]
            run.is_agreed &= equal_everywhere(known, ranks) and all(map(math.isfinite, losses))
    return pair.table(places), runs


def timed(step: Callable[[], Tensor | float], ranks: Ranks, run: Run) -> float:
    """Time one step, which all ranks begin at once; its loss over all ranks."""
    _meet(ranks)
    ranks.clock.take()
    begin = time.perf_counter()
    loss = step()
    run.seconds["step"].append(time.perf_counter() - begin)
    halo, sync = ranks.clock.take()
    run.seconds["halo"].append(halo)
    run.seconds["sync"].append(sync)
    return float(ranks.sum_(loss.clone())) if isinstance(loss, Tensor) else loss


def _meet(ranks: Ranks) -> None:
    ranks.sum_(torch.zeros(1))


# -- rows --------------------------------------------------------------------------------------------------------------


def predicted(pair: Pair, tables: Sequence[MeasuredTimes], links: Links) -> dict[str, Any]:
    """Columns of a row: by the replay, one of the steps that follow a first one, before which links have rested."""
    steps = [pair.setting.trace.at(each) for each in pair.sizes]
    several, step_seconds = replayed(steps, tables, links)
    warm = [table.model_copy(update={"after_rest": None}) for table in tables]
    seconds = [several.seconds(rank) for rank in range(links.num_ranks)]
    seconds = [{name: each / _STEPS_REPLAYED for name, each in told.items()} for told in seconds]
    return {
        "predicted_seconds": step_seconds,
        "predicted_seconds_warm": replayed(steps, warm, links)[1],
        "after_rests": [None if each.after_rest is None else each.after_rest.model_dump() for each in tables],
        "predicted_comm": statistics.fmean((each["halo"] + each["sync"]) / each["epoch"] for each in seconds),
        "predicted_parts": seconds,
        "link_bytes_per_second": float(links.bytes_per_second[0, 1]),
        "link_latency_seconds": float(links.latency_seconds[0, 1]),
        "link_burst_seconds": links.burst_seconds,
        "link_sums": dataclasses.asdict(links.sums_inside[0]),
    }


def replayed(steps: Sequence[StepTrace], times: Sequence[MeasuredTimes], links: Links) -> tuple[Timeline, float]:
    """Some steps, and seconds of one that is not the first."""
    overlap = passes_of("auto", is_nccl=False, num_hosts=1)
    first, several = (replay(steps, times, links, overlap=overlap, num_steps=count) for count in (1, _STEPS_REPLAYED))
    return several, (several.makespan - first.makespan) / (_STEPS_REPLAYED - 1)


def told(runs: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Columns of a row: the steps of all ranks that were trained."""
    slowest = sorted(max(each) for each in zip(*(run["step"] for run in runs), strict=True))
    last = len(slowest) - 1
    shares = [
        (halo + sync) / step
        for run in runs
        for step, halo, sync in zip(run["step"], run["halo"], run["sync"], strict=True)
    ]
    parts = [{name: statistics.median(each) for name, each in run.items()} for run in runs]
    return {
        "measured_seconds": statistics.median(slowest),
        "p20_seconds": slowest[round(0.2 * last)],
        "p80_seconds": slowest[round(0.8 * last)],
        "steps": len(slowest),
        "measured_comm": statistics.fmean(shares),
        "measured_parts": parts,
    }


def line(row: dict[str, Any]) -> str:
    """A row for people, at most 80 columns."""
    rate = "none" if row["rate"] is None else f"{row['rate']:g}"
    head = f"{row['case'].removesuffix(' fp32')[:33]:33}{rate:>5}"
    if "error" in row:
        return f"{head} {row['error']}"[:80]
    error = row["predicted_seconds"] / row["measured_seconds"] - 1
    spread = f"{1e3 * row['p20_seconds']:.0f}-{1e3 * row['p80_seconds']:.0f}"
    return (
        f"{head}{1e3 * row['predicted_seconds']:7.1f}{1e3 * row['measured_seconds']:7.1f}{spread:>9}{error:+7.1%}"
        f"{100 * row['predicted_comm']:5.0f}{100 * row['measured_comm']:4.0f} %"
    )


HEADING = f"{'configuration':33}{'Gb/s':>5}{'model':>7}{'ms':>7}{'p20-p80':>9}{'error':>7}{'comm, was':>12}"


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Errors by family and rate, of rows that have a time, and how many have none."""
    found = []
    for family in ("samples", "mixed", "graph"):
        own = [row for row in rows if row["family"] == family]
        rates = list(dict.fromkeys(row["rate"] for row in own))
        for rate in rates:
            found.append(_errors([row for row in own if row["rate"] == rate], family, _named(rate)))
        if limited := [row for row in own if row["rate"] is not None]:
            found.append(_errors(limited, family, "all rates"))
    return found


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The same of kept rows, as a table for a page."""
    rates = sorted({row["rate"] for row in rows if row["rate"] is not None})
    lines = []
    for family in ("samples", "mixed", "graph", "all"):
        own = [row for row in rows if family in (row["family"], "all")]
        good = [row for row in own if "error" not in row]
        of_rates = [_absolute_errors(row for row in good if row["rate"] == rate) for rate in rates]
        if not (limited := list(itertools.chain(*of_rates))):
            continue
        counts = [len({row["number"] for row in own}), len(limited), len(own) - len(good)]
        unlimited = _absolute_errors(row for row in good if row["rate"] is None)
        means = [_percent(statistics.fmean(each)) if each else "-" for each in (*of_rates, limited, unlimited)]
        means[-2] = f"**{means[-2]}**, {_percent(max(limited))}"
        lines.append([family, *map(str, counts), *means])
    named = [_named(rate) for rate in rates]
    head = ["", "configurations", "steps", "without a time", *named, "these, largest", "no limit"]
    return markdown(head, lines)


def _absolute_errors(rows: Iterable[dict[str, Any]]) -> list[float]:
    return [abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in rows]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _named(rate: float | None) -> str:
    return "no limit" if rate is None else f"{rate:g} Gb/s"


def _errors(rows: Sequence[dict[str, Any]], family: str, rate: str) -> str:
    good = [row for row in rows if "error" not in row]
    errors = [row["predicted_seconds"] / row["measured_seconds"] - 1 for row in good]
    said = f"{family:8}{rate:10}{len(good):3} steps"
    if errors:
        sizes = [abs(error) for error in errors]
        said += f": mean absolute error {statistics.fmean(sizes):.1%} (largest {max(sizes):.1%}), mean "
        said += f"{statistics.fmean(errors):+.1%}"
    return said + (f"; {len(rows) - len(good)} failed" if len(good) < len(rows) else "")


# -- the run -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which configurations are drawn, and where rows are."""
    parser.add_argument("--samples", type=int, default=8, help="configurations of samples")
    parser.add_argument("--graphs", type=int, default=4, help="configurations of graphs")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on batches and graphs")
    parser.add_argument("--seed", type=int, default=4, help="4: models of all kinds, a graph with batch norm")
    parser.add_argument("--rows", type=Path, help="keep the rows here, as JSON lines")
    parser.add_argument("--report", type=Path, help="rows to print the table of; nothing is measured")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--mixed", type=int, default=8, help="of samples, operators in formats of their own")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="Gb/s, beside none")
    parser.add_argument("--rounds", type=int, default=11, help="of two steps at each rate, and two at each other size")
    parser.add_argument("--link-seconds", type=float, default=4.0, help="for measuring links at each rate, in all")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--num-ranks", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if min(arguments.rates) <= 0:
        parser.error("--rates: Gb/s above 0")
    if arguments.rounds < 1:
        parser.error("--rounds: 1 at least")
    return arguments


def missing(cases: Iterable[Case], rates: Sequence[float | None], rows: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Cases and rates without a row."""
    known = {(row["number"], row["rate"]) for row in rows}
    for (number, case), rate in itertools.product(enumerate(cases), rates):
        if (number, rate) not in known:
            yield {"number": number, "rate": rate, **about(case)}


def main(given: list[str] | None = None) -> int:
    """Print rows and their errors; 0, 1 where a rank failed, or 2 where such links cannot be made."""
    arguments = parse(given)
    if arguments.report is not None:
        print(report(read_rows(arguments.report)))
        return 0
    if (code := lab_ranks.begin(__file__, arguments, worker)) is not None:
        return code
    torch.set_num_threads(1)  # as the ranks, for the rows
    begin, recorder = time.perf_counter(), Recorder(arguments.rows, torch.device("cpu"), line)
    options = ["--rates", *map(str, arguments.rates), f"--link-seconds={arguments.link_seconds}"]
    options += [f"--{name}={getattr(arguments, name)}" for name in _DRAWN_BY]
    print(HEADING, flush=True)
    same = {"kind": "step of two ranks", "seed": arguments.seed, "scale": arguments.scale}
    failed = ""
    try:
        lab_ranks.run(NUM_RANKS, __file__, options, lambda row: recorder.add(same | row))
    except RuntimeError as error:
        failed = str(error)
    cases = drawn_cases(arguments)
    for row in missing(cases, [None, *arguments.rates], recorder.rows):
        recorder.add(same | row | {"error": failed.strip().splitlines()[-1][:160] if failed else "not reported"})
    print("", *summary(recorder.rows), f"{time.perf_counter() - begin:.0f} s", sep="\n", flush=True)
    if failed:
        print(f"replay_links.py: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
