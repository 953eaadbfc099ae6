"""A run from settings to a folder of results: what ``nugnn train`` does."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import platform
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from safetensors.torch import save_file

from nugnn._counted import counted
from nugnn.checkpoint import installed_versions, list_checkpoints, moment
from nugnn.config import TrainConfig
from nugnn.datasets.whole_file import write_whole
from nugnn.failure import EXIT_WORKER_LOST, WorkerFailed
from nugnn.fit import fit
from nugnn.fit_plan import PLAN_FILE
from nugnn.fit_result import FitResult
from nugnn.history import Epoch
from nugnn.interrupt import Interrupted

if TYPE_CHECKING:
    from nugnn.planned import Planned
    from nugnn.planning.timeline import Timeline
    from nugnn.sample_config import RunConfig
    from nugnn.tensorboard import ScalarLog

PARTS_FILE = "plan.parts.npy"
"""Beside a plan with a cut: `nugnn.planning.plan_parts.parts_path`."""
TIMELINE = "timeline.json"
"""For Perfetto or ``chrome://tracing``."""


def _counts(workers: int) -> dict[str, str]:
    """What the texts of stages count."""
    return {"workers": counted(workers, "worker"), "parts": counted(workers, "part")}


def run_from_config(
    config: RunConfig,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    train: Callable[..., FitResult] = fit,
) -> dict[str, Any]:
    """Load, prepare, train, and write ``config.out_dir``.

    The folder afterwards holds ``config.yaml``, ``metrics.jsonl`` (an object per epoch, and one with ``move`` alone
    where nodes moved between workers), ``result.json``, ``model.safetensors`` (best validation epoch),
    ``predictions.npy`` when asked for (of the same epoch), ``timeline.json`` when asked for, ``preparation.json`` for
    samples, ``plan.json`` where a plan was made, ``checkpoint/`` and ``logs/`` when there were workers. Results of an
    earlier run in it are replaced, or continued with ``config.resume``.

    Args:
        config: The settings.
        on_event: Gets ``{"kind": "stage", "text": ...}``, ``{"kind": "note", "text": ...}``, ``{"kind": "download",
            "bytes": ..., "total": ...}`` and ``{"kind": "epoch", "epoch": ..., "loss": ..., "val": ...}``.
        train: `nugnn.fit.fit`, or what stands in for it when the processes were started by others.

    Returns:
        What ``result.json`` holds.

    Raises:
        ValueError: Settings, data or a checkpoint do not fit; the text says which.
        nugnn.launch.WorkerFailed: A worker died, timed out, or found the input wrong.
        nugnn.interrupt.Interrupted: A signal asked for the end; the text says how to go on.
    """
    emit = on_event or (lambda _: None)
    _check_files(config)
    emit({"kind": "stage", "text": f"reading {config.dataset}"})
    family = family_of(config)
    data = family.prepare(config, lambda done, total: emit({"kind": "download", "bytes": done, "total": total}))
    torch.manual_seed(config.seed)
    model, stages, counts = family.build_model(config, data), family.STAGES, _counts(config.workers)
    out = config.out_dir
    if not config.resume and list_checkpoints(out / "checkpoint") and not (out / "result.json").exists():
        text = f"{out} holds a checkpoint of an unfinished run, which is replaced; --resume would go on from it"
        emit({"kind": "note", "text": text})
    log = _EpochLog(out / "metrics.jsonl", _scalar_log(config, data))

    plans: list[Planned] = []

    def keep_plan(planned: Planned) -> None:
        plans.append(planned)
        _write_plan(out, planned)

    def begin(epochs_before: list[Epoch]) -> None:
        """Replace the results of an earlier run, now that nothing speaks against this one."""
        try:
            out.mkdir(parents=True, exist_ok=True)
            _write(out / "config.yaml", config.replaced(resume=False).to_yaml())
            results = ("result.json", "model.safetensors", "predictions.npy", "preparation.json")
            for stale in (*results, PLAN_FILE, PARTS_FILE, TIMELINE):
                (out / stale).unlink(missing_ok=True)
            log.restart(epochs_before)
        except OSError as error:
            raise ValueError(f"--out {out} cannot be written: {error.strerror or error}") from error

    def note(epoch: Epoch) -> None:
        log.add(epoch)
        event = {"kind": "epoch", "epoch": epoch.number, "loss": epoch.loss, "train": epoch.train}
        emit(event | ({} if math.isnan(epoch.val) else {"val": epoch.val}))

    try:
        with contextlib.closing(log):
            result = train(
                model,
                data,
                **family.fit_arguments(config),
                on_epoch=note,
                on_stage=lambda name: emit({"kind": "stage", "text": stages.get(name, name).format(**counts)}),
                log_folder=out / "logs" if config.workers > 1 else None,
                on_begin=begin,
                on_note=lambda text: emit({"kind": "note", "text": text}),
                on_rebalance=log.add_move,
                on_plan=keep_plan,
            )
    except Interrupted as stop:
        raise Interrupted(
            f"interrupted {moment(stop.epoch, stop.step)} of {config.epochs}, checkpoint written; {how_to_go_on(out)}",
            stop.epoch,
            stop.step,
        ) from None
    except WorkerFailed as failed:
        if failed.exit_code != EXIT_WORKER_LOST or not list_checkpoints(out / "checkpoint"):
            raise
        raise WorkerFailed(failed.exit_code, f"{failed.message}\n{how_to_go_on(out)}") from None
    save_file({k: v.contiguous() for k, v in result.model.state_dict().items()}, out / "model.safetensors")
    if config.predictions:
        family.write_predictions(out / "predictions.npy", result, data)
    if result.timeline is not None:
        _write(out / TIMELINE, result.timeline.to_chrome())
        emit({"kind": "note", "text": pictures(plans[-1] if plans else None, result.timeline)})
        emit({"kind": "note", "text": f"{out / TIMELINE} has the measured step for https://ui.perfetto.dev"})
    family.write_more(out, data)
    summary = summarise(config, data, result)
    _write(out / "result.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _check_files(config: RunConfig) -> None:
    """Refuse a plan or cluster that is none before data are read.

    Raises:
        ValueError: It cannot be read, has a wrong field, or is for another number of workers.
    """
    if config.plan is not None:
        from nugnn.planning.plan import read_plan

        read_plan(config.plan).check_workers(config.workers)
    if config.cluster is not None:
        from nugnn.planning.cluster_file import read_cluster_fields

        read_cluster_fields(Path(config.cluster))


def _write_plan(out: Path, planned: Planned) -> None:
    from nugnn.planned import write_plan

    try:
        write_plan(out / PLAN_FILE, planned)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror or error}") from error


