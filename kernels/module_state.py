"""What a module changes about itself while it runs, so that a second run in backward changes it no further."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SMALL_BYTES = 1 << 20
"""Copies up to this size are kept: `F.batch_norm` changes running statistics without counting it as a change."""


class ModuleState:
    """Buffers and attributes of a module, and of all modules in it, as they are when this is made.

    A value that an attribute refers to is not copied: what a forward changes inside a list of its own is not seen.

    Args:
        module: Not modified. Its buffers are copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
        buffers = {id(b): b for _, _, named in self._kept for b in named.values() if b is not None}
        self._versions = {key: buffer._version for key, buffer in buffers.items()}
        self._copies = {key: buffer.clone() for key, buffer in buffers.items()}

    def forget_unchanged(self) -> None:
        """To be called after the module has run: large buffers that it left alone need no copy."""
        for _, _, named in self._kept:
            for buffer in named.values():
                if buffer is None or buffer._version != self._versions[id(buffer)]:
                    continue
                if buffer.numel() * buffer.element_size() > _SMALL_BYTES:
                    self._copies.pop(id(buffer), None)

    def put_back(self) -> None:
        """Make everything as it was; buffers are the same tensors again, and get their values back in place."""
        for part, attributes, buffers in self._kept:
            _put(part, attributes, buffers)
        with torch.no_grad():
            for buffer in {id(b): b for _, _, named in self._kept for b in named.values() if b is not None}.values():
                if (copy := self._copies.get(id(buffer))) is not None:
                    buffer.copy_(copy)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """While open, everything is as it was, in copies; afterwards it is again what it was before.

        Raises:
            RuntimeError: Somebody else has changed a buffer, which the module's own run left alone.
        """
        now = [(part, dict(vars(part)), dict(part._buffers)) for part, _, _ in self._kept]
        try:
            for part, attributes, buffers in self._kept:
                _put(part, attributes, {name: self._as_it_was(part, name, b) for name, b in buffers.items()})
            yield
        finally:
            for part, attributes, buffers in now:
                _put(part, attributes, buffers)

    def _as_it_was(self, part: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        if (copy := self._copies.get(id(buffer))) is not None:
            return copy.clone()
        if buffer._version != self._versions[id(buffer)]:
            raise RuntimeError(
                f"buffer {name!r} of {type(part).__name__} was changed between a layer's run and its second run in "
                "backward, so the second would compute something else. Change it inside the layer, or after backward."
            )
        return buffer


def _put(part: nn.Module, attributes: dict[str, Any], buffers: dict[str, Tensor | None]) -> None:
    vars(part).clear()
    vars(part).update(attributes)
    part._buffers.clear()
    part._buffers.update(buffers)
