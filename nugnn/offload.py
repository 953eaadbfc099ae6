"""Tensors that autograd saves wait for backward in the host's memory, and come back when backward asks for them.

What moves is the range of bytes that a tensor spans: tensors on the same range share its copy, and come back with the
same strides, so that backward computes the same bits. Copies are made on the device's current stream, into pinned
memory: they wait for what computes a tensor, what reuses its memory waits for them, and the host waits for nothing.

Left on the device are small tensors, which cost more to ask for than they hold, and storages that live anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 1 << 20
"""Some 40 microseconds of a 25 GB/s bus, where asking for a copy costs about 10."""


class _HostCopy:
    """Some bytes in the host's memory; on the device again while further tensors on them are going to be asked for."""

    def __init__(self, on_device: Tensor) -> None:
        self._device = on_device.device
        is_gpu = on_device.device.type == "cuda"
        self._on_host = torch.empty(on_device.shape, dtype=torch.uint8, device="cpu", pin_memory=is_gpu)
        self._on_host.copy_(on_device, non_blocking=True)
        self._again: Tensor | None = None
        self.num_waiting = 0
        """Tensors that were saved and have not been asked for."""

    def on_device(self) -> Tensor:
        again = self._again
        if again is None:
            again = torch.empty(self._on_host.shape, dtype=torch.uint8, device=self._device)
            again.copy_(self._on_host, non_blocking=True)
        self.num_waiting -= 1
        self._again = again if self.num_waiting > 0 else None
        return again


class _Waiting:
    """A saved tensor, whose bytes wait on the host."""

    def __init__(self, x: Tensor, copy: _HostCopy) -> None:
        self._dtype, self._shape, self._strides = x.dtype, x.shape, x.stride()
        self._copy = copy
        copy.num_waiting += 1

    def tensor(self) -> Tensor:
        storage = self._copy.on_device().untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, 0, self._shape, self._strides)


class HostMemory:
    """Where tensors saved for backward wait.

    Args:
        device: Tensors on other devices stay where they are.
        resident: Asked at each `saving` for tensors that live through the step in any case, such as parameters.
        least_bytes: Smaller tensors stay on the device.
    """

    def __init__(
        self, device: torch.device, resident: Callable[[], Iterable[Tensor]], *, least_bytes: int = LEAST_BYTES
    ) -> None:
        self._device, self._resident, self._least_bytes = device, resident, least_bytes
        self._resident_keys: dict[int, StorageWeakRef] = {}
        self._copies: dict[tuple[int, ...], tuple[StorageWeakRef, _HostCopy]] = {}
        self.moved_bytes = 0
        """Bytes copied to the host since this was made; for tests and reports."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward pass whose saved tensors wait on the host."""
        # a weak reference keeps the address of a storage from being used for another one
        refs = [StorageWeakRef(x.untyped_storage()) for x in self._resident() if x.layout is torch.strided]
        self._resident_keys = {ref.cdata: ref for ref in refs}
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._copies.clear()
            self._resident_keys.clear()

    def _pack(self, x: Tensor) -> Tensor | _Waiting:
        if x.layout is not torch.strided or x.device != self._device or x.is_conj() or x.is_neg():
            return x
        storage = x.untyped_storage()
        first, length = _byte_range(x)
        if length < self._least_bytes or storage._cdata in self._resident_keys:
            return x
        # bytes that autograd was given are not written again before backward, but others of the same storage may be
        key = (storage._cdata, x._version, first, length)
        if key not in self._copies:
            on_device = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, first, (length,), (1,))
            self._copies[key] = (StorageWeakRef(storage), _HostCopy(on_device))
            self.moved_bytes += length
        return _Waiting(x, self._copies[key][1])

    @staticmethod
    def _unpack(kept: Tensor | _Waiting) -> Tensor:
        return kept.tensor() if isinstance(kept, _Waiting) else kept


def _byte_range(x: Tensor) -> tuple[int, int]:
    """Where the bytes of ``x`` begin in its storage, and how many there are from the first to the last one."""
    size = x.element_size()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return int(x.storage_offset()) * size, extent * size