_NOT_DRAWN = (
    "a step, predicted: not drawn, since a plan that was made before has seconds and no timeline; nugnn plan draws it "
    "when it makes one"
)


def pictures(planned: Planned | None, measured: Timeline) -> str:
    """The step as a plan predicted it above the measured one; of a plan that was made before, why it is not."""
    from nugnn.planning.timeline import picture

    if planned is None:
        return f"a step, measured:\n{picture(measured)}"
    predicted = planned.corrected().forecast.timeline
    above = ["a step, predicted:", picture(predicted)] if predicted is not None else [_NOT_DRAWN]
    return "\n".join([*above, "a step, measured:", picture(measured)])


def take_part(config: RunConfig, train: Callable[..., Any]) -> None:
    """What a process other than rank 0 does when ``torchrun`` started it: the same, showing and writing nothing."""
    family = family_of(config)
    data = family.prepare(config)
    torch.manual_seed(config.seed)
    train(family.build_model(config, data), data, **family.fit_arguments(config))


def family_of(config: RunConfig) -> Any:
    """The module of what is done for one family of data alone: `nugnn.graph_run` or `nugnn.sample_run`.

    All that training will import is imported here: DGL alone takes seconds.
    """
    family = "graph" if isinstance(config, TrainConfig) else "sample"
    importlib.import_module(f"nugnn.{family}_task")
    return importlib.import_module(f"nugnn.{family}_run")


