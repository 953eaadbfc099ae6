"""The launcher against real processes: all finish, one fails in each way, the launcher itself is ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import dgl
import pytest

from exactness import make_graph
from launchers_time import PATIENCE_SECONDS, TimeOfLooks, letter_of, seconds_waited, stamp_of
from nugnn.comm import pulse
from nugnn.failure import WorkerFailed
from nugnn.job import is_done, private_job_folder, pulse_path, read_job, write_job
from nugnn.launch import launch
from nugnn.shares import shards_on_disk
from nugnn.worker_environment import grants_huge_pages, num_cores, worker_environment
from nugnn.worker_process import classify
from nugnn.worker_watch import EventReader, WorkerWatch

HERE = Path(__file__).resolve().parent
forked = pytest.mark.usefixtures("forked_workers")
"""For laws of what happens once workers run; those of how they start, and one of each way to fail, are without."""


@pytest.fixture(autouse=True)
def _importable_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit sys.path, so that is how they find the scenarios."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def run(
    scenario: str,
    num_workers: int,
    *,
    timeout: float = 300.0,
    port: int = 0,
    clock_of: Callable[[Path], TimeOfLooks] | None = None,
    **job: Any,
) -> list[dict[str, Any]]:
    """Launch a scenario and return rank 0's events; ``clock_of`` its folder stands for the launcher's time."""
    events: list[dict[str, Any]] = []
    with private_job_folder() as folder, pytest.MonkeyPatch.context() as patch:
        write_job(folder, {"scenario": scenario, **job})
        if clock_of is not None:
            clock_of(folder).stands_for_time(patch)
        launch(folder, num_workers, module="launch_scenarios", timeout=timeout, on_event=events.append, port=port)
    return events


def gone(began: Path) -> bool:
    """Whether the process that noted its number has ended."""
    text = began.read_text() if began.exists() else ""
    return bool(text) and letter_of(int(text)) in ("Z", "")


def is_running(pid: int) -> bool:
    return letter_of(pid) not in ("Z", "")


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and any(is_running(pid) for pid in pids):
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []


def test_launch_01_two_runs_at_once_finish_and_listen_on_loopback_only() -> None:
    """And events arrive whole and in order although they exceed the pipe (64 KiB)."""
    with _somebody_at(29500), ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: run("sum_ranks", 2, timeout=60, events=200), range(2)))
    for events in results:
        assert events[0]["value"] == 3.0
        assert events[0]["threads"] == -(-num_cores() // 2)
        # 0100007F is 127.0.0.1 as /proc/net/tcp writes it; rank 0 has the store's socket and gloo's.
        assert events[0]["listening_on"] and set(events[0]["listening_on"]) == {"0100007F"}
        assert [event["step"] for event in events[1:]] == list(range(200))


@contextmanager
def _somebody_at(port: int) -> Iterator[None]:
    """The port is taken: here, or by another process."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def test_launch_01_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(WorkerFailed) as caught:
            run("sum_ranks", 2, port=port)
    assert caught.value.exit_code == 2
    assert f"port {port} cannot be used" in str(caught.value) and "0 for any free one" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit before the first exchange", "worker 1 of 3 died: exit code 86"),
        ("exit", "worker 1 of 3 died: exit code 86"),
        ("kill", "worker 1 of 3 died: ended by SIGKILL"),
    ],
)
def test_comm_05_a_lost_worker_ends_all_and_is_named(how: str, words: str, request: pytest.FixtureRequest) -> None:
    """The survivors complain first, the message names the one that went."""
    if how != "exit before the first exchange":  # that one is among interpreters of their own
        request.getfixturevalue("forked_workers")
    clocks = list[TimeOfLooks]()

    def clock_of(folder: Path) -> TimeOfLooks:
        clocks.append(TimeOfLooks(lambda: gone(folder / "began")))
        return clocks[0]

    with pytest.raises(WorkerFailed) as caught:
        run("lose_rank_1", 3, clock_of=clock_of, how=how)
    assert caught.value.exit_code == 3
    assert words in str(caught.value)
    assert 0 < clocks[0].now < 5, "two for the others to leave word, two to end them"


