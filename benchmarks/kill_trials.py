"""Runs that are killed at bad moments and resumed: do they end with the bits of the run that nobody disturbed?

    python benchmarks/kill_trials.py                    # 60 kills, 10 Ctrl-C, and resuming on 1, 2, 3 and 5 workers
    python benchmarks/kill_trials.py --kills 20 --interrupts 0 --no-others
    python benchmarks/kill_trials.py --samples --kills 20 --interrupts 4    # images in batches: also in mid-epoch

Each trial is ``nugnn train`` as a user runs it, ended with SIGKILL (a worker, every fifth time the launching process),
then ``nugnn train --resume``. With ``--samples`` trials take turns between two perceptrons: one with batch norm over
ranks, under the interceptor's mode, and one whose steps run without it (``nugnn/known_rows.py``).

To know what a process does at that moment without any change to it, it is stopped with SIGSTOP, py-spy reads its
Python stack from its memory, and it is killed there, or goes on when the stack is not in the phase that the trial is
for. Needs ``pip install py-spy`` and the right to trace own processes. Prints a line for each trial and a summary; exit
code 1 when a run ended with other bits.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

BIN = Path(sys.executable).parent
TRAIN = [str(BIN / "nugnn"), "train"]


@dataclass(frozen=True)
class Subject:
    """What is trained, over how many workers, and how often it writes a checkpoint.

    Args:
        name: For the rows of the trials.
        model: Options of the run; the batch, if there is one, has the same size on every split.
        split: Number of workers and what each gets.
        every: Option for the time between checkpoints.
        epochs: Of a run; a kill comes in its first third.
        aims: What a process is to be in the middle of.
        probes: Looks at a process, at most, before it is killed wherever it is.
    """

    name: str
    model: tuple[str, ...]
    split: tuple[str, ...]
    every: tuple[str, str]
    epochs: int
    aims: tuple[str, ...]
    probes: int


GRAPH = Subject(
    name="graph",
    model=("--dataset", "digits", "--hidden", "16", "--lr", "0.01", "--seed", "3"),
    split=("--workers", "3", "--shares", "0.5,0.3,0.2"),
    every=("--checkpoint-every", "4"),
    epochs=300,
    aims=("checkpoint write", "halo exchange", "optimizer step", "any"),
    probes=300,
)
_IMAGES = ("--dataset", "digits-images", "--model", "mlp", "--hidden", "32", "--batch-size", "64", "--seed", "3")
# batch norm over ranks needs the interceptor's mode; without it the built-in network's steps run without the mode
WITH_NORM = Subject(
    name="batch norm",
    model=(*_IMAGES, "--norm", "batch", "--dropout", "0.2"),
    split=("--workers", "3", "--shares", "0.5,0.3,0.2"),
    every=("--checkpoint-steps", "7"),  # prime to the 20 steps of an epoch
    epochs=30,
    aims=("checkpoint write", "gradient sum", "optimizer step", "any"),
    probes=40,
)
WITHOUT_MODE = replace(WITH_NORM, name="known rows", model=(*_IMAGES, "--layers", "3", "--dropout", "0.3"))
PHASES = (
    # the innermost frame decides; the first pattern it contains
    ("checkpoint write", ("/checkpoint.py", "/checkpoint_tree.py", "/checkpointer.py", "/trainer_state.py")),
    ("optimizer step", ("/torch/optim/",)),
    ("halo exchange", ("/halo_exchange.py", "/halo_transfer.py")),
    ("gradient sum", ("/gradients.py", "/backward_sums.py", "/buckets.py")),
    ("evaluation", ("evaluate (", "predict (")),
    ("backward", ("/autograd/", "/_tensor.py")),
    ("batch norm", ("/batch_norm.py",)),
    ("reading", ("/dataloader.py", "/batches.py")),
    ("forward", ("_run_steps (",)),
    ("loop", ("/trainer.py",)),
)


def phase_of(pid: int) -> str:
    """What the main thread of a stopped process is in the middle of."""
    command = [str(BIN / "py-spy"), "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    threads = [part.splitlines() for part in text.split("\nThread ")[1:]]
    frames = next((lines[1:] for lines in threads if any("worker_process.py" in line for line in lines)), [])
    for frame in frames:
        for phase, patterns in PHASES:
            if any(pattern in frame for pattern in patterns):
                return phase
    return "start or end"


def turn_of(trial: int, num_subjects: int) -> tuple[int, int]:
    """Which subject a trial is of, and which of that one's aims, counted on and on."""
    return trial % num_subjects, trial // num_subjects


