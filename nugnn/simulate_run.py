"""What ``nugnn simulate`` does: plans for clusters on paper of growing size, by counts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nugnn._counted import counted
from nugnn.config import TrainConfig
from nugnn.plan_run import subject_by_counts
from nugnn.plan_subject import PlanSubject
from nugnn.planned import plan_by_counts
from nugnn.planning.cluster import check_on_paper, cluster_on_paper
from nugnn.planning.cluster_file import LinkFields
from nugnn.planning.datasheet import SheetError
from nugnn.planning.graph_statistics import parse_statistics
from nugnn.planning.growth import Growth, said_of_left_out
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.shares import check_whole


def simulate(
    config: TrainConfig,
    statistics: str,
    sheets: Sequence[str],
    counts: Sequence[int],
    *,
    per_host: int,
    between: LinkFields,
    on_stage: Callable[[str], Any] = lambda _: None,
) -> tuple[list[Growth], tuple[str, ...]]:
    """How a predicted epoch grows with devices.

    Args:
        config: Model and options.
        statistics: Of the graph, see `nugnn.planning.graph_statistics.parse_statistics`.
        sheets: Names of cards.
        counts: Numbers of devices.
        per_host: Devices of a host.
        between: A host's way to the others.
        on_stage: Called with what is done next.

    Returns:
        A row for each count, and what had to be assumed.

    Raises:
        ValueError: Settings, counts or names do not fit.
    """
    if not all(sheets):
        raise ValueError("--devices: a name is empty; give cards or CPUs of docs/hardware.md with commas between")
    for name in sheets:
        try:
            check_on_paper(name)
        except SheetError as error:
            raise ValueError(f"--devices: {error}") from error
    graph = parse_statistics(statistics)
    check_whole(graph.sizes(config.self_loops), max(counts))
    subjects: dict[bool, PlanSubject] = {}
    rows: list[Growth] = []
    notes: dict[str, None] = {}
    left_out: dict[int, tuple[str, ...]] = {}
    for count in counts:
        on_stage(f"planning for {counted(count, 'device')}")
        cluster = cluster_on_paper(sheets, count, per_host=per_host, between=between)
        if (is_split := count > 1) not in subjects:
            is_nccl = cluster.links.is_nccl
            subjects[is_split] = subject_by_counts(config, graph, ["cuda"], min(count, 2), is_nccl=is_nccl)
        try:
            planned = plan_by_counts(subjects[is_split], cluster, halo=graph.expected_halo)
        except DoesNotFitError as error:
            rows.append(Growth(devices=count, hosts=-(-count // per_host), why_not=str(error).splitlines()[0]))
            continue
        rows.append(Growth.of(planned.plan))
        notes |= dict.fromkeys(note for note in planned.plan.notes if note not in planned.left_out)
        left_out[count] = planned.left_out
    return rows, (*notes, *said_of_left_out(rows, left_out))
