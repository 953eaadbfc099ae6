"""Checkpoints on disk: a folder for each, which appears whole or not at all, in safetensors and JSON.

``FOLDER/epoch-00000017/`` holds ``shared.safetensors`` (what is the same on every rank), ``rank-00000.safetensors``, …
(what one rank alone knows) and ``checkpoint.json`` (which run, which files, their sizes and hashes). All ranks write
into ``epoch-00000017.partial``; when every file is on the disk, one rename makes it a checkpoint. Nothing is pickled.
In mid-epoch the name is ``epoch-00000017-step-00000120``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from nugnn._counted import counted
from nugnn.checkpoint_tree import Tree, read_tree, write_tree
from nugnn.comm.groups import Ranks

SCHEMA_VERSION = 1
"""Of ``checkpoint.json`` and the files beside it; raised whenever a checkpoint written before would be misread."""
NUM_KEPT = 2
"""The newest checkpoint and the one before it."""

_NAME = re.compile(r"epoch-(\d{8,})(?:-step-(\d{8,}))?")
_PARTIAL, _DOOMED = ".partial", ".removed"
_SHARED = "shared.safetensors"
_ANEW = "train without --resume to start anew"


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, or of another run."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An intact checkpoint; what `open_checkpoint` returns.

    Args:
        folder: Where it lies.
        epoch: The last whole epoch in it.
        step: Steps of the epoch after it that are in it.
        num_parts: Ranks that wrote it.
        identity: Of the run, from `nugnn.fingerprint.run_identity`.
        versions: Of what wrote it.
    """

    folder: Path
    epoch: int
    num_parts: int
    identity: dict[str, Any]
    versions: dict[str, str]
    step: int = 0

    @property
    def moment(self) -> str:
        """When it was written, for sentences."""
        return moment(self.epoch, self.step)

    def read_shared(self) -> Tree:
        """What was the same on every rank, tensors on the CPU."""
        return self._read(_SHARED)

    def read_rank(self, rank: int, names: Container[str] | None = None) -> Tree:
        """What rank ``rank`` alone knew, tensors on the CPU; of that what ``names`` lists, all when None."""
        return self._read(_rank_file(rank), names)

    def _read(self, name: str, names: Container[str] | None = None) -> Tree:
        try:
            return read_tree(self.folder / name, names)
        except ValueError as error:
            raise CheckpointError(str(error)) from None


