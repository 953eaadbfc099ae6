"""The environment of a worker process: where it meets the others, its threads and cores, its settings of memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from nugnn.worker_cores import WorkerCores, fair_threads, own_cores, users_environment


def worker_environment(
    rank: int, num_workers: int, port: int, timeout: float, cores: WorkerCores | None = None
) -> dict[str, str]:
    """Environment of a worker: torchrun's variables, loopback for gloo, and its fair number of OpenMP threads."""
    environment = users_environment(os.environ)
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "NUGNN_TIMEOUT": repr(timeout),
        "NUGNN_SYS_PATH": json.dumps([os.path.abspath(entry) for entry in sys.path]),
    }
    environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash leaves its stack in the log
    environment.setdefault("PYTHONUNBUFFERED", "1")  # and what was printed before
    if cores is not None:
        environment |= cores.environment(environment.get("OMP_NUM_THREADS"))
    # With more threads than cores DGL's kernels become a hundred times slower.
    environment.setdefault("OMP_NUM_THREADS", str(fair_threads(num_workers, num_cores())[rank]))
    if grants_huge_pages():
        # torch asks for huge pages for its large tensors, which are zeroed and found in fewer steps: an epoch on a CPU
        # takes a third less time
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return environment


def grants_huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> bool:
    """Whether the system gives huge pages to a process that asks for them; False where it cannot be told."""
    try:
        return any(f"[{choice}]" in setting.read_text() for choice in ("always", "madvise"))
    except OSError:
        return False


def num_cores() -> int:
    """Cores this process may run on."""
    return len(own_cores())
