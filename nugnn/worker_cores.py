"""How workers, some of them limited to a number of threads, divide the cores of their host; needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_VARIABLE = "NUGNN_CORES"
_OF_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""By which a user says where threads belong."""


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
        return {"OMP_NUM_THREADS": threads} | pinned


def own_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def divide_cores(threads: Sequence[int | None], cores: Sequence[int]) -> tuple[WorkerCores, ...]:
    """Cores for each worker.

    Where there are enough, every limited worker has as many cores to itself as it has threads, and the others divide
    the rest. Where there are not, or the system cannot tie a process to cores, nobody is tied to any.

    >>> [each.cores for each in divide_cores([2, 1, None], range(6))]
    [(0, 1), (2,), (3, 4, 5)]
    >>> divide_cores([2, 1], range(2))[0]
    WorkerCores(threads=2, cores=None, is_limited=True)

    Args:
        threads: The limit of each worker of this host; None without one.
        cores: Numbers of those that there are.

    Raises:
        ValueError: A worker is to have more threads than there are cores.
    """
    asked = [count for count in threads if count is not None]
    if asked and max(asked) > len(cores):
        raise ValueError(f"threads={max(asked)}: this host has {len(cores)} cores to use; give {len(cores)} or fewer")
    num_others = len(threads) - len(asked)
    rest = len(cores) - sum(asked)
    if rest < num_others or not hasattr(os, "sched_setaffinity"):
        fair = max(1, len(cores) // len(threads))
        return tuple(WorkerCores(count or fair, None, count is not None) for count in threads)
    divided, left, others = [], list(cores), num_others
    for count in threads:
        take = count
        if take is None:
            take, others = -(-rest // others), others - 1
            rest -= take
        divided.append(WorkerCores(take, tuple(left[:take]), count is not None))
        del left[:take]
    return tuple(divided)


def equal_cores(workers: int, cores: Sequence[int], environment: Mapping[str, str]) -> tuple[WorkerCores, ...] | None:
    """As many cores for each of ``workers`` alike, which compute on the CPU and of which none is limited.

    Ranks that compute between many small sums lose less time where neither the computing thread of one nor its threads
    of gloo are put on a core on which another one computes (`nugnn.comm.gloo_threads`).

    >>> [each.cores for each in equal_cores(2, range(5), {}) or ()]
    [(0, 1), (2, 3)]
    >>> [equal_cores(2, range(4), each) for each in ({"OMP_NUM_THREADS": "3"}, {"OMP_PROC_BIND": "false"})]
    [None, None]

    Args:
        workers: Of this host.
        cores: Numbers of those that this process may use, as ``taskset`` or a control group says.
        environment: Of this process.

    Returns:
        None, so that the system places all threads, where there is one worker, where there are fewer cores than
        threads, where a variable of OpenMP says where threads belong, or where processes cannot be tied to cores.
    """
    fair = len(cores) // workers
    given = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(given) if given.isdecimal() else fair
    if workers < 2 or not 0 < threads <= fair or any(environment.get(name) for name in _OF_OPENMP):
        return None
    if not hasattr(os, "sched_setaffinity"):
        return None
    return tuple(
        WorkerCores(fair, tuple(cores[fair * worker : fair * (worker + 1)]), is_limited=False)
        for worker in range(workers)
    )


def stay_on(cores: Sequence[int]) -> None:
    """Tie all threads of this process, and those that they will start, to ``cores``."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has ended
            continue


def given_cores() -> tuple[int, ...] | None:
    """Those that this process was tied to as a worker; None where it was not."""
    given = os.environ.get(_VARIABLE)
    return None if given is None else tuple(int(number) for number in given.split(","))


def stay_on_given_cores() -> None:
    """What the launching process asked for through the environment, if it did."""
    if (cores := given_cores()) is not None:
        stay_on(cores)