@forked
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "worker 1 of 3 died: ended by SIGKILL"),
        ("hang", r"worker 1 of 3 hangs in .*\(sum_few_values\)[^$]*worker 0 waits in a sum over all workers"),
        ("other values", "workers are out of step: .*worker 1.* 7 values of float32"),
    ],
)
def test_who_leaves_a_sum_from_rank_to_rank_is_named(how: str, words: str) -> None:

    def clock_of(folder: Path) -> TimeOfLooks:
        others = (0, 2)
        return TimeOfLooks(lambda: (folder / "began").exists() and all(stamp_of(folder, r).waits_in for r in others))

    with pytest.raises(WorkerFailed, match=words) as caught:
        run("sum_few_values", 3, how=how, **({"timeout": 3.0, "clock_of": clock_of} if how == "hang" else {}))
    assert caught.value.exit_code == 3


@forked
def test_user_error_in_one_worker_is_the_one_message() -> None:
    with pytest.raises(WorkerFailed) as caught:
        run("user_error_on_rank_1", 2, timeout=60)
    said = r"labels.csv, row 7: class 12 of 10 \(\S*launch_scenarios.py, line \d+\)"
    assert caught.value.exit_code == 2 and re.fullmatch(said, str(caught.value))


def test_internal_error_names_worker_error_and_log(tmp_path: Path) -> None:
    with private_job_folder() as folder, pytest.raises(WorkerFailed) as caught:
        write_job(folder, {"scenario": "internal_error_on_rank_1"})
        launch(folder, 2, module="launch_scenarios", timeout=60, log_folder=tmp_path / "logs")
    assert caught.value.exit_code == 3
    assert "worker 1 of 2 failed: AssertionError: received 3 rows, planned 4" in str(caught.value)
    assert "Traceback" in (tmp_path / "logs" / "worker-1.log").read_text()
    assert str(tmp_path / "logs" / "worker-1.log") in str(caught.value)


def test_missing_package_is_a_user_error() -> None:
    with pytest.raises(WorkerFailed, match="No module named 'no_such_package'") as caught:
        run("import_error", 1)
    assert caught.value.exit_code == 2


@forked
def test_leaving_with_code_0_before_the_work_is_done_is_a_failure() -> None:
    with pytest.raises(WorkerFailed, match="worker 1 of 2 died: exit code 0 before its work was done") as caught:
        run("leave_early", 2)
    assert caught.value.exit_code == 3


NO_PROCESS = 2**22 + 1
"""Above the largest that a system gives."""


class EndsWhenLookedAt:
    """A process that runs at the first look, and has ended in failure at the next."""

    pid = NO_PROCESS

    def __init__(self) -> None:
        self._looks = 0

    def poll(self) -> int | None:
        self._looks += 1
        return None if self._looks == 1 else 1


def watched(workers: Any, folder: Path, timeout: float, on_event: Callable[[Any], None] | None = None) -> None:
    """What `launch` does once it has started the workers; the first may have a pipe for its events."""
    (folder / "logs").mkdir()
    stamps = [pulse.create(pulse_path(folder, rank)) for rank in range(len(workers))]
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    workers[0].events_fd = write_end
    events = EventReader(read_end, on_event)
    try:
        WorkerWatch(workers, stamps, folder, folder / "logs", timeout, events).until_done()
    finally:
        events.close()
        os.close(read_end)
        os.close(write_end)


def test_workers_that_all_fail_between_two_looks_have_not_finished(tmp_path: Path) -> None:
    """A run whose workers find the same fault at once had no failed worker at one look, and none left at the next."""
    with pytest.raises(WorkerFailed, match="exit code 1"):
        watched([EndsWhenLookedAt(), EndsWhenLookedAt()], tmp_path, 10.0)


class SpeaksAndEnds:
    """A process that sends an event and ends, all between two looks at it."""

    pid, events_fd = NO_PROCESS, -1

    def __init__(self) -> None:
        self._has_ended = False

    def poll(self) -> int | None:
        if not self._has_ended:
            os.write(self.events_fd, b'{"kind": "epoch", "number": 1}\n')
        self._has_ended = True
        return 1


