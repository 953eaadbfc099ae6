"""The private folder through which a run is handed to its worker processes, and they answer.

``job.pickle`` holds what the workers are to do, written with cloudpickle so that a model class defined in a script or a
notebook arrives; ``error-RANK.json`` is why a worker stopped; ``done-RANK`` says that a worker finished its work.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ErrorKind = Literal["user", "internal", "peer"]
_POLL_SECONDS = 0.02

STOP = "stop"
"""Name of the file that asks the workers to stop after the epoch in progress."""


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """Why a worker stopped.

    Args:
        kind: ``user``: the input is wrong, the message is for the user as it is. ``peer``: another worker was lost, or
            did not answer in time. ``internal``: anything else; the traceback is in the worker's log.
        rank: The worker.
        message: One paragraph.
    """

    kind: ErrorKind
    rank: int
    message: str


@contextlib.contextmanager
def private_job_folder() -> Iterator[Path]:
    """A new folder that only this user can enter; removed at the end, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="nugnn-job-"))  # mkdtemp makes it with mode 0700
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_job(folder: Path, payload: dict[str, Any]) -> None:
    """Store ``payload`` for the workers.

    Raises:
        ValueError: Something in it cannot be pickled; the text names the entry.
    """
    import cloudpickle

    for name, value in payload.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise ValueError(f"{name} cannot be handed to the worker processes: {error}") from error
    draft = folder / "job.pickle.new"  # appears in one piece: workers may be waiting for it
    draft.write_bytes(cloudpickle.dumps(payload))
    draft.replace(folder / "job.pickle")


def read_job(folder: Path) -> dict[str, Any]:
    """What `write_job` stored; waits for it (the end of the launching process ends a waiting worker).

    Raises:
        PermissionError: Others may write to the folder, or it belongs to another user: unpickling would run their code.
    """
    import cloudpickle

    found = os.stat(folder)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"job folder {folder} is not private to this user (mode {stat.S_IMODE(found.st_mode):o})")
    while not (folder / "job.pickle").exists():
        time.sleep(_POLL_SECONDS)
    payload: dict[str, Any] = cloudpickle.loads((folder / "job.pickle").read_bytes())
    return payload


def write_error(folder: Path, error: WorkerError) -> None:
    """Leave word of why this worker stops; appears in one piece."""
    _write_whole(folder / f"error-{error.rank}.json", json.dumps(asdict(error)))


def read_error(folder: Path, rank: int) -> WorkerError | None:
    """Why worker ``rank`` stopped, if it left word."""
    try:
        return WorkerError(**json.loads((folder / f"error-{rank}.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def write_done(folder: Path, rank: int) -> None:
    """Say that worker ``rank`` has finished its work and has only to exit."""
    _write_whole(folder / f"done-{rank}", "")


def is_done(folder: Path, rank: int) -> bool:
    """Whether worker ``rank`` has finished its work."""
    return (folder / f"done-{rank}").exists()


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
