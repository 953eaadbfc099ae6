"""A worker's stamp in shared memory: how many operators and exchanges it has finished and what it waits for.

The launching process reads it to tell a worker that hangs from one that waits for it and from one that is slow. A stamp
costs a few hundred nanoseconds and no system call.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_BEATS = struct.Struct("<Q")
_TEXT = struct.Struct("<H")
_STEPPING_AT, _TEXT_AT = 8, 16
SIZE = 256
"""Bytes of a stamp."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a stamp says.

    Args:
        beats: Operators and exchanges finished.
        is_stepping: Whether a training or evaluation step has begun: before, a worker loads what it needs.
        waits_in: The exchange with other ranks that is going on, such as ``halo exchange 3 (layers.0/spmm)``; or None.
    """

    beats: int = 0
    is_stepping: bool = False
    waits_in: str | None = None


class Pulse:
    """Writes the stamp of this process.

    Args:
        memory: ``SIZE`` bytes that others may see; private ones when None.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        self._memory = bytearray(SIZE) if memory is None else memory
        self._beats = 0
        self._waits_in: list[bytes] = []
        """Waits that are not over; the last to begin is stamped."""

    @classmethod
    def open(cls, path: Path) -> Pulse:
        """Stamp the file at ``path``, made by `create`."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), SIZE))

    def beat(self) -> None:
        """One more piece of work is done; long work outside a step (saving a large file) should call it too."""
        self._beats += 1
        _BEATS.pack_into(self._memory, 0, self._beats)

    def begin_step(self) -> None:
        """A step begins: from here on only `beat` counts as progress, computing as such does not."""
        self._memory[_STEPPING_AT] = 1
        self.beat()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Around an exchange in which this rank waits for others; around several, which have names of their own."""
        text = name.encode()[: SIZE - _TEXT_AT - _TEXT.size]
        self._waits_in.append(text)
        self._stamp()
        try:
            yield
        finally:
            self._waits_in.remove(text)
            self._stamp()
            self.beat()

    def _stamp(self) -> None:
        memory, start = self._memory, _TEXT_AT + _TEXT.size
        _TEXT.pack_into(memory, _TEXT_AT, 0)  # nothing, rather than a mixture
        if self._waits_in:
            text = self._waits_in[-1]
            memory[start : start + len(text)] = text
            _TEXT.pack_into(memory, _TEXT_AT, len(text))


class ProgressHandler:
    """Stamps each operator that a model finishes: a `nugnn.kernels.interceptor.Observer`.

    Args:
        pulse: The stamp.
    """

    observed = frozenset(
        {"spmm", "sddmm", "edge_softmax", "linear", "matmul", "bmm", "conv", "layer_norm", "dropout", "recurrent"}
    )

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def begin_step(self) -> None:
        self._pulse.begin_step()

    def end_step(self) -> None:
        self._pulse.beat()

    def finished(self) -> None:
        self._pulse.beat()


def create(path: Path) -> mmap.mmap:
    """A new stamp at ``path``, to be read with `read`; its bytes are on the disk, so that no later write can fail."""
    with path.open("w+b") as file:
        file.write(bytes(SIZE))
        file.flush()
        return mmap.mmap(file.fileno(), SIZE)


def read(memory: bytes | bytearray | mmap.mmap) -> Stamp:
    """What the stamp says now; a text that is being changed at this moment may come out mixed."""
    (length,) = _TEXT.unpack_from(memory, _TEXT_AT)
    start = _TEXT_AT + _TEXT.size
    return Stamp(
        beats=_BEATS.unpack_from(memory, 0)[0],
        is_stepping=bool(memory[_STEPPING_AT]),
        waits_in=bytes(memory[start : start + length]).decode(errors="replace") if length else None,
    )
