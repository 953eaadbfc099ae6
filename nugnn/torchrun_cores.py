"""Threads and cores of a process that ``torchrun`` started, chosen before a library asks how many; needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from nugnn.worker_cores import WorkerCores, asked_threads, equal_cores, fair_threads, own_nodes

_THREADS = "OMP_NUM_THREADS"


def take_cores() -> None:
    """Put into this process's environment how many threads it has and which cores, as `nugnn.launch` does for a worker.

    Nothing is tied to these cores yet: that is for whoever knows that all processes of the host compute on the CPU. A
    process that has not the cores of ``torchrun`` itself was put where it is by somebody, as ``--numa-binding`` does,
    and stays as it is.
    """
    parent = os.getppid()
    if hasattr(os, "sched_getaffinity"):
        try:
            if os.sched_getaffinity(parent) != os.sched_getaffinity(0):
                return
        except ProcessLookupError:
            return
    is_asked = not _is_torchruns_own(os.environ, Path(f"/proc/{parent}/environ"))
    os.environ |= variables(os.environ, own_nodes(), is_asked=is_asked)


def variables(environment: Mapping[str, str], nodes: Sequence[Sequence[int]], *, is_asked: bool) -> dict[str, str]:
    """What `take_cores` adds.

    Args:
        environment: Of this process.
        nodes: Cores that the processes of this host may use, as `own_nodes` has them.
        is_asked: Whether ``OMP_NUM_THREADS`` is the user's, if it is there.

    Returns:
        Nothing where the variables are missing that number the processes of a host.
    """
    rank, size = (environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not rank.isdecimal() or not size.isdecimal() or int(rank) >= int(size):
        return {}
    users = {name: value for name, value in environment.items() if is_asked or name != _THREADS}
    asked = users.get(_THREADS) if asked_threads(users) else None
    placed = equal_cores(int(size), nodes, users)
    if placed is None:
        fair = fair_threads(int(size), sum(map(len, nodes)))[int(rank)]
        return WorkerCores(fair, None, is_limited=False).environment(asked)
    return placed[int(rank)].environment(asked)


def _is_torchruns_own(environment: Mapping[str, str], parents: Path) -> bool:
    """Whether ``OMP_NUM_THREADS`` is torchrun's.

    To several processes of a host it says 1 where its user has said nothing, so that they do not take each other's
    cores; of these each has some of its own here. What torchrun itself was started with stands in ``parents``.
    """
    if environment.get(_THREADS) != "1" or "TORCHELASTIC_RUN_ID" not in environment:
        return False
    try:
        return not any(entry.startswith(f"{_THREADS}=".encode()) for entry in parents.read_bytes().split(b"\0"))
    except OSError:
        return False
