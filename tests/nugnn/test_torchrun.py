"""``nugnn train`` under torchrun: the result of one process, and one message when one process fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import nugnn
from launchers_time import letter_of, wait_until
from nugnn import mutual_watch
from nugnn.comm.pulse import SIZE
from nugnn.config import TrainConfig
from nugnn.member import Member, member_from, process_space
from nugnn.mutual_watch import Card, MutualWatch, Note
from nugnn.run import run_from_config
from nugnn.torchrun_cores import _is_torchruns_own, variables
from nugnn.worker_cores import asked_threads, equal_cores, fair_threads, own_cores, own_nodes, users_environment

MODEL = """
    import os, signal, time
    import torch, nugnn

    class Model(torch.nn.Module):
        def __init__(self, in_features, num_classes):
            super().__init__()
            self.layers = torch.nn.ModuleList([nugnn.GNN("gcn", in_features, num_classes, layers=2, hidden=8)])
            self.steps = 0

        def forward(self, graph, x):
            self.steps += self.training
            if self.training and self.steps == 1:
                tell_place()
            is_victim = "TROUBLE" in os.environ and os.environ["RANK"] == os.environ.get("VICTIM", "1")
            if self.training and self.steps == 3 and is_victim:
                open(os.environ["NOTE"], "w").write(str(time.time()))
                trouble()
            return self.layers[0](graph, x)

    def tell_place():
        threads = os.listdir("/proc/self/task")
        places = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in threads}
        with open(f"place-{os.environ['RANK']}", "w") as file:
            print(torch.get_num_threads(), sorted(places), file=file)

    def trouble():
        kind = os.environ["TROUBLE"]
        if kind == "user":
            raise ValueError("labels.csv, row 7: class 12 of 10")
        if kind == "raise":
            raise RuntimeError("shape mismatch")
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            pass
"""


def train(tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, str, str, float]:
    """Exit code, standard output, standard error and time of the end of ``nugnn train`` in two processes."""
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    path = os.pathsep.join([str(Path(nugnn.__file__).parents[1]), *filter(None, sys.path)])
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NOTE": str(tmp_path / "note"), **variables}
    environment = {name: value for name, value in environment.items() if value}
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [sys.executable, *starter, "nugnn", "train", "--dataset", "digits", "--out", "out2", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
    )
    return done.returncode, done.stdout, done.stderr, time.time()


def test_torchrun_gives_the_result_of_one_process_and_shows_it_once(tmp_path: Path) -> None:
    options = ("--epochs", "4", "--hidden", "8", "--dropout", "0.5")
    limits = ("--limits", "threads=1;memory_fraction=0.5")
    code, shown, errors, _ = train(tmp_path, *options, "--shares", "0.7,0.3", *limits)
    assert code == 0, errors
    assert shown.count("splitting the graph into 2 parts") == 1 and shown.count("validation accuracy") == 1
    assert "error" not in errors.lower()
    run_from_config(TrainConfig(dataset="digits", epochs=4, hidden=8, dropout=0.5, out=str(tmp_path / "out1")))
    split, alone = (
        [json.loads(line) for line in (tmp_path / f"out{num}" / "metrics.jsonl").read_text().splitlines()]
        for num in (2, 1)
    )
    # float32, four steps of Adam: its first steps have the size of the learning rate whatever the gradient
    assert [epoch["loss"] for epoch in split] == pytest.approx([epoch["loss"] for epoch in alone], rel=1e-3)
    result = json.loads((tmp_path / "out2" / "result.json").read_text())
    assert result["workers"] == 2 and len(result["ranks"]) == 2 and result["shares"][0] > 0.65
    assert [report["limits"]["asked"] for report in result["ranks"]] == ["threads=1", "memory_fraction=0.5"]


def assert_placed(tmp_path: Path, asked: str) -> None:
    """Processes on CPUs have threads and cores as workers have; where none are asked for, torchrun's own 1 is nobody's.

    Args:
        tmp_path: Of a run that came to its first step.
        asked: The number of threads that the user asked for.
    """
    users = {"OMP_NUM_THREADS": asked} if asked else {}
    placed = equal_cores(2, own_nodes(), users)
    threads, everywhere = fair_threads(2, len(own_cores())), own_cores()
    for rank in range(2):
        cores = everywhere if placed is None else tuple(sorted(placed[rank].cores or ()))
        said = (tmp_path / f"place-{rank}").read_text().strip()
        assert said == f"{asked or threads[rank]} {[cores]}"


@pytest.mark.parametrize(
    ("kind", "worker_code", "words"),
    [
        ("user", 2, r"nugnn: error: worker 1 of 2 on \S+: labels.csv, row 7: class 12 of 10 \(\S*model.py, line \d+\)"),
        pytest.param(
            "raise",
            3,
            r"nugnn: error: worker 1 of 2 on \S+ failed: RuntimeError: shape mismatch \(\S*model.py, line \d+\)",
            marks=pytest.mark.slow,
        ),
        (
            "stop",
            3,
            r"nugnn: error: worker 1 of 2 is stopped \(SIGSTOP\): no progress for 10 s \(--timeout\)\n.* on \S+",
        ),
        pytest.param(
            "loop",
            3,
            r"error: worker 1 of 2 computes in \S*model.py:\d+ \(trouble\) without coming to an end: no progress",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_that_fails_makes_the_others_leave(kind: str, worker_code: int, words: str, tmp_path: Path) -> None:
    """By itself torchrun always ends with 1; its own report has the code of each process."""
    # longer than kernels take to compile, and where nobody hangs, longer than anything
    timeout = "10" if kind in ("stop", "loop") else "200"
    options = ("--epochs", "50", "--timeout", timeout, "--device", "cpu")
    code, _, errors, end = train(tmp_path, *options, "--model", f"{tmp_path / 'model.py'}:Model", TROUBLE=kind)
    assert code == 1
    assert_placed(tmp_path, asked="1")
    assert re.search(words, errors), errors[-3000:]
    assert errors.count("nugnn: error:") == 1
    assert f"(exitcode: {worker_code})" in errors or "exitcode: -9" in errors
    # torchrun takes up to 5 s to see it; by themselves the others would wait for 200 s, or for ever
    assert end - float((tmp_path / "note").read_text()) < 120


@pytest.mark.parametrize("victim", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_process_that_is_gone_is_named_with_how_to_go_on(victim: str, tmp_path: Path) -> None:
    """Torchrun ends the others at once: they have to outlive that to say who is gone."""
    options = ("--epochs", "50", "--checkpoint-every", "1", "--device", "cpu")
    code, _, errors, _ = train(
        *(tmp_path, *options, "--model", f"{tmp_path / 'model.py'}:Model"),
        TROUBLE="kill",
        VICTIM=victim,
        OMP_NUM_THREADS="",
    )
    assert code == 1
    assert_placed(tmp_path, asked="")
    assert re.search(rf"nugnn: error: worker {victim} \(process \d+ on \S+\) of 2 died: killed from outside", errors), (
        errors
    )
    assert errors.count("nugnn: error:") == 1
    assert re.search(r"\ngo on with: nugnn train --config \S+ --resume", errors)


@pytest.mark.slow
def test_processes_on_cpus_have_as_many_threads_as_are_asked_for(tmp_path: Path) -> None:
    """One and none are asked for in the runs above; without MKL_DYNAMIC torch has no more than there are cores."""
    options = ("--epochs", "1", "--model", f"{tmp_path / 'model.py'}:Model", "--device", "cpu")
    asked = str(len(own_cores()) + 1)
    code, _, errors, _ = train(tmp_path, *options, OMP_NUM_THREADS=asked, MKL_DYNAMIC="FALSE")
    assert code == 0, errors
    assert_placed(tmp_path, asked)


def test_wrong_settings_are_said_once(tmp_path: Path) -> None:
    code, _, errors, _ = train(tmp_path, "--workers", "5")
    assert code == 1 and errors.count("nugnn: error:") == 1
    assert "--workers 5: torchrun started 2; leave --workers out" in errors


# -- a watch alone -----------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Left(Exception):  # noqa: N818 - stands for the end of the process
    """The process would have ended."""


def watch_of(rank: int, world_size: int, store: dist.Store) -> MutualWatch:
    """A watch that is not started, of a process that torchrun started on this host."""
    member = Member(rank=rank, world_size=world_size, is_one_host=True, address="", port=0, hosts_store=False)
    return MutualWatch(member, store, bytearray(SIZE), 3.0)


def card_of(pid: int, space: str) -> Card:
    return Card(
        tick=1, host="node-b", space=space, pid=pid, beats=0, is_stepping=True, is_done=False, waits_in=None, frame=""
    )


@pytest.mark.parametrize("after_seconds", [0.0, 0.1, 0.3, mutual_watch._TICK_SECONDS])
def test_a_peer_that_has_gone_is_named_whenever_its_last_card_was_read(
    after_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It publishes as it goes, and this process reads that up to a tick later."""
    clock, notes = Clock(), list[Note]()
    monkeypatch.setattr(mutual_watch, "time", clock)
    watch = watch_of(1, 3, dist.HashStore())
    monkeypatch.setattr(watch, "leave", notes.append)
    watch._cards[2], watch._seen_at[2] = card_of(7, "of another host"), clock.now + after_seconds
    watch._seen_at[0] = watch._seen_at[1] = clock.now + 60  # they live
    watch.fail(ConnectionError("Connection closed by peer"))
    assert [note.text for note in notes] == ["worker 2 of 3 on node-b died or cannot be reached any more"]


