"""How workers, some of them limited to a number of threads, divide the cores of their host; needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nugnn.planning.limits import check_threads

_VARIABLE = "NUGNN_CORES"
ASKED_THREADS = "NUGNN_ASKED_THREADS"
"""The user's ``OMP_NUM_THREADS``, empty where there was none, in a process that has changed its own."""
_OF_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""By which a user says where threads belong."""
_SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class WorkerCores:
    """What a worker gets.

    Args:
        threads: For its operators.
        cores: Numbers of the cores it runs on; None for wherever the system puts it.
        is_limited: Whether the number of threads was asked for; where not, ``OMP_NUM_THREADS`` of the user counts.
    """

    threads: int
    cores: tuple[int, ...] | None
    is_limited: bool

    def environment(self, given: str | None) -> dict[str, str]:
        """Variables of the worker's process; ``given`` is the user's ``OMP_NUM_THREADS``."""
        threads = str(self.threads) if self.is_limited or given is None else given
        pinned = {} if self.cores is None else {_VARIABLE: ",".join(map(str, self.cores))}
        return {"OMP_NUM_THREADS": threads, ASKED_THREADS: given or ""} | pinned


def own_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def own_nodes(system: Path = _SYSTEM) -> tuple[tuple[int, ...], ...]:
    """`own_cores`, those of each NUMA node together, and in it threads of one physical core side by side.

    Args:
        system: Folder in which the system describes its cores. What it does not tell of a core is taken to be as if it
            were a physical one of the first node: all cores are then of one node, in their order.
    """
    nodes: dict[int, list[tuple[int, int]]] = {}
    for core in own_cores():
        own = system / f"cpu{core}"
        node = min((int(path.name[4:]) for path in own.glob("node[0-9]*")), default=0)
        try:
            first = int(re.split("[-,]", (own / "topology" / "thread_siblings_list").read_text())[0])
        except (OSError, ValueError):
            first = core
        nodes.setdefault(node, []).append((first, core))
    return tuple(tuple(core for _, core in sorted(nodes[node])) for node in sorted(nodes))


def fair_threads(workers: int, num_cores: int) -> tuple[int, ...]:
    """Threads of each of ``workers`` alike, the first ones of which have one more where division leaves a rest.

    With even shares the others are waited for, and take as long as they would if that rest lay idle: nobody is slower
    for it. Shares by a plan (`nugnn.planning.limited_profile.shared`) and re-balancing, which is on unless a user says
    otherwise and is for graphs, give the first ones more, so that two workers on 5 cores come to the speed of 5 and not
    of 4.

    >>> fair_threads(2, 5), fair_threads(3, 2)
    ((3, 2), (1, 1, 1))
    """
    return tuple(max(1, len(range(worker, num_cores, workers))) for worker in range(workers))


def users_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` as it was before a process was given threads and cores; without numbers of threads that are none.

    >>> users_environment({"NUGNN_CORES": "2,3", "OMP_NUM_THREADS": "2", "NUGNN_ASKED_THREADS": "", "HOME": "/root"})
    {'HOME': '/root'}
    >>> [users_environment({"OMP_NUM_THREADS": text}) for text in ("2", "0", "many")]
    [{'OMP_NUM_THREADS': '2'}, {}, {}]
    """
    found = {name: value for name, value in environment.items() if name not in (_VARIABLE, ASKED_THREADS)}
    if ASKED_THREADS in environment:
        found["OMP_NUM_THREADS"] = environment[ASKED_THREADS]
    if asked_threads(found) is None:
        found.pop("OMP_NUM_THREADS", None)
    return found