def test_what_a_worker_said_last_is_heard_though_it_ended_at_once(tmp_path: Path) -> None:
    heard: list[Any] = []
    with pytest.raises(WorkerFailed, match="exit code 1"):
        watched([SpeaksAndEnds()], tmp_path, 10.0, heard.append)
    assert heard == [{"kind": "epoch", "number": 1}]


class AnswersLate:
    """A process that hangs, and gets no core to say where while the launcher waits for it three times."""

    pid = NO_PROCESS

    def __init__(self, log: Path) -> None:
        self._log, self._is_asked, self.waits, self.now = log, False, 0, 0.0

    def poll(self) -> int | None:
        return None

    def send_signal(self, number: int) -> None:
        self._is_asked = True

    def monotonic(self) -> float:
        self.now += 0.05
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits += self._is_asked
        self.now += seconds
        if self.waits == 3:
            self._log.write_text(
                'Current thread 0x1 (most recent call first):\n  File "/a/model.py", line 7 in forward\n'
            )


def test_a_worker_on_busy_cores_has_time_to_say_where_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = AnswersLate(tmp_path / "logs" / "worker-0.log")
    monkeypatch.setattr("nugnn.worker_watch.time", late)
    with pytest.raises(WorkerFailed, match=r"^worker 0 of 1 hangs in /a/model.py:7 \(forward\): no progress for"):
        watched([late], tmp_path, 0.2)
    assert late.waits == 3


@forked
def test_launch_04_a_worker_that_has_finished_but_does_not_exit_is_ended() -> None:
    clocks = list[TimeOfLooks]()

    def clock_of(folder: Path) -> TimeOfLooks:
        clocks.append(TimeOfLooks(lambda: all(is_done(folder, rank) for rank in range(2))))
        return clocks[0]

    assert run("never_exits", 2, clock_of=clock_of) == []
    assert 5 < clocks[0].now < 5 + 3


@forked
def test_a_worker_that_hangs_after_the_others_finished_is_named() -> None:
    def clock_of(folder: Path) -> TimeOfLooks:
        return TimeOfLooks(lambda: (folder / "began").exists() and is_done(folder, 0) and is_done(folder, 2))

    with pytest.raises(
        WorkerFailed, match=r"^worker 1 of 3 hangs in .*\(rank_1_hangs\): no progress for 3 s"
    ) as caught:
        run("rank_1_hangs", 3, timeout=3.0, clock_of=clock_of)
    assert caught.value.exit_code == 3


@forked
def test_workers_wait_for_a_job_that_is_prepared_meanwhile() -> None:
    events: list[dict[str, Any]] = []
    with private_job_folder() as folder:

        def prepare() -> None:
            time.sleep(0.5)
            write_job(folder, {"scenario": "call", "function": abs})

        launch(folder, 1, module="launch_scenarios", on_event=events.append, prepare=prepare)
    assert [event["value"] for event in events] == [20]


def test_an_error_while_preparing_ends_the_workers() -> None:
    before = set(Path("/proc").glob("[0-9]*"))
    with private_job_folder() as folder, pytest.raises(ValueError, match="no such graph"):

        def prepare() -> None:
            raise ValueError("no such graph")

        launch(folder, 2, module="launch_scenarios", prepare=prepare)
    started = [path for path in set(Path("/proc").glob("[0-9]*")) - before if _command_names(path, str(folder))]
    assert started == []


