"""Ranks of a benchmark in the namespaces of `link_lab`: a script that is run once for each, and what they report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from link_lab import INTERFACE, Lab, address, rate_command, why_not

from nugnn.worker_cores import equal_cores, own_nodes, stay_on_given_cores
from nugnn.worker_environment import grants_huge_pages

_PORT = 29_571


def begin(script: str, arguments: argparse.Namespace, worker: Callable[[argparse.Namespace], None]) -> int | None:
    """What a script that `run` is to run once for each rank does first.

    Args:
        script: Path.
        arguments: With ``rank`` where it is one.
        worker: Does the work of a rank.

    Returns:
        With which code the script ends now: 0 of a rank that is done, 2 where such links cannot be made. None where it
        is the one to run ranks, which end with it on SIGTERM.
    """
    if arguments.rank is not None:
        worker(arguments)
        return 0
    if (problem := why_not()) is not None:
        print(f"{Path(script).name}: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return None


def run(num_ranks: int, script: str, options: Sequence[str], on_line: Callable[[Any], None]) -> None:
    """Run ``script --rank R --num-ranks P --rows FILE`` with ``options`` once for each rank, each on one thread.

    As workers of `nugnn.fit` they have cores of their own where there are enough.

    Args:
        num_ranks: P.
        script: Path.
        options: Of the script, the same for all ranks.
        on_line: Gets what ranks append to the file, value by value, as it comes; each is a line of JSON.

    Raises:
        RuntimeError: Links cannot be made, or a rank failed; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder, Lab(num_ranks) as lab:
        path = Path(folder) / "rows"
        path.touch()
        logs = [Path(folder) / f"{rank}.log" for rank in range(num_ranks)]
        # no GPU: torch's PowerSGD hook takes one that it sees for where gradients are
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        cores = equal_cores(num_ranks, own_nodes(), one_thread)
        for rank, log in enumerate(logs):
            command = [sys.executable, script, f"--rank={rank}", f"--num-ranks={num_ranks}", f"--rows={path}", *options]
            huge = {"THP_MEM_ALLOC_ENABLE": "1"} if grants_huge_pages() else {}  # as workers of `nugnn.fit` have it
            tied = {} if cores is None else cores[rank].environment("1")
            lab.start(rank, command, log, {**one_thread, **huge, **tied})
        with open(path, encoding="utf-8") as rows:
            while True:
                codes = lab.codes()
                for line in rows:
                    on_line(json.loads(line))
                bad = [rank for rank, code in enumerate(codes) if code]
                if bad:
                    written = logs[bad[0]].read_text(errors="replace")
                    raise RuntimeError(f"rank {bad[0]} of {num_ranks} failed:\n{written[-2000:]}")
                if all(code == 0 for code in codes):
                    return
                time.sleep(0.2)


def joined(rank: int, num_ranks: int) -> Any:
    """The process groups of a rank (`nugnn.comm.groups.Ranks`); the process ends with the one that started it."""
    stay_on_given_cores()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    import torch
    import torch.distributed as dist

    import nugnn  # noqa: F401
    from nugnn.comm.groups import join_ranks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:{_PORT}", rank=rank, world_size=num_ranks)
    return join_ranks()


def report(path: Path, value: Any) -> None:
    """Give ``value`` to the process that started the ranks; of one rank alone."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def leave() -> None:
    """All ranks are done; a collective call that does not return."""
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as nuGNN's own workers leave: threads of gloo may abort the interpreter's end


def limit_rate(gbit_per_second: float | None) -> None:
    """Of all that this rank sends from now on."""
    subprocess.run(rate_command(gbit_per_second), check=True, capture_output=True)


def _leave_with_parent() -> None:
    os.read(0, 1)  # its end of the pipe goes with it
    os._exit(1)