@pytest.mark.parametrize("shows_after_seconds", [0.0, 0.5])
def test_a_process_that_hangs_is_not_ended_before_it_has_shown_why(
    shows_after_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 found out that it hangs itself: nobody else shows its note."""
    store, killed = dist.HashStore(), list[tuple[int, bool]]()
    monkeypatch.setattr(
        mutual_watch,
        "os",
        SimpleNamespace(
            **{**vars(os), "kill": lambda pid, _: killed.append((pid, store.check(["shown"]))), "_exit": leave}
        ),
    )
    watch = watch_of(1, 2, store)
    watch._cards[0] = card_of(7, process_space())
    note = Note(rank=0, exit_code=3, text="worker 0 of 2 hangs", end=(0,))
    store.set("note", json.dumps(asdict(note)))
    shows = threading.Timer(shows_after_seconds, store.set, ["shown", "1"])
    shows.start()
    with pytest.raises(Left):
        watch.leave(Note(rank=1, exit_code=3, text="the same", end=(0,)))
    shows.join()
    assert killed == [(7, True)]


def leave(code: int) -> None:
    raise Left(code)


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")
def test_a_process_that_is_stopped_ends_a_run_in_which_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes = Clock(), list[Note]()
    monkeypatch.setattr(mutual_watch, "time", clock)
    watch, begin = watch_of(0, 2, dist.HashStore()), clock.now

    def next_tick() -> bool:
        """Rank 0 has finished an operator; the cards of rank 1 are those of before."""
        clock.sleep(mutual_watch._TICK_SECONDS)
        watch._cards[0] = replace(card_of(os.getpid(), process_space()), beats=int(10 * (clock.now - begin)))
        return bool(notes) or clock.now - begin > 10 * watch.timeout

    monkeypatch.setattr(watch, "_has_ended", next_tick)
    monkeypatch.setattr(watch, "_read_cards", lambda: None)
    monkeypatch.setattr(watch, "leave", notes.append)
    with subprocess.Popen(["sleep", "600"]) as stopped:
        try:
            stopped.send_signal(signal.SIGSTOP)
            wait_until(lambda: letter_of(stopped.pid) == "T")
            watch._cards[1] = card_of(stopped.pid, process_space())
            watch.run()
        finally:
            stopped.kill()
    assert [note.text.split("\n")[0] for note in notes] == [
        "worker 1 of 2 is stopped (SIGSTOP): no progress for 3 s (--timeout)"
    ]
    assert 1 in notes[0].end


def test_a_note_is_shown_once_though_two_threads_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that fails, and the watch that reads the note before the process has ended."""
    shown, has_shown, has_ended = list[str](), threading.Event(), threading.Event()

    def show(note: Note, how_to_go_on: str) -> None:
        shown.append(note.text)
        has_shown.set()
        time.sleep(0.3)

    def end(code: int) -> None:
        has_ended.set()
        threading.Event().wait()

    monkeypatch.setattr(mutual_watch, "_show", show)
    monkeypatch.setattr(mutual_watch, "os", SimpleNamespace(**{**vars(os), "_exit": end}))
    watch, note = watch_of(0, 2, dist.HashStore()), Note(rank=0, exit_code=2, text="row 7: class 12 of 10")
    for act in (watch.leave, watch._act_on):
        threading.Thread(target=act, args=(note,), daemon=True).start()
        assert has_shown.wait(60)
    assert has_ended.wait(60)
    time.sleep(0.1)
    assert shown == [note.text]


def test_who_has_finished_does_not_wait_for_a_store_that_went_with_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(mutual_watch, "time", clock)
    monkeypatch.setattr(mutual_watch.signal, "set_wakeup_fd", lambda fd: None)
    monkeypatch.setattr(mutual_watch.signal, "signal", lambda *_: None)
    watch, begin = watch_of(1, 2, Gone()), clock.now
    watch._is_done = True  # so the thread ends at once
    watch.start()
    watch.join(60)
    watch.finish()
    assert clock.now - begin < mutual_watch._BYE_SECONDS


class Gone(dist.Store):
    """The store of a process that has ended."""

    def set(self, key: str, value: str) -> None:
        raise ConnectionError("Connection reset by peer")


# -- who this process is -----------------------------------------------------------------------------------------------

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_members_are_told_from_processes_that_were_started_alone() -> None:
    member = member_from(TORCHRUN)
    assert member is not None and (member.rank, member.world_size, member.port) == (1, 4, 29500)
    assert not member.is_one_host and not member.hosts_store
    first = member_from({**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False", "LOCAL_WORLD_SIZE": "4"})
    assert first is not None and first.hosts_store and first.is_one_host
    assert member_from({}) is None and member_from({**TORCHRUN, "WORLD_SIZE": "1"}) is None
    assert member_from({**TORCHRUN, "NUGNN_LIFELINE_FD": "3"}) is None
    with pytest.raises(
        ValueError, match="RANK and WORLD_SIZE are set but MASTER_ADDR is not; start the processes with"
    ):
        member_from({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"})
    with pytest.raises(ValueError, match="have to be numbers"):
        member_from({**TORCHRUN, "MASTER_PORT": "x"})


@pytest.mark.parametrize("asked", [None, "2", "4"])
def test_threads_and_cores_come_before_torch_is_loaded(asked: str | None) -> None:
    nodes = [(0, 1, 2, 3, 4)]
    for rank, (own, cores) in enumerate((("3", "0,1,2"), ("2", "3,4"))):
        environment = TORCHRUN | {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": asked or "1"}
        added = variables(environment, nodes, is_asked=asked is not None)
        assert added["OMP_NUM_THREADS"] == (asked or own)
        assert added.get("NUGNN_CORES") == (None if asked == "4" else cores)
        users = users_environment(environment | added)
        assert users.get("OMP_NUM_THREADS") == asked and asked_threads(users) == (asked and int(asked))
        assert "NUGNN_CORES" not in users
    assert variables(TORCHRUN, nodes, is_asked=False) == {}


def test_one_thread_is_torchruns_own_where_it_was_started_without_a_number(tmp_path: Path) -> None:
    environment, parents = {"TORCHELASTIC_RUN_ID": "a", "OMP_NUM_THREADS": "1"}, tmp_path / "environ"
    parents.write_bytes(b"HOME=/root\0NOT_OMP_NUM_THREADS=3\0")
    assert _is_torchruns_own(environment, parents)
    assert not _is_torchruns_own(environment | {"OMP_NUM_THREADS": "2"}, parents)
    assert not _is_torchruns_own({"OMP_NUM_THREADS": "1"}, parents)
    parents.write_bytes(b"HOME=/root\0OMP_NUM_THREADS=1\0")
    assert not _is_torchruns_own(environment, parents)
    assert not _is_torchruns_own(environment, tmp_path / "unreadable")


@pytest.mark.slow
def test_torchrun_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    options = ("--hidden", "8", "--checkpoint-every", "2")
    assert train(tmp_path, *options, "--epochs", "4")[0] == 0
    code, shown, errors, _ = train(tmp_path, *options, "--epochs", "7", "--resume")
    assert code == 0, errors
    assert shown.count("going on after epoch 4") == 1
    assert len((tmp_path / "out2" / "metrics.jsonl").read_text().splitlines()) == 7
    resumed = (tmp_path / "out2" / "model.safetensors").read_bytes()
    assert train(tmp_path, *options, "--epochs", "7")[0] == 0
    assert (tmp_path / "out2" / "model.safetensors").read_bytes() == resumed
    code, _, errors, _ = train(tmp_path, "--hidden", "9", "--epochs", "7", "--resume")
    assert code != 0 and "hidden was 8, is 9" in errors


@pytest.mark.parametrize(
    "command", ["evaluate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("predict", "partition"))]
)
def test_commands_that_every_process_would_do_are_refused_in_one_sentence(tmp_path: Path, command: str) -> None:
    """Each of two processes would write ``predictions.npy``; and each would show the same table."""
    run_from_config(TrainConfig(dataset="digits", epochs=1, hidden=4, out=str(tmp_path / "out1")))
    options = ["--dataset", "digits", "--workers", "2", "--out", "parts"] if command == "partition" else ["out1"]
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nugnn"]
    done = subprocess.run(
        [sys.executable, *starter, command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    said = rf"nugnn: error: nugnn {command} is one of 2 processes that torchrun started, .* write the same files"
    assert len(re.findall(said, done.stderr)) == 1, done.stderr
    assert re.search(r"exitcode *: 2 ", done.stderr) and done.returncode == 1
    assert not (tmp_path / "out1" / "predictions.npy").exists() and not (tmp_path / "parts").exists()