def _command_names(process: Path, text: str) -> bool:
    try:
        return text in (process / "cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return False


@forked
def test_functions_defined_on_the_spot_reach_the_workers() -> None:
    factor = 3
    events = run("call", 1, function=lambda x: x * factor)
    assert events == [{"kind": "answer", "value": 60, "marker": False}]


def test_workers_do_not_import_from_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder named datasets where the user stands must not hide an installed package of that name."""
    for name in ("datasets", "comm", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p and Path(p).resolve() != HERE.parents[1]])
    assert run("show_imports", 1) == [{"kind": "imports", "bare": []}]


@forked
@pytest.mark.parametrize("then", ["return", "fail"])
def test_what_a_worker_started_is_gone_with_it(then: str) -> None:
    events: list[dict[str, Any]] = []
    with private_job_folder() as folder:
        write_job(folder, {"scenario": "with_grandchild", "then": then})
        try:
            launch(folder, 1, module="launch_scenarios", on_event=events.append)
        except WorkerFailed:
            assert then == "fail"
        else:
            assert then == "return"
    assert_gone(events[0]["pids"])


_SCRIPT = """
import torch, nugnn
nodes = torch.arange(30)
data = nugnn.GraphData(
    name="ring", num_nodes=30, src=torch.cat([nodes, nodes]), dst=torch.cat([(nodes + 1) % 30, nodes]),
    features=torch.eye(30), labels=nodes % 3, num_classes=3, train_nodes=nodes,
)
result = nugnn.fit(nugnn.GNN("gcn", 30, 3, layers=2, hidden=4), data, workers=2, check=False, epochs=1)
print("last line", flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "code"), [("", 0), pytest.param("raise RuntimeError('after training')", 1, marks=pytest.mark.slow)]
)
def test_launch_04_a_script_ends_within_10_seconds_of_its_last_line(then: str, code: int, tmp_path: Path) -> None:
    """Without a terminal; nothing of it is left."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(then=then))
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "NUGNN_TEST_MARK": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "last line\n"
        assert seconds_waited(process) < 10 and process.returncode == code
    assert [path for path in Path("/proc").glob("[0-9]*") if _has_mark(path, str(tmp_path))] == []


def _has_mark(process: Path, mark: str) -> bool:
    try:
        return f"NUGNN_TEST_MARK={mark}" in (process / "environ").read_text()
    except (OSError, UnicodeDecodeError):
        return False


_LAUNCHER = """
import sys
from nugnn.job import private_job_folder, write_job
from nugnn.launch import launch
with private_job_folder() as folder:
    print(folder, flush=True)
    write_job(folder, {"scenario": "with_grandchild", "then": "sleep"})
    try:
        launch(folder, 2, module="launch_scenarios", on_event=lambda event: print(*event["pids"], flush=True))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_ending_the_launcher_ends_the_workers(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a place of its own: whatever starts a run in another process of the tests would remove what is left there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER],
        env={**os.environ, "PYTHONPATH": str(HERE), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    folder = Path(launcher.stdout.readline().strip())
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    assert all(is_running(pid) for pid in pids)
    launcher.send_signal(number)
    assert seconds_waited(launcher) < 10 and launcher.returncode == code
    assert_gone(pids)
    if number is signal.SIGKILL:
        assert folder.exists()  # nobody was left to remove it
        with private_job_folder() as next_one:  # the next run does
            assert next_one.exists()
    assert not folder.exists()
    launcher.stdout.close()


def test_environment_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = worker_environment(1, 10**6, 1234, 5.0)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["MASTER_ADDR"] == "127.0.0.1" and environment["RANK"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_environment(0, 2, 1234, 5.0)["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "many")  # of which a library would make what it likes
    assert worker_environment(0, 10**6, 1234, 5.0)["OMP_NUM_THREADS"] == "1"


def test_workers_divide_all_cores_into_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nugnn.worker_environment.num_cores", lambda: 5)
    assert [worker_environment(rank, 3, 1234, 5.0)["OMP_NUM_THREADS"] for rank in range(3)] == ["2", "2", "1"]


def test_huge_pages_are_asked_for_where_they_are_granted_and_not_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "enabled"
    for text, expected in (
        ("always [madvise] never", True),
        ("[always] madvise never", True),
        ("always madvise [never]", False),
    ):
        setting.write_text(text)
        assert grants_huge_pages(setting) is expected
    assert not grants_huge_pages(tmp_path / "missing")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    monkeypatch.setattr("nugnn.worker_environment.grants_huge_pages", lambda: False)
    assert "THP_MEM_ALLOC_ENABLE" not in worker_environment(0, 2, 1234, 5.0)
    monkeypatch.setattr("nugnn.worker_environment.grants_huge_pages", lambda: True)
    assert worker_environment(0, 2, 1234, 5.0)["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert worker_environment(0, 2, 1234, 5.0)["THP_MEM_ALLOC_ENABLE"] == "0"


def test_job_folder_is_private_and_a_public_one_is_refused(tmp_path: Path) -> None:
    with private_job_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        write_job(folder, {"a": 1})
        assert read_job(folder) == {"a": 1}
        folder.chmod(0o755)
        with pytest.raises(PermissionError, match="not private"):
            read_job(folder)
    assert not folder.exists()


def test_a_job_folder_goes_though_something_is_written_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends early does not wait for the thread that prepares it."""
    found, remove = list[Path](), shutil.rmtree

    def busy(folder: Path, ignore_errors: bool) -> None:
        remove(folder, ignore_errors=ignore_errors)
        if not found:
            folder.mkdir()
            (folder / "tensor-0").touch()
        found.append(folder)

    monkeypatch.setattr(shutil, "rmtree", busy)
    with private_job_folder() as folder:
        pass
    assert set(found) == {folder} and not folder.exists()


def test_shards_are_not_written_where_the_run_has_ended(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        shards_on_disk(make_graph(), [1.0, 1.0], "metis", "none", None, tmp_path / "gone" / "shards")
    assert list(tmp_path.iterdir()) == []


def test_only_own_folders_whose_process_has_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("nugnn-job-abandoned", "nugnn-job-public", "nugnn-job-unlocked", "other"):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "job.pickle").touch()
        if name != "nugnn-job-unlocked":
            (tmp_path / name / "launcher.lock").touch()
    (tmp_path / "nugnn-job-public").chmod(0o755)
    (tmp_path / "nugnn-job-link").symlink_to(tmp_path / "other")
    (tmp_path / "nugnn-job-file").touch()
    code = "from nugnn.job import private_job_folder as make\nwith make() as folder: print(folder)"
    with private_job_folder() as living:
        assert not (tmp_path / "nugnn-job-abandoned").exists()
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True)
        assert living.exists() and (living / "launcher.lock").read_text() == f"{os.getpid()}\n"
        with private_job_folder() as second:  # of the same process
            assert living.exists() and second.exists()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"nugnn-job-public", "nugnn-job-unlocked", "nugnn-job-link", "nugnn-job-file", "other"}


def test_what_cannot_be_handed_over_is_named() -> None:
    with private_job_folder() as folder, pytest.raises(ValueError, match="model cannot be handed to the worker"):
        write_job(folder, {"seed": 1, "model": threading.Lock()})


def test_events_split_over_reads_are_put_together() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    events: list[dict[str, Any]] = []
    reader = EventReader(read_end, events.append)
    for piece in (b'{"a"', b': 1}\n{"b": 2}\n{', b'"c": 3}\n'):
        os.write(write_end, piece)
        reader.read(0)
    assert events == [{"a": 1}, {"b": 2}, {"c": 3}]
    reader.close()
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "user"),
        (FileNotFoundError("x"), "user"),
        (ImportError("x"), "user"),
        (NotImplementedError("DGLGraph.edges has no exact meaning on one part"), "user"),
        (FloatingPointError("the training loss became nan"), "user"),
        (dgl.DGLError("0-in-degree nodes"), "user"),
        (ConnectionResetError("x"), "peer"),
        (TimeoutError("x"), "peer"),
        (RuntimeError("[third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "peer"),
        (RuntimeError("shape mismatch"), "internal"),
        (AssertionError(), "internal"),
    ],
)
def test_errors_are_sorted_by_whose_they_are(error: Exception, kind: str) -> None:
    assert classify(error) == kind


def test_the_launcher_needs_no_torch() -> None:
    code = textwrap.dedent("""
        import sys, nugnn.launch, nugnn.job, nugnn.worker_process
        assert not {"torch", "dgl", "numpy"} & set(sys.modules)
    """)
    subprocess.run([sys.executable, "-c", code], check=True)
