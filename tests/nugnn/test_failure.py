"""Each way in which one worker can fail ends the whole run in time, with the cause, on one screen."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nugnn
from launchers_time import PATIENCE_SECONDS, TimeOfComputing, TimeOfLooks, letter_of, stamp_of, wait_until
from nugnn import worker_process
from nugnn.comm.pulse import Stamp
from nugnn.datasets.graph_data import GraphData
from nugnn.disk import DiskFullError, naming_full_disk
from nugnn.failure import Place, WorkerFailed, WorkerView, failure_of, how_it_ended, innermost_frame, stall_of
from nugnn.job import WorkerError, private_job_folder, write_job
from nugnn.launch import launch
from nugnn.process_state import HostMemory, ProcessState, host_memory, process_state
from nugnn.worker_process import classify

HERE = Path(__file__).resolve().parent
TIMEOUT = 3.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")


@pytest.fixture(autouse=True)
def _importable_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit sys.path, so that is how they find the scenarios."""
    monkeypatch.syspath_prepend(HERE)


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code, text, and the launcher's seconds from the event to the end of the last process."""

    exit_code: int
    text: str
    seconds: float
    pid: int


def trouble(
    how: str, num_workers: int, logs: Path, patch: pytest.MonkeyPatch, ends: bool = False, **options: Any
) -> Ended:
    """Run with trouble on rank 1, and seconds that begin when it is there: nothing that takes its time comes later.

    Args:
        how: What it does.
        num_workers: All others wait for it.
        logs: Folder.
        patch: For the launcher's time.
        ends: Whether it ends by itself.
        options: Of ``launch``.
    """
    pids: list[int] = []
    with private_job_folder() as folder:
        write_job(folder, {"scenario": "trouble_on_rank_1", "how": how})

        def has_come() -> bool:
            pid = _number_in(folder / "began")
            if pid is None or not all(stamp_of(folder, r).waits_in for r in range(num_workers) if r != 1):
                return False
            return letter_of(pid) in ({"Z", ""} if ends else {"T"} if how == "stop" else {"R", "S", "D"})

        clock = TimeOfLooks(has_come)
        if how == "loop":
            clock = TimeOfComputing(has_come, lambda: [_number_in(folder / "began") or 0])
        clock.stands_for_time(patch)
        with pytest.raises(WorkerFailed) as caught:
            launch(
                folder,
                num_workers,
                module="launch_scenarios",
                timeout=options.pop("timeout", TIMEOUT),
                on_event=lambda event: pids.append(event["pid"]),
                log_folder=logs,
                **options,
            )
        pid = _number_in(folder / "began")
    assert pid is not None and [p for p in (pid, *pids) if Path(f"/proc/{p}").exists()] == []
    assert len(str(caught.value).splitlines()) <= 24, "more than one screen"
    return Ended(caught.value.exit_code, str(caught.value), clock.now, pid)


def _state_in(path: Path) -> str:
    """The letter of the process that the file names; nothing before it is there."""
    pid = _number_in(path)
    return "" if pid is None else letter_of(pid)