def write_checkpoint(
    folder: Path, ranks: Ranks, *, epoch: int, shared: Tree, own: Tree, identity: Mapping[str, Any], step: int = 0
) -> Path:
    """Write a checkpoint and drop all but the newest two; a collective call.

    Whatever ends the processes during the call, checkpoints that were there before stay, or this one is complete.

    Args:
        folder: Parent of one folder for each checkpoint; all ranks have to see it.
        ranks: Who takes part.
        epoch: The last whole epoch in it.
        step: Steps of the epoch after it.
        shared: What is the same on every rank; rank 0's is written.
        own: What this rank alone knows.
        identity: Of the run, plain JSON types.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: It cannot be written; the text names the file and the space left.
        ValueError: Something in it is neither a tensor nor a plain value, or the ranks do not see one folder.
    """
    final = folder / checkpoint_name(epoch, step)
    draft = final.with_name(final.name + _PARTIAL)
    if ranks.rank == 0:
        with _saying_what_failed(draft):
            folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(folder)
            draft.mkdir()
            write_tree(draft / _SHARED, shared)
            _sync(draft / _SHARED)
    ranks.sum_(torch.zeros(1))  # the folder is there
    if not draft.is_dir():
        raise ValueError(f"rank {ranks.rank} does not see {draft}; checkpoints need a folder that all workers share")
    with _saying_what_failed(draft):
        path = draft / _rank_file(ranks.rank)
        write_tree(path, own)
        _sync(path)
        facts = torch.tensor([[path.stat().st_size, *_sha256(path)]])
    rows = torch.cat(ranks.gather_rows(facts)).tolist()  # every file is on the disk
    if ranks.rank == 0:
        with _saying_what_failed(draft):
            files = {_rank_file(rank): _file_facts(row[0], bytes(row[1:])) for rank, row in enumerate(rows)}
            files[_SHARED] = _file_facts((draft / _SHARED).stat().st_size, _sha256(draft / _SHARED))
            for name in files:
                if not (draft / name).is_file():
                    raise ValueError(f"{draft / name} is missing; checkpoints need a folder that all workers share")
            meta = {
                "schema_version": SCHEMA_VERSION,
                "epoch": epoch,
                "step": step,
                "num_parts": ranks.world_size,
                "files": files,
                "identity": dict(identity),
                "versions": installed_versions("nugnn", "torch", "dgl"),
            }
            (draft / "checkpoint.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
            _sync(draft / "checkpoint.json")
            _sync(draft)
            _discard(final)  # damaged, or it would have been resumed from
            draft.rename(final)
            _sync(folder)
            _prune(folder, (epoch, step))
    return final


def checkpoint_name(epoch: int, step: int = 0) -> str:
    """Name of the folder of the checkpoint after ``epoch``, and ``step`` steps of the next one."""
    return f"epoch-{epoch:08d}" + (f"-step-{step:08d}" if step else "")


def moment(epoch: int, step: int) -> str:
    """When a checkpoint was written, for sentences.

    >>> moment(4, 0), moment(0, 17), moment(4, 17)
    ('after epoch 4', 'after step 17 of epoch 1', 'after step 17 of epoch 5')
    """
    return f"after step {step} of epoch {epoch + 1}" if step else f"after epoch {epoch}"


def installed_versions(*names: str) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _place(path: Path) -> tuple[int, int]:
    """Epochs and further steps that the name of a checkpoint counts."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, path
    return int(found[1]), int(found[2] or 0)


def list_checkpoints(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, newest first; intact or not."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_place, reverse=True)


def open_checkpoint(path: Path, *, was_checked: bool = False) -> Checkpoint:
    """Check a checkpoint whole: every file is there, with its size and hash.

    Args:
        path: Its folder.
        was_checked: By another process of this run, just now: the sizes will do.

    Raises:
        CheckpointError: It is incomplete or not a checkpoint; names the file, and the newest intact one beside it.
    """
    try:
        return _opened(path, with_hashes=not was_checked)
    except CheckpointError as error:
        for other in list_checkpoints(path.parent):
            if other != path:
                try:
                    intact = _opened(other).folder
                except CheckpointError:
                    continue
                raise CheckpointError(f"{error}; the newest intact checkpoint beside it is {intact}") from None
        raise


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, and a sentence for each newer one that is damaged; None where there is none at all.

    Raises:
        CheckpointError: There are checkpoints, but none is intact.
    """
    problems: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return _opened(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{folder} holds no intact checkpoint: {'; '.join(problems)}; {_ANEW}")
    return None, []


def remove_checkpoints(folder: Path) -> None:
    """Remove every checkpoint, and what an interrupted write has left."""
    for path in list_checkpoints(folder):
        _discard(path)
    remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove what a write or removal that was cut short has left."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.suffix in (_PARTIAL, _DOOMED) and _NAME.fullmatch(path.stem):
                shutil.rmtree(path)


def _prune(folder: Path, place: tuple[int, int]) -> None:
    """Keep the checkpoint at ``place`` and the one before; later ones are damaged and of a run that has gone on."""
    older = [path for path in list_checkpoints(folder) if _place(path) < place]
    kept = {checkpoint_name(*place), *(path.name for path in older[: NUM_KEPT - 1])}
    for path in list_checkpoints(folder):
        if path.name not in kept:
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a checkpoint so that no half of it ever has the name of a whole one."""
    if path.is_dir() and not path.is_symlink():
        doomed = path.with_name(path.name + _DOOMED)
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def _opened(folder: Path, *, with_hashes: bool = True) -> Checkpoint:
    path = folder / "checkpoint.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is incomplete or not a checkpoint: {path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is incomplete or not a checkpoint ({error})") from None
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has schema version {raw.get('schema_version')!r}, this program reads {SCHEMA_VERSION}"
        )
    epoch, step, num_parts = raw.get("epoch"), raw.get("step", 0), raw.get("num_parts")
    files, identity, versions = raw.get("files"), raw.get("identity"), raw.get("versions")
    expected = {_SHARED, *(_rank_file(rank) for rank in range(num_parts if type(num_parts) is int else 0))}
    if not (type(epoch) is int and type(step) is int and type(num_parts) is int) or (
        min(epoch, step) < 0 or epoch + step < 1 or num_parts < 1
    ):
        raise CheckpointError(f"{path} is not a checkpoint: epoch {epoch!r}, step {step!r}, num_parts {num_parts!r}")
    if not (isinstance(files, dict) and isinstance(identity, dict) and isinstance(versions, dict)):
        raise CheckpointError(f"{path} is not a checkpoint: files, identity or versions are missing")
    if set(files) != expected or not all(_are_facts(facts) for facts in files.values()):
        raise CheckpointError(f"{path} is not a checkpoint: it lists other files than {', '.join(sorted(expected))}")
    for name, facts in files.items():
        _check_file(folder / name, facts.get("bytes"), facts.get("sha256") if with_hashes else None)
    return Checkpoint(folder=folder, epoch=epoch, step=step, num_parts=num_parts, identity=identity, versions=versions)


def _check_file(path: Path, num_bytes: object, sha256: object | None) -> None:
    try:
        size = path.stat().st_size
        if size != num_bytes:
            raise CheckpointError(
                f"{path} is incomplete: it has {counted(size, 'byte')}, checkpoint.json lists {num_bytes}"
            )
        if sha256 is not None and _sha256(path).hex() != sha256:
            raise CheckpointError(f"{path} is damaged: its content is not what checkpoint.json lists")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _are_facts(facts: object) -> bool:
    return isinstance(facts, dict) and type(facts.get("bytes")) is int and isinstance(facts.get("sha256"), str)


def _file_facts(num_bytes: int, digest: bytes) -> dict[str, Any]:
    return {"bytes": num_bytes, "sha256": digest.hex()}


def _sha256(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _saying_what_failed:  # noqa: N801 - a context manager, read as a phrase
    """Turns any failure to write into an OSError that names the folder and the space left."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, (OSError, SafetensorError)):
            return
        shown = getattr(error, "strerror", None) or str(error)
        parent = next((p for p in self._path.parents if p.exists()), Path("/"))
        free = shutil.disk_usage(parent).free / 2**20
        shutil.rmtree(self._path, ignore_errors=True)  # a full disk needs its room back
        raise OSError(f"{self._path}: the checkpoint cannot be written: {shown} ({free:.0f} MiB free there)") from error