def asked_threads(environment: Mapping[str, str]) -> int | None:
    """What a user's ``OMP_NUM_THREADS`` says; None where there is none.

    >>> [asked_threads({"OMP_NUM_THREADS": text}) for text in ("3", " 4,2", "")]
    [3, 4, None]
    """
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def divide_cores(threads: Sequence[int | None], nodes: Sequence[Sequence[int]]) -> tuple[WorkerCores, ...]:
    """Cores for each worker.

    Where there are enough, every limited worker has as many cores to itself as it has threads, and the others divide
    the rest. Where there are not, or the system cannot tie a process to cores, nobody is tied to any.

    >>> [each.cores for each in divide_cores([2, 1, None], [range(6)])]
    [(0, 1), (2,), (3, 4, 5)]
    >>> divide_cores([2, 1], [range(2)])[0]
    WorkerCores(threads=2, cores=None, is_limited=True)

    Args:
        threads: The limit of each worker of this host; None without one.
        nodes: Numbers of the cores that there are, as `own_nodes` has them.

    Raises:
        ValueError: A worker is to have more threads than there are cores.
    """
    asked, num_cores = [count for count in threads if count is not None], sum(map(len, nodes))
    check_threads(max(asked, default=1), num_cores, "this host")
    num_others = len(threads) - len(asked)
    rest = num_cores - sum(asked)
    if rest < num_others or not hasattr(os, "sched_setaffinity"):
        fair = max(1, num_cores // len(threads))
        return tuple(WorkerCores(count or fair, None, count is not None) for count in threads)
    of_others = iter(fair_threads(num_others, rest) if num_others else ())
    counts = [next(of_others) if count is None else count for count in threads]
    return tuple(
        WorkerCores(count, own, limit is not None)
        for count, own, limit in zip(counts, _handed_out(counts, nodes), threads, strict=True)
    )


def equal_cores(
    workers: int, nodes: Sequence[Sequence[int]], environment: Mapping[str, str]
) -> tuple[WorkerCores, ...] | None:
    """Cores of their own for ``workers`` alike, which compute on the CPU and of which none is limited.

    Ranks that compute between many small sums lose less time where neither the computing thread of one nor its threads
    of gloo are put on a core on which another one computes (`nugnn.comm.gloo_threads`). How many each has comes first
    (`fair_threads`); of so many it has whole physical cores, and those of one node, as far as that can be.

    >>> [each.cores for each in equal_cores(2, [range(5)], {}) or ()]
    [(0, 1, 2), (3, 4)]
    >>> [each.cores for each in equal_cores(2, [(0, 4, 1, 5), (2, 6)], {}) or ()]
    [(0, 4, 1), (5, 2, 6)]
    >>> [equal_cores(2, [range(4)], each) for each in ({"OMP_NUM_THREADS": "3"}, {"OMP_PROC_BIND": "false"})]
    [None, None]

    Args:
        workers: Of this host.
        nodes: Numbers of the cores that this process may use, as ``taskset`` or a control group says, and as
            `own_nodes` has them.
        environment: Of this process.

    Returns:
        None, so that the system places all threads, where there is one worker, where there are fewer cores than
        threads, where a variable of OpenMP says where threads belong, or where processes cannot be tied to cores.
    """
    num_cores = sum(map(len, nodes))
    threads = asked_threads(environment) or 1
    if workers < 2 or workers * threads > num_cores or any(environment.get(name) for name in _OF_OPENMP):
        return None
    if not hasattr(os, "sched_setaffinity"):
        return None
    counts = fair_threads(workers, num_cores)
    return tuple(WorkerCores(len(own), own, is_limited=False) for own in _handed_out(counts, nodes))


def _handed_out(counts: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """So many of the cores to each: of the node that has as many left and the fewest beside, else of all that is left.

    >>> _handed_out((5, 5, 4, 4), [range(9), range(9, 18)])
    [(0, 1, 2, 3, 4), (9, 10, 11, 12, 13), (5, 6, 7, 8), (14, 15, 16, 17)]
    """
    left = [list(node) for node in nodes]
    found = []
    for count in counts:
        source = min((node for node in left if len(node) >= count), key=len, default=None)
        if source is None:
            source = [core for node in left for core in node]
        found.append(own := tuple(source[:count]))
        left = [[core for core in node if core not in own] for node in left]
    return found


def stay_on(cores: Sequence[int]) -> None:
    """Tie all threads of this process, and those that they will start, to ``cores``."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has ended
            continue


def given_cores() -> tuple[int, ...] | None:
    """Those that this process has as a worker; None where it has none of its own."""
    given = os.environ.get(_VARIABLE)
    return None if given is None else tuple(int(number) for number in given.split(","))


def give_up_cores() -> None:
    """Have no cores that are this process's own; to be called before it was tied to any."""
    os.environ.pop(_VARIABLE, None)


def stay_on_given_cores() -> None:
    """What the environment asks for, if it does."""
    if (cores := given_cores()) is not None:
        stay_on(cores)
