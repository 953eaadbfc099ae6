"""Worker module for test_launch: does what the job names, with gloo between the ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from nugnn.job import read_job
from nugnn.worker_process import WorkerContext


def main(context: WorkerContext) -> None:
    """Run the scenario that the job names; NUGNN_TEST_DIE ends rank 1 before it has read the job."""
    if context.rank == 1 and "NUGNN_TEST_DIE" in os.environ:
        os._exit(86)
    job = read_job(context.job_folder)
    globals()[job["scenario"]](context, job)


def sum_ranks(context: WorkerContext, job: dict) -> None:
    import torch
    import torch.distributed as dist

    context.init_process_group()
    x = torch.tensor([context.rank + 1.0])
    dist.all_reduce(x)
    listening = subprocess.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=False)
    own = {link for fd in os.listdir("/proc/self/fd") if (link := _link(f"/proc/self/fd/{fd}"))}
    wide = []
    for line in listening.stdout.splitlines():
        columns = line.split()
        if len(columns) > 9 and columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
            wide.append(columns[1].split(":")[0])
    context.emit(kind="sum", value=x.item(), listening_on=wide, threads=torch.get_num_threads())
    for step in range(job.get("events", 0)):
        context.emit(kind="step", step=step, padding="x" * 1000)
    dist.barrier()
    dist.destroy_process_group()


def _link(path: str) -> str:
    """Where it leads; nowhere when it has gone meanwhile."""
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def lose_rank_1(context: WorkerContext, job: dict) -> None:
    """Endless exchanges between all ranks, until rank 1 goes in the middle."""
    import torch
    import torch.distributed as dist

    context.init_process_group()
    if context.rank == 1:
        (context.job_folder / "began").write_text(str(os.getpid()))
    if context.rank == 1 and job["how"] == "exit before the first exchange":
        os._exit(86)
    received = torch.empty(3 * 65536)
    for step in range(10**6):
        if context.rank == 1 and step == 3:
            if job["how"] == "exit":
                os._exit(86)
            if job["how"] == "kill":
                threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        dist.all_to_all_single(received, torch.ones(3 * 65536))


def sum_few_values(context: WorkerContext, job: dict) -> None:
    """Endless sums that go from rank to rank, until rank 1 does something else in the middle."""
    import torch

    from nugnn.comm.groups import join_ranks

    context.init_process_group()
    ranks = join_ranks(context.timeout, context.pulse)
    assert ranks.direct is not None
    context.pulse.begin_step()
    for step in range(10**6):
        values = torch.ones(3)
        if context.rank == 1 and step == 30:
            if job["how"] == "kill":
                threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            if job["how"] == "hang":
                (context.job_folder / "began").touch()
                time.sleep(600)
            if job["how"] == "other values":
                values = torch.ones(7)
        ranks.sum_(values)


def user_error_on_rank_1(context: WorkerContext, job: dict) -> None:
    import torch
    import torch.distributed as dist

    context.init_process_group()
    if context.rank == 1:
        raise ValueError("labels.csv, row 7: class 12 of 10")
    dist.all_reduce(torch.ones(1))


def internal_error_on_rank_1(context: WorkerContext, job: dict) -> None:
    if context.rank == 1:
        raise AssertionError("received 3 rows, planned 4")
    time.sleep(600)


def import_error(context: WorkerContext, job: dict) -> None:
    import no_such_package  # noqa: F401


def call(context: WorkerContext, job: dict) -> None:
    context.emit(kind="answer", value=job["function"](20), marker=hasattr(sys, "ps1"))


def leave_early(context: WorkerContext, job: dict) -> None:
    if context.rank == 1:
        sys.exit(0)
    time.sleep(600)


def never_exits(context: WorkerContext, job: dict) -> None:
    """Finishes its work, and what it has registered for its exit does not end."""
    atexit.register(time.sleep, 600)


def rank_1_hangs(context: WorkerContext, job: dict) -> None:
    if context.rank == 1:
        (context.job_folder / "began").touch()
        time.sleep(600)


def with_grandchild(context: WorkerContext, job: dict) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    context.emit(kind="pids", pids=[os.getpid(), child.pid])
    if job["then"] == "sleep":
        time.sleep(600)
    if job["then"] == "fail":
        raise RuntimeError("planned")


def show_imports(context: WorkerContext, job: dict) -> None:
    import importlib.util

    context.emit(kind="imports", bare=[n for n in ("datasets", "comm", "kernels") if importlib.util.find_spec(n)])


def trouble_on_rank_1(context: WorkerContext, job: dict) -> None:
    """Steps of 20 ms; in its fourth, rank 1 does what the job names and the others wait for it, by the pulse."""
    context.emit(kind="pid", pid=os.getpid())
    for step in range(10**6):
        context.pulse.begin_step()
        time.sleep(0.02)
        if context.rank == 1 and step == 3:
            (context.job_folder / "began").write_text(str(os.getpid()))
            globals()[f"_{job['how']}"](context)
        if context.rank != 1 and step == 3:
            with context.pulse.waiting("halo exchange 7 (layers.0/spmm)"):
                time.sleep(600)


def _stop(context: WorkerContext) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop(context: WorkerContext) -> None:
    while True:
        pass


def _deadlock(context: WorkerContext) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _chatter(context: WorkerContext) -> None:
    """An endless loop that fills the log."""
    while True:
        print("still here", "." * 4000)
        time.sleep(0.01)


def _wait_elsewhere(context: WorkerContext) -> None:
    with context.pulse.waiting("a sum over all workers"):
        time.sleep(600)


def _exhaust_memory(context: WorkerContext) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    rows = []
    while True:
        rows.append(bytearray(2**27))


def _exit_early(context: WorkerContext) -> None:
    sys.exit(5)


def _be_killed(context: WorkerContext) -> None:
    print("one line before it went")
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(context: WorkerContext) -> None:
    raise RuntimeError("shape mismatch")


def _fill_disk(context: WorkerContext) -> None:
    folder = os.environ["SMALL_DISK"]
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        while True:
            file.write(bytes(2**18))


def _fill_disk_by_torch(context: WorkerContext) -> None:
    """Through a library that does not say why it failed."""
    from pathlib import Path

    import torch

    from nugnn.disk import naming_full_disk

    path = Path(os.environ["SMALL_DISK"]) / "outcome.pt"
    with naming_full_disk(path):
        torch.save(torch.zeros(2**20), path)


def slow_but_alive(context: WorkerContext, job: dict) -> None:
    """One step, in which rank 1 finishes an operator whenever it is asked to, and rank 0 waits for it."""
    context.pulse.begin_step()
    if context.rank == 1:
        asked = 0
        while not (context.job_folder / "enough").exists():
            if (context.job_folder / f"operator-{asked}").exists():
                asked += 1
                context.pulse.beat()
            time.sleep(0.001)
        return
    with context.pulse.waiting("halo exchange 1 (layers.0/spmm)"):
        while not (context.job_folder / "done-1").exists():
            time.sleep(0.02)


def stopped_alone(context: WorkerContext, job: dict) -> None:
    """One step, in which rank 1 is stopped at once, and rank 0 finishes operators until that is enough."""
    context.pulse.begin_step()
    (context.job_folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while not (context.job_folder / "enough").exists():
        context.pulse.beat()
        time.sleep(0.001)
    with context.pulse.waiting("halo exchange 1 (layers.0/spmm)"):
        time.sleep(600)


def loads_for_long(context: WorkerContext, job: dict) -> None:
    """Computes for three times the timeout before its first step."""
    (context.job_folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    end = time.process_time() + 3 * job["timeout"]
    while time.process_time() < end:
        sum(range(1000))


def keep_limits(context: WorkerContext, job: dict) -> None:
    """Rank 0 says where it runs and with how many threads; rank 1 takes more memory than it may have."""
    import torch

    from nugnn.limited import apply_limits
    from nugnn.planning.device_facts import data_bytes
    from nugnn.planning.limits import DeviceLimits
    from nugnn.process_state import host_memory

    cpu = torch.device("cpu")
    if context.rank == 0:
        holds = apply_limits(DeviceLimits(threads=1), cpu)
        places = set()
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it may have ended
                places.add(tuple(os.sched_getaffinity(int(thread))))
        context.emit(kind="limits", holds=holds, places=sorted(places), variable=os.environ["OMP_NUM_THREADS"])
        context.init_process_group()
        return
    host = host_memory()
    assert host is not None
    room = job["room_bytes"]
    holds = apply_limits(DeviceLimits(memory_fraction=(data_bytes() + room) / host.limit_bytes), cpu)
    torch.ones(room // 16)  # four bytes each
    assert holds["memory_bytes"] <= data_bytes() + room
    context.init_process_group()
    torch.ones(room // 2)


def place_threads(context: WorkerContext, job: dict) -> None:
    """Rank 0 says where its threads run once ranks have joined, and with which policy; small sums need no gloo."""
    import torch

    from nugnn.comm.groups import join_ranks, leave_ranks

    context.init_process_group()
    ranks = join_ranks()
    if context.rank == 0:
        threads = []
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # it may have ended
                where = sorted(os.sched_getaffinity(int(thread)))
                threads.append([file.read().strip(), where, os.sched_getscheduler(int(thread))])
        context.emit(kind="threads", threads=threads)
    assert ranks.direct is not None
    own = torch.arange(4.0) + ranks.rank
    direct, through_gloo = own.clone(), own.clone()
    ranks.sum_(direct)
    torch.distributed.all_reduce(through_gloo)
    assert torch.equal(direct, through_gloo)
    leave_ranks(ranks)
    assert ranks.direct is None
