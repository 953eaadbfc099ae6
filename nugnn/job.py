"""The private folder through which a run is handed to its worker processes, and they answer.

``job.pickle`` holds what the workers are to do, written with cloudpickle so that a model class defined in a script or a
notebook arrives; ``error-RANK.json`` is why a worker stopped; ``done-RANK`` says that a worker finished its work.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import json
import math
import operator
import os
import shutil
import stat
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from nugnn.disk import naming_full_disk

ErrorKind = Literal["user", "memory", "disk", "internal", "peer"]
_POLL_SECONDS = 0.02
_PREFIX = "nugnn-job-"
_LOCK = "launcher.lock"
_NOTE_BYTES = 16384
_REMOVALS = 10
"""A thread that still prepares a run which has ended may put a file into the folder while it is removed."""
_MAPPED_BYTES = 1 << 20
"""From this size on a tensor is a file of its own."""

STOP = "stop"
"""Name of the file that asks the workers to stop after the epoch in progress."""


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """Why a worker stopped.

    Args:
        kind: ``user``: the input is wrong, the message is for the user as it is. ``peer``: another worker was lost, or
            did not answer in time. ``memory``, ``disk``: there was none left. ``internal``: anything else; the
            traceback is in the worker's log.
        rank: The worker.
        message: One paragraph.
    """

    kind: ErrorKind
    rank: int
    message: str


@contextlib.contextmanager
def private_job_folder() -> Iterator[Path]:
    """A new folder that only this user can enter; removed at the end, whatever happens.

    A process ended by SIGKILL cannot remove its folder: the next one that comes here does it.
    """
    remove_abandoned_folders(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mkdtemp makes it with mode 0700
    draft = folder / f"{_LOCK}.new"
    lock = draft.open("w")
    try:
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.replace(folder / _LOCK)  # whoever finds the lock finds it held
        yield folder
    finally:
        for _ in range(_REMOVALS):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
        lock.close()


def remove_abandoned_folders(parent: Path) -> list[Path]:
    """Remove this user's job folders whose launching process is gone.

    The process holds a lock for as long as it lives. Unlike a process id, that cannot be taken over by another process
    and holds between containers that share the folder. Folders without a lock, or of other users, are left alone.

    Args:
        parent: Where to look; nothing deeper.

    Returns:
        What was removed.
    """
    removed = []
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its process lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(descriptor)
    return removed


class NotPickledError(ValueError):
    """What a user has made cannot be handed to worker processes: says which entry, and why."""


def write_job(folder: Path, payload: dict[str, Any]) -> None:
    """Store ``payload`` for the workers.

    Large tensors become files beside it, which all workers map into their memory: samples are there once, not once for
    each worker. What a worker writes into such a tensor stays its own.

    Raises:
        NotPickledError: Something in it cannot be pickled; the text names the entry.
    """
    from nugnn.datasets.whole_file import write_whole  # not at the top: the package loads torch, --help must not

    path = folder / "job.pickle"  # appears in one piece: workers may be waiting for it
    with naming_full_disk(path):
        try:
            content = _pickled(folder, payload)
        except OSError:
            raise
        except Exception:
            for name, value in payload.items():
                try:
                    _pickled(folder, value)
                except Exception as error:
                    raise NotPickledError(f"{name} cannot be handed to the worker processes: {error}") from error
            raise
        write_whole(path, lambda file: file.write(content))


def _pickled(folder: Path, value: Any) -> bytes:
    """``value`` without its large tensors, which go into ``folder``."""
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, each: Any) -> Any:
            if isinstance(each, types.CodeType):
                return code_of_file, (each.co_filename, *cloudpickle.Pickler.dispatch_table[types.CodeType](each))
            if isinstance(each, functools._lru_cache_wrapper) and not _is_found_by_name(each):
                return cached_again, (each.__wrapped__, each.cache_parameters())
            if type(each) is functools.cached_property:
                return cached_property_again, (each.func, each.attrname)
            if type(each) is not torch.Tensor or each.device.type != "cpu" or each.layout != torch.strided:
                return super().reducer_override(each)
            if each.requires_grad or each.numel() * each.element_size() < _MAPPED_BYTES:
                return super().reducer_override(each)
            number, path = tempfile.mkstemp(prefix="tensor-", dir=folder)
            with os.fdopen(number, "wb") as file:
                file.write(each.contiguous().flatten().view(torch.uint8).numpy().data)
            return mapped_tensor, (path, each.dtype, tuple(each.shape))

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def code_of_file(filename: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    """Code of a user's script, which cloudpickle hands on as if it were of no file: messages and tracebacks name it."""
    return make(*arguments).replace(co_filename=filename)


def _is_found_by_name(function: Any) -> bool:
    """Whether workers can import ``function``: not one of a script, of a model's file or of another function."""
    import cloudpickle

    if function.__module__ in {"__main__", *cloudpickle.list_registry_pickle_by_value()}:
        return False
    try:
        return operator.attrgetter(function.__qualname__)(sys.modules[function.__module__]) is function
    except (KeyError, AttributeError):
        return False


def cached_again(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """A user's function under ``functools.lru_cache``, empty: pickle would look for it by name in the worker."""
    return functools.lru_cache(**parameters)(function)


def cached_property_again(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    """Of a user's class; in Python 3.11 each one holds a lock, which does not travel."""
    found = functools.cached_property(function)
    found.attrname = name
    return found


def mapped_tensor(path: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    """The tensor in a file of its bytes; pages are read when they are asked for, and shared until one is written to."""
    import torch

    return torch.from_file(path, shared=False, size=math.prod(shape), dtype=dtype).view(shape)


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


def reserve_error(folder: Path, rank: int) -> None:
    """Take the space for a later `write_error`, which may have to say that there is none left."""
    _error_draft(folder, rank).write_text(" " * _NOTE_BYTES, encoding="utf-8")


def write_error(folder: Path, error: WorkerError) -> None:
    """Leave word of why this worker stops; appears in one piece, through the draft whose space was reserved."""
    draft = _error_draft(folder, error.rank)
    # a very long message is cut, so that it fits where space was reserved
    text = json.dumps(asdict(error))
    if len(text) > _NOTE_BYTES:
        text = json.dumps(asdict(error) | {"message": error.message[: _NOTE_BYTES // 12]})
    with draft.open("r+" if draft.exists() else "w", encoding="utf-8") as file:
        file.write(text.ljust(_NOTE_BYTES))
    draft.replace(folder / f"error-{error.rank}.json")


def _error_draft(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json.new"


def read_error(folder: Path, rank: int) -> WorkerError | None:
    """Why worker ``rank`` stopped, if it left word."""
    try:
        return WorkerError(**json.loads((folder / f"error-{rank}.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def pulse_path(folder: Path, rank: int) -> Path:
    """The stamp of worker ``rank``, see `nugnn.comm.pulse`."""
    return folder / f"pulse-{rank}"


def write_done(folder: Path, rank: int) -> None:
    """Say that worker ``rank`` has finished its work and has only to exit."""
    from nugnn.datasets.whole_file import write_whole

    write_whole(folder / f"done-{rank}", lambda _: None)


def is_done(folder: Path, rank: int) -> bool:
    """Whether worker ``rank`` has finished its work."""
    return (folder / f"done-{rank}").exists()