def _scalar_log(config: RunConfig, data: Any) -> Callable[[int], ScalarLog] | None:
    if not config.tensorboard:
        return None
    from nugnn.tensorboard import ScalarLog

    return lambda first: ScalarLog(config.out_dir / "tensorboard", data.metric, first_epoch=first)


def how_to_go_on(out: Path) -> str:
    """The command that resumes a run, where it has a checkpoint; empty otherwise."""
    if not list_checkpoints(out / "checkpoint"):
        return ""
    return f"go on with: nugnn train --config {shlex.quote(str(out / 'config.yaml'))} --resume"


class _EpochLog:
    """``metrics.jsonl``, an object for each epoch, on the disk as soon as the epoch is over; TensorBoard beside it.

    Args:
        path: Of ``metrics.jsonl``.
        scalars: Makes the TensorBoard log when given; gets the number of the first epoch.
    """

    def __init__(self, path: Path, scalars: Callable[[int], ScalarLog] | None) -> None:
        self._path, self._make_scalars = path, scalars
        self._file: TextIO | None = None
        self._scalars: ScalarLog | None = None

    def restart(self, epochs: list[Epoch]) -> None:
        """Begin with ``epochs``, and with the moves that the file has until then, whatever else it held."""
        kept = _moves_until(self._path, len(epochs)) if epochs else {}
        _write(self._path, "".join(_line(epoch) + kept.get(epoch.number, "") for epoch in epochs))
        self._file = self._path.open("a", encoding="utf-8")
        if self._make_scalars is not None:
            self._scalars = self._make_scalars(len(epochs) + 1)

    def add(self, epoch: Epoch) -> None:
        assert self._file is not None
        self._file.write(_line(epoch))
        self._file.flush()
        if self._scalars is not None:
            self._scalars.add(epoch)

    def add_move(self, move: dict[str, Any]) -> None:
        """Nodes have moved between workers: an object with ``move`` alone."""
        assert self._file is not None
        self._file.write(json.dumps({"move": move}) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._scalars is not None:
            self._scalars.close()


def _moves_until(path: Path, epoch: int) -> dict[int, str]:
    """Lines of moves by the epoch that they came after, those of later epochs left out."""
    found: dict[int, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            after = json.loads(line)["move"]["after_epoch"]
        except (ValueError, KeyError, TypeError):  # an epoch, or half a line
            continue
        if type(after) is int and after <= epoch:
            found[after] = line + "\n"
    return found


def _line(epoch: Epoch) -> str:
    plain = {name: _number(value) if isinstance(value, float) else value for name, value in asdict(epoch).items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def summarise(config: RunConfig, data: Any, result: FitResult) -> dict[str, Any]:
    """``result.json``: plain types; a metric without rows is null."""
    best, last = result.best, result.history[-1]
    return {
        "dataset": data.name,
        **family_of(config).facts(config, data, result),
        "device": ", ".join(dict.fromkeys(report["device"] for report in result.rank_reports)),
        "metric": data.metric,
        "best_epoch": best.number,
        "train": _number(best.train),
        "val": _number(best.val),
        "test": _number(best.test),
        "last_test": _number(last.test),
        "epoch_seconds": result.epoch_seconds,
        "predicted_epoch_seconds": None if result.held is None else result.held.told_seconds,
        "prediction": None if result.held is None else result.held.to_dict(),
        "time_to_best_seconds": result.time_to_best_seconds,
        "peak_memory_bytes": [report["peak_memory_bytes"] for report in result.rank_reports],
        "ranks": result.rank_reports,
        "notes": list(result.notes),
        "moves": list(result.moves),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # with its build, +cpu or +cu130
            **installed_versions("nugnn", "dgl", "numpy", "pymetis"),
        },
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other numbers


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))