def num_epochs_done(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def start(out: Path, subject: Subject, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRAIN, *subject.model, *subject.split, "--out", str(out), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_epoch(run: subprocess.Popen[str], out: Path, number: int) -> None:
    while num_epochs_done(out) < number:  # the folder of the run is new: no lines of an earlier one
        if run.poll() is not None:
            raise RuntimeError(f"the run ended before epoch {number}: {run.communicate()[1]}")
        time.sleep(0.002)


def resume(out: Path, *options: str) -> str:
    """Go on; after what it did, empty when it started anew."""
    done = subprocess.run(
        [*TRAIN, "--config", str(out / "config.yaml"), "--resume", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"--resume ended with {done.returncode}: {done.stderr}")
    said = re.search(r"going on after ((step \d+ of )?epoch \d+)", done.stdout + done.stderr)
    return said[1] if said else ""


def kill_trial(
    out: Path, subject: Subject, aim: str, victim: str, epochs: int, every: tuple[str, str], rng: random.Random
) -> dict[str, Any]:
    """Run, kill, and say what was hit; the folder is ready to be resumed."""
    run = start(out, subject, "--epochs", str(epochs), *every)
    wait_for_epoch(run, out, rng.randint(1, epochs // 3))
    workers = sorted(psutil.Process(run.pid).children(), key=lambda process: process.pid)
    ranks = {int(process.environ()["RANK"]): process for process in workers}
    target = ranks[rng.randrange(len(ranks)) if victim == "worker" else 0]
    rank = next(rank for rank, process in ranks.items() if process is target)
    probes = 0
    while True:
        probes += 1
        time.sleep(rng.uniform(0, 0.01))
        os.kill(target.pid, signal.SIGSTOP)
        phase = phase_of(target.pid)
        if aim in (phase, "any") or probes == subject.probes:
            break
        os.kill(target.pid, signal.SIGCONT)
    epoch = num_epochs_done(out)
    partial = list((out / "checkpoint").glob("*.partial"))  # no folder yet before the first one
    if victim == "worker":
        os.kill(target.pid, signal.SIGKILL)
    else:
        os.kill(run.pid, signal.SIGKILL)
        os.kill(target.pid, signal.SIGCONT)
    begin = time.monotonic()
    run.communicate()
    _, alive = psutil.wait_procs(workers, timeout=30)
    return {
        "aim": aim,
        "phase": phase,
        "victim": f"rank {rank}" if victim == "worker" else "launcher",
        "epoch": epoch,
        "partial": len(partial),
        "probes": probes,
        "exit_code": run.returncode,
        "gone_after_seconds": round(time.monotonic() - begin, 2),
        "left_alive": len(alive),
    }


def interrupt_trial(out: Path, subject: Subject, epochs: int, rng: random.Random) -> dict[str, Any]:
    run = start(out, subject, "--epochs", str(epochs))
    wait_for_epoch(run, out, rng.randint(1, epochs // 2))
    time.sleep(rng.uniform(0, 0.02))
    begin = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=120)
    return {
        "aim": "Ctrl-C",
        "exit_code": run.returncode,
        "seconds": round(time.monotonic() - begin, 2),
        "epoch": num_epochs_done(out),
        "says": error.strip().replace(str(out), "OUT"),
    }


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def largest_difference(a: Path, b: Path) -> float:
    """Between two models, relative to the largest weight."""
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    scale = max(float(value.abs().max()) for value in first.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / scale


def same_as(reference: Path, out: Path) -> bool:
    same_bytes = (reference / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    return same_bytes and losses(reference) == losses(out)


def resume_on_others(folder: Path, subject: Subject, epochs: int) -> bool:
    """Resume one interrupted run on 1, 2, 3 and 5 workers.

    The bound is what the order of float32 sums makes of a whole run: four times the largest difference between the
    uninterrupted run and uninterrupted runs on the other numbers of workers.
    """
    folder = folder / f"others {subject.name}"
    folder.mkdir()
    reference, run = folder / "reference", folder / "run"
    splits = {1: "1", 2: "0.8,0.2", 3: "0.2,0.2,0.6", 5: "0.3,0.1,0.2,0.2,0.2"}
    start(reference, subject, "--epochs", str(epochs)).communicate()
    interrupted = start(run, subject, "--epochs", str(epochs), "--checkpoint-every", "1")
    wait_for_epoch(interrupted, run, epochs // 3)
    interrupted.send_signal(signal.SIGINT)
    interrupted.communicate()
    whole, resumed = {}, {}
    for workers, shares in splits.items():
        split = ("--workers", str(workers), "--shares", shares)
        out = folder / f"whole-{workers}"
        start(out, subject, "--epochs", str(epochs), *split).communicate()
        whole[workers] = largest_difference(reference, out)
        out = folder / f"resumed-{workers}"
        shutil.copytree(run, out)
        resume(out, "--out", str(out), *split)
        resumed[workers] = largest_difference(reference, out)
        print(
            f"{workers} workers, shares {shares}: resumed after epoch {num_epochs_done(run)} of {epochs} differs by "
            f"{resumed[workers]:.1e} of the largest weight, an uninterrupted run by {whole[workers]:.1e}",
            flush=True,
        )
    bound = 4 * max(whole.values())
    print(f"bound {bound:.1e}: {'kept' if max(resumed.values()) <= bound else 'BROKEN'}")
    return max(resumed.values()) <= bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, metavar="N")
    parser.add_argument("--interrupts", type=int, default=10, metavar="N")
    parser.add_argument(
        "--others", action=argparse.BooleanOptionalAction, default=True, help="other numbers of workers"
    )
    parser.add_argument(
        "--samples", action="store_true", help="batches of images instead of a graph: of two models in turn"
    )
    parser.add_argument("--epochs", type=int, help="default: 300, of samples 30")
    parser.add_argument("--every", type=int, help="epochs (default 4), of samples steps (7), between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append a line for each trial")
    options = parser.parse_args()
    subjects = (WITH_NORM, WITHOUT_MODE) if options.samples else (GRAPH,)
    epochs = options.epochs or subjects[0].epochs
    usual = subjects[0].every
    every = usual if options.every is None else (usual[0], str(options.every))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not (BIN / "py-spy").exists():
        sys.exit("py-spy is missing: pip install py-spy")
    rng = random.Random(options.seed)
    good, bad = collections.Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="nugnn-kill-") as name:
        folder = Path(name)
        references = [folder / f"reference {subject.name}" for subject in subjects]
        for reference, subject in zip(references, subjects, strict=True):
            start(reference, subject, "--epochs", str(epochs)).communicate()
        trials = ["kill"] * options.kills + ["interrupt"] * options.interrupts
        for number, kind in enumerate(trials, 1):
            out, begin = folder / "run", time.monotonic()
            turn, aimed = turn_of(number, len(subjects))
            subject, reference = subjects[turn], references[turn]
            if kind == "kill":
                victim = "launcher" if number % 5 == 0 else "worker"
                aim = subject.aims[aimed % len(subject.aims)]
                facts = kill_trial(out, subject, aim, victim, epochs, every, rng)
            else:
                facts = interrupt_trial(out, subject, epochs, rng)
            had_checkpoint = any((out / "checkpoint").glob("epoch-*[0-9]"))
            facts["resumed_after"] = resume(out)
            facts["went_on"] = bool(facts["resumed_after"]) or not had_checkpoint
            facts["same_bits"] = same_as(reference, out)
            promised_code = 130 if kind == "interrupt" else 3 if facts["victim"] != "launcher" else facts["exit_code"]
            as_promised = facts["went_on"] and facts["exit_code"] == promised_code and not facts.get("left_alive", 0)
            facts |= {"trial": number, "trial_seconds": round(time.monotonic() - begin, 1), "subject": subject.name}
            if facts["same_bits"] and as_promised:
                good[facts.get("phase", "Ctrl-C")] += 1
            else:
                bad += 1
            print(json.dumps(facts), flush=True)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(facts) + "\n")
            shutil.rmtree(out)
        for phase, count in good.most_common():
            print(f"{phase}: {count} resumed to the bits of the uninterrupted run")
        print(f"{sum(good.values())} of {len(trials)} trials")
        is_bounded = not options.others or all([resume_on_others(folder, each, epochs) for each in subjects])
    sys.exit(0 if bad == 0 and is_bounded else 1)


if __name__ == "__main__":
    main()
