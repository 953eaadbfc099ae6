"""The part of each node that belongs to a plan with a cut: a file beside the plan, held against it."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nugnn._counted import counted
from nugnn.planning.plan import Plan, PlanError

PARTS_SUFFIX = ".parts.npy"


def parts_path(plan: Path) -> Path:
    """Where the parts of a plan's cut lie.

    >>> str(parts_path(Path("runs/plan.json")))
    'runs/plan.parts.npy'
    """
    return plan.with_name(plan.stem + PARTS_SUFFIX)


def parts_bytes(part: Any) -> bytes:
    """A part for each node as a ``.npy`` file, in as few bits as do; equal parts give equal bytes.

    Args:
        part: ``(N,)`` integers from 0 up, a tensor or array.
    """
    array = np.asarray(part)
    width = np.min_scalar_type(int(array.max(initial=0)))
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array, width), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def read_parts(plan: Plan, path: Path) -> npt.NDArray[np.int32]:
    """The part of each node of a plan that has a cut.

    Args:
        plan: Read from ``path``.
        path: Of the plan.

    Raises:
        PlanError: The file beside it is missing, was changed, or does not hold a part for each node.
    """
    assert plan.cut is not None, "a plan without a cut has no parts"
    file = parts_path(path)
    try:
        if os.path.getsize(file) > 8 * plan.data.nodes + 4096:
            raise PlanError(f"{file} is larger than the parts of {counted(plan.data.nodes, 'node')}")
        content = file.read_bytes()
    except OSError as error:
        raise PlanError(
            f"{file} cannot be read: {error.strerror}; it belongs to {path.name}, keep both in one folder"
        ) from error
    if digest(content) != plan.cut.sha256:
        raise PlanError(f"{file} is not what {path.name} was made with; make both again with nugnn plan")
    try:
        part = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise PlanError(f"{file} is no file of parts: {error}") from error
    counts = [device.sizes.inner for device in plan.devices]
    if part.shape != (plan.data.nodes,) or part.dtype.kind != "u":
        raise PlanError(
            f"{file} has shape {part.shape} of {part.dtype}, and the plan {counted(plan.data.nodes, 'node')}"
        )
    if np.bincount(part, minlength=len(counts)).tolist() != counts:
        raise PlanError(f"{file} does not give the devices as many nodes as {path.name} does")
    return part.astype(np.int32)