def _number_in(path: Path) -> int | None:
    text = path.read_text() if path.exists() else ""
    return int(text) if text else None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("stop", r"^worker 1 of 3 is stopped \(SIGSTOP\): no progress for 3 s \(--timeout\)\n"),
        (
            "loop",
            r"^worker 1 of 3 computes in \S*launch_scenarios.py:\d+ \(_loop\) without coming to an end: no progress",
        ),
        ("deadlock", r"^worker 1 of 3 hangs in \S*launch_scenarios.py:\d+ \(_deadlock\): no progress for 3 s"),
        ("chatter", r"^worker 1 of 3 .* in \S*launch_scenarios.py:\d+ \(_chatter\)"),
    ],
)
def test_a_worker_that_hangs_is_named_in_time(
    how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = trouble(how, 3, tmp_path, monkeypatch)
    assert ended.exit_code == 3
    assert re.search(words, ended.text), ended.text
    assert f"process {ended.pid} on " in ended.text and f"its log: {tmp_path / 'worker-1.log'}" in ended.text
    assert "    worker 0 waits in halo exchange 7 (layers.0/spmm)" in ended.text
    assert "    worker 2 waits in halo exchange 7 (layers.0/spmm)" in ended.text
    assert TIMEOUT < ended.seconds < TIMEOUT + 5


def test_workers_that_wait_for_each_other_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = trouble("wait_elsewhere", 2, tmp_path, monkeypatch)
    assert ended.exit_code == 3 and ended.seconds < TIMEOUT + 5
    assert ended.text.startswith("the 2 workers wait for each other and make no progress for 3 s (--timeout)")
    assert "worker 0 waits in halo exchange 7 (layers.0/spmm)" in ended.text
    assert "worker 1 waits in a sum over all workers" in ended.text


@pytest.mark.parametrize(
    ("how", "exit_code", "words"),
    [
        ("be_killed", 3, r"^worker 1 of 3 died: ended by SIGKILL.*\n.*\n    one line before it went$"),
        ("exit_early", 3, r"^worker 1 of 3 died: exit code 5\n"),
        ("raise", 3, r"^worker 1 of 3 failed: RuntimeError: shape mismatch \(\S*launch_scenarios.py, line \d+\)\n"),
        (
            "exhaust_memory",
            3,
            r"^worker 1 of 3: out of memory \(MemoryError\); it occupies \d+\.\d GiB, .* in use here\n",
        ),
    ],
)
def test_a_worker_that_is_lost_ends_the_run_at_once(
    how: str, exit_code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before --timeout: after the two seconds in which the others may leave word, and two to end them."""
    hint = "nugnn train --out runs/a --resume"
    ended = trouble(how, 3, tmp_path, monkeypatch, ends=True, timeout=300.0, resume_hint=hint)
    assert ended.exit_code == exit_code
    assert re.search(words, ended.text.split("\nto go on: ")[0]), ended.text
    assert ended.text.endswith("\nto go on: nugnn train --out runs/a --resume")
    assert ended.seconds < 5


class _Asking(TimeOfLooks):
    """Four tenths of the timeout pass from look to look, and rank 1 finishes an operator between every other two.

    Args:
        folder: Of the job.
        timeout: Three of them pass, and then the step ends.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        super().__init__(lambda: bool(stamp_of(folder, 0).waits_in) and stamp_of(folder, 1).is_stepping)
        self._folder, self._timeout, self._looks = folder, timeout, 0

    def monotonic(self) -> float:
        self._is_there = self._is_there or self._has_come()
        if self.now > 3 * self._timeout:
            (self._folder / "enough").touch()
        elif self._is_there:
            self.now += 0.4 * self._timeout
            self._looks += 1
        if self._looks % 2 and self.now <= 3 * self._timeout:
            before = stamp_of(self._folder, 1).beats
            (self._folder / f"operator-{self._looks // 2}").touch()
            wait_until(lambda: stamp_of(self._folder, 1).beats > before)
        return self.now


def test_a_slow_step_goes_on_as_long_as_one_worker_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    with private_job_folder() as folder:
        write_job(folder, {"scenario": "slow_but_alive"})
        clock = _Asking(folder, 10.0)
        clock.stands_for_time(monkeypatch)
        launch(folder, 2, module="launch_scenarios", timeout=10.0)
    assert clock.now > 30.0


class _OthersGoOn(TimeOfLooks):
    """Passes with looks once rank 1 is stopped; for three times the timeout rank 0 finishes operators between them.

    Args:
        folder: Of the job.
        timeout: Of the run.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        super().__init__(lambda: _state_in(folder / "pid-0") != "" and _state_in(folder / "pid-1") == "T")
        self._folder, self._timeout = folder, timeout

    def monotonic(self) -> float:
        if super().monotonic() > 3 * self._timeout:
            (self._folder / "enough").touch()
        elif self._is_there:
            before = stamp_of(self._folder, 0).beats
            wait_until(
                lambda: stamp_of(self._folder, 0).beats > before or _state_in(self._folder / "pid-0") in ("Z", "")
            )
        return self.now


def test_a_worker_that_is_stopped_ends_a_run_in_which_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with private_job_folder() as folder:
        write_job(folder, {"scenario": "stopped_alone"})
        clock = _OthersGoOn(folder, TIMEOUT)
        clock.stands_for_time(monkeypatch)
        with pytest.raises(WorkerFailed, match=r"^worker 1 of 2 is stopped \(SIGSTOP\): no progress for 3 s") as caught:
            launch(folder, 2, module="launch_scenarios", timeout=TIMEOUT)
        assert not (folder / "enough").exists(), "it ended once the other had come to a standstill"
    assert str(caught.value).endswith("\n    worker 0 runs")


def test_who_computes_before_its_first_step_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout = 0.5
    with private_job_folder() as folder:
        write_job(folder, {"scenario": "loads_for_long", "timeout": timeout})

        def pids() -> list[int]:
            return [pid for rank in range(2) if (pid := _number_in(folder / f"pid-{rank}")) is not None]

        clock = TimeOfComputing(lambda: len(pids()) == 2, pids)
        clock.stands_for_time(monkeypatch)
        launch(folder, 2, module="launch_scenarios", timeout=timeout)
    assert clock.now > 2 * timeout


def test_a_worker_that_dies_while_the_job_is_prepared_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUGNN_TEST_DIE", "1")
    is_over, was_over = threading.Event(), list[bool]()
    with private_job_folder() as folder, pytest.raises(WorkerFailed, match="worker 1 of 2 died: exit code 86"):
        launch(folder, 2, module="launch_scenarios", prepare=lambda: was_over.append(is_over.wait(PATIENCE_SECONDS)))
    assert was_over == [], "it is prepared still"
    is_over.set()


_ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from nugnn import worker_watch
from nugnn.job import private_job_folder, write_job
from nugnn.failure import WorkerFailed
from nugnn.launch import launch
worker_watch._SETTLE_SECONDS = 0.1  # the other worker leaves no word
with private_job_folder() as folder:
    write_job(folder, {"scenario": "trouble_on_rank_1", "how": sys.argv[1]})
    try:
        launch(folder, 2, module="launch_scenarios", log_folder=Path(sys.argv[2]))
    except WorkerFailed as failed:
        print(failed)
        sys.exit(failed.exit_code)
"""


def _on_a_small_disk(script: str, disk: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python where ``disk`` is a file system of 1 MiB; skip where that cannot be made without rights."""
    disk.mkdir()
    mount = ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o size=1m tmpfs {disk} && exec "$@"', "sh"]
    try:
        subprocess.run([*mount, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here in a namespace of one's own")
    return subprocess.run(
        [*mount, sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "SMALL_DISK": str(disk), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("how", "file"), [("fill_disk", None), ("fill_disk_by_torch", "outcome.pt")])
def test_a_full_disk_is_named_with_the_space_left(how: str, file: str | None, tmp_path: Path) -> None:
    """``file.write`` names no file, so the place with the least space among those a worker writes to is named."""
    disk = tmp_path / "disk"
    logs = disk if file is None else tmp_path / "logs"
    done = _on_a_small_disk(_ON_A_SMALL_DISK, disk, how, str(logs))
    assert done.returncode == 3, done.stderr
    named = re.escape(str(disk / (file or "worker-1.log")))
    words = (
        rf"^worker 1 of 2: {named}: the disk is full, \d+\.\d MiB of 0\.0 GiB are free; make space there or write to"
    )
    assert re.search(words, done.stdout), done.stdout


def test_word_is_left_when_the_disk_of_the_job_folder_is_full(tmp_path: Path) -> None:
    """Its space was taken before."""
    script = """
        import os
        from pathlib import Path
        from nugnn.job import WorkerError, read_error, reserve_error, write_error
        folder = Path(os.environ["SMALL_DISK"])
        reserve_error(folder, 0)
        reserve_error(folder, 1)
        try:
            (folder / "filler").write_bytes(bytes(2**21))
        except OSError:
            pass
        error = WorkerError(kind="disk", rank=0, message="no space left " * 1000)
        write_error(folder, error)
        assert read_error(folder, 0) == error
        write_error(folder, WorkerError(kind="disk", rank=1, message="\\u00e9" * 10**6))
        assert read_error(folder, 1).message.startswith("\\u00e9" * 1000)
    """
    done = _on_a_small_disk(script, tmp_path / "disk")
    assert done.returncode == 0, done.stderr


def test_other_errors_pass_a_guard_against_full_disks(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="file write failed"), naming_full_disk(tmp_path / "a.pt"):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")  # there is space here
    with pytest.raises(DiskFullError, match=r"a.safetensors: the disk is full, \d+"), naming_full_disk(tmp_path / "a"):
        raise DiskFullError(f"{tmp_path / 'a.safetensors'}: the disk is full, 0.0 MiB")
    with pytest.raises(DiskFullError, match="b: the disk is full"), naming_full_disk(tmp_path / "no" / "such" / "b"):
        raise Exception('SafetensorError("I/O error: No space left on device (os error 28)")')


def test_lack_of_memory_is_told_from_other_errors() -> None:
    assert classify(MemoryError()) == "memory"
    assert classify(RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory")) == (
        "memory"
    )
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify(caught.value) == "memory"
    assert classify(OSError(12, "Cannot allocate memory")) == "memory"
    assert classify(ImportError("libx.so: cannot allocate memory in static TLS block")) == "memory"
    assert classify(OSError(28, "No space left on device")) == "disk"
    assert classify(OSError(2, "No such file")) == "user"
    assert classify(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) == "internal"


@pytest.mark.parametrize("own", [100, 500])
def test_threads_that_cannot_be_started_at_a_limit_lack_memory(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = replace(SICK, own_bytes=own << 20, own_limit_bytes=550 << 20)
    monkeypatch.setattr(worker_process, "process_state", lambda _: state)
    for words in ("Resource temporarily unavailable", "can't start new thread"):
        assert classify(RuntimeError(words)) == ("memory" if own == 500 else "internal")
    assert classify(RuntimeError("another")) == "internal"


# -- through training ----------------------------------------------------------------------------------------------


class _InTrouble(nn.Module):
    """In its third training step, on the rank that owns node 0, does what it was told."""

    steps = 0

    def __init__(self, width: int, classes: int, how: str, note: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nugnn.GNN("gcn", width, classes, layers=2, hidden=8)])
        self.how, self.note = how, note

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == 3 and self.training and graph.ranks.rank == 1:
            Path(self.note).write_text(str(os.getpid()))
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.how == "loop":
                while True:
                    pass
            elif self.how == "extra sum":
                graph.ranks.sum_(torch.ones(1))
        return self.layers[0](graph, x)


def _ring() -> GraphData:
    nodes = torch.arange(60)
    return GraphData(
        name="ring",
        num_nodes=60,
        src=torch.cat([nodes, nodes]),
        dst=torch.cat([(nodes + 1) % 60, nodes]),
        features=torch.eye(60)[:, :7].clone(),
        labels=nodes % 3,
        num_classes=3,
        train_nodes=nodes,
    )


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("stop", r"^worker 1 of 3 is stopped \(SIGSTOP\): no progress for 3 s"),
        pytest.param(
            "loop",
            r"^worker 1 of 3 computes in \S*test_failure.py:\d+ \(forward\) without coming to an end",
            marks=pytest.mark.slow,
        ),
        ("extra sum", r"^the 3 workers wait for each other"),
    ],
)
def test_trouble_in_a_real_training_is_named(
    how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, jobs = tmp_path / "note", tmp_path / "jobs"
    jobs.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(jobs))

    def has_come() -> bool:
        (folder,), pid = jobs.iterdir(), _number_in(note)
        if pid is None or not all(stamp_of(folder, rank).waits_in for rank in (0, 2)):
            return False
        return letter_of(pid) == "T" if how == "stop" else how == "loop" or bool(stamp_of(folder, 1).waits_in)

    clock = TimeOfComputing(has_come, lambda: [_number_in(note) or 0]) if how == "loop" else TimeOfLooks(has_come)
    clock.stands_for_time(monkeypatch)
    model = _InTrouble(7, 3, how, str(note))
    with pytest.raises(WorkerFailed) as caught:
        nugnn.fit(model, _ring(), workers=3, check=False, timeout=TIMEOUT, epochs=50, log_folder=tmp_path / "logs")
    assert caught.value.exit_code == 3
    assert re.search(words, str(caught.value)), str(caught.value)
    assert re.search(r"worker 0 waits in halo exchange \d+ \(layers\.0\.", str(caught.value)), str(caught.value)
    assert TIMEOUT < clock.now < TIMEOUT + 5


# -- what is said --------------------------------------------------------------------------------------------------

PLACE = Place(host="here", logs=Path("logs"))
SICK = ProcessState(is_stopped=False, cpu_seconds=1.0, transferred_bytes=0, resident_bytes=3 * 2**30)


def test_the_system_running_out_of_memory_is_told_from_a_kill_by_hand() -> None:
    worker = WorkerView(rank=1, exit_code=-signal.SIGKILL, state=SICK)
    before = HostMemory(used_bytes=2**30, limit_bytes=8 * 2**30, num_kills=4)
    assert how_it_ended(worker, (before, replace(before, used_bytes=2**31))) == (
        "ended by SIGKILL, by somebody or by the system for lack of memory (2.0 GiB of 8.0 GiB are in use here, it "
        "occupied 3.0 GiB when last seen)"
    )
    assert how_it_ended(worker, (before, replace(before, num_kills=5))) == (
        "ended by SIGKILL: the system ran out of memory (8.0 GiB here, it occupied 3.0 GiB when last seen); use fewer "
        "workers on this machine, a smaller share for this one (--shares) or a narrower model (--hidden)"
    )
    crashed = replace(worker, exit_code=-signal.SIGSEGV)
    assert how_it_ended(crashed) == "ended by SIGSEGV"
    limited = replace(SICK, own_bytes=2**30, own_limit_bytes=3 * 2**30)
    assert how_it_ended(replace(crashed, state=limited)) == "ended by SIGSEGV"
    words = how_it_ended(replace(crashed, state=replace(limited, own_bytes=5 * 2**29)))
    assert words.startswith("out of memory, in all likelihood: ended by SIGSEGV")
    assert "may have 3.0 GiB of its own (memory_fraction) and had 2.5 GiB" in words


def test_the_cause_comes_before_its_consequences() -> None:
    """User error, then memory and disk, then a process that went, then an error of ours, then a lost peer."""
    peer = WorkerView(rank=0, exit_code=1, error=WorkerError(kind="peer", rank=0, message="gloo"))
    ours = WorkerView(rank=1, exit_code=1, error=WorkerError(kind="internal", rank=1, message="assert"))
    gone = WorkerView(rank=2, exit_code=-9)
    disk = WorkerView(rank=3, exit_code=1, error=WorkerError(kind="disk", rank=3, message="/a: the disk is full"))
    user = WorkerView(rank=4, exit_code=1, error=WorkerError(kind="user", rank=4, message="row 7: class 12 of 10"))
    everything = [peer, ours, gone, disk, user]
    expected = ["worker 0 of 1 lost a peer", "worker 1 of 2 failed: assert", "worker 2 of 3 died", "worker 3 of 4: /a"]
    for count, words in enumerate(expected, start=1):
        exit_code, text = failure_of(everything[:count], PLACE)
        assert exit_code == 3 and text.startswith(words)
    assert failure_of(everything, PLACE) == (2, "row 7: class 12 of 10")


def test_many_workers_still_fit_on_one_screen() -> None:
    views = [WorkerView(rank=rank, stamp=Stamp(1, True, "a sum over all workers")) for rank in range(64)]
    views[40] = WorkerView(rank=40, stamp=Stamp(1, True, None), is_busy=True, frame="/a/b.py:3 (forward)")
    _, text = stall_of(views, PLACE, 300.0)
    assert text.startswith("worker 40 of 64 computes in /a/b.py:3 (forward)")
    assert "    and 57 more" in text and len(text.splitlines()) < 15
    _, text = stall_of([replace(view, stamp=Stamp()) for view in views], PLACE, 300.0)
    assert len(text.splitlines()) < 24


def test_a_collective_of_the_users_own_counts_as_waiting() -> None:
    frame = "/lib/torch/distributed/distributed_c10d.py:2800 (all_reduce)"
    assert WorkerView(rank=0, frame=frame).waits_in == f"an exchange of its own ({frame})"
    own = "/src/nugnn/comm/direct_sums.py:90 (_exchange)", "/src/comm/direct_sums.py:90 (_exchange)"
    assert all(WorkerView(rank=0, frame=frame).waits_in == f"an exchange of its own ({frame})" for frame in own)
    assert WorkerView(rank=0, frame="/a/model.py:3 (forward)").waits_in is None


def test_innermost_frame_is_that_of_the_main_thread() -> None:
    dump = (
        'noise\nThread 0x7f01 (most recent call first):\n  File "/lib/threading.py", line 5 in wait\n\n'
        "Current thread 0x7f02 (most recent call first):\n"
        '  File "/x/nugnn/kernels/interceptor.py", line 1 in _proceed\n'
        '  File "/home/me/model.py", line 12 in forward\n  File "/x/torch/nn/modules/module.py", line 1 in _call_impl\n'
    )
    assert innermost_frame(dump) == "/home/me/model.py:12 (forward)"
    assert innermost_frame("") == "" and innermost_frame("Current thread 0x1 (most recent call first):\n") == ""


def test_own_state_and_memory_are_read() -> None:
    state, memory = process_state(os.getpid()), host_memory()
    assert state is not None and not state.is_stopped and state.cpu_seconds > 0 and state.resident_bytes > 10**7
    assert memory is not None and 0 < memory.used_bytes < memory.limit_bytes
    assert process_state(2**22 + 1) is None
    assert state.own_bytes > 10**7 and state.own_limit_bytes is None
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, before[1]))
        limited = process_state(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert limited is not None and limited.own_limit_bytes == 1 << 40 and not limited.is_at_its_limit
