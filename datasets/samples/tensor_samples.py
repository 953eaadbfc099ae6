"""Samples held in two tensors, in the type they are stored in, and converted a whole batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset


class TensorSamples(Dataset[tuple[Tensor, int]]):
    """A map-style data set of ``(x, label)``.

    Args:
        x: ``(n, ...)``: uint8 images, int32 token numbers or float32 values; kept as they are.
        labels: ``(n,)`` int64.
        dtype: Of an ``x`` handed out: float32, or int64 for token numbers.
        largest: What a stored value is divided by; 1 for none. 255 takes the bytes of an image to [0, 1].

    Raises:
        ValueError: there are not as many labels as samples, or labels are not int64 in one dimension.
    """

    def __init__(self, x: Tensor, labels: Tensor, *, dtype: torch.dtype = torch.float32, largest: float = 1.0) -> None:
        if labels.dtype != torch.int64 or labels.dim() != 1 or len(x) != len(labels):
            raise ValueError(
                f"{tuple(x.shape)} samples and {labels.dtype} labels of shape {tuple(labels.shape)}; there has to be "
                "one int64 label for each sample"
            )
        self.x, self.labels, self.dtype, self.largest = x, labels, dtype, largest

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if not -len(self) <= number < len(self):  # what ends a loop over all samples
            raise IndexError(f"sample {number} of {len(self)}")
        return self._converted(self.x[number]), int(self.labels[number])

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Many samples, as `torch.utils.data.DataLoader` asks for them; each ``x`` is a view into one tensor."""
        x, labels = self.take(torch.as_tensor(numbers, dtype=torch.int64))
        return list(zip(x.unbind(0), labels.tolist(), strict=True))

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """``x (n, ...)`` and ``labels (n,)`` of the samples ``ids (n,)`` int64: a batch that need not be stacked."""
        return self._converted(self.x[ids]), self.labels[ids]

    def content_hash(self) -> str:
        """sha256 over all samples, as 64 hexadecimal digits: equal in every process for equal samples."""
        digest = hashlib.sha256(f"{self.dtype} {self.largest}".encode())
        for x in (self.x, self.labels):
            digest.update(f"{x.dtype}{tuple(x.shape)}".encode())
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _converted(self, x: Tensor) -> Tensor:
        converted = x.to(self.dtype)
        if self.largest == 1:
            return converted
        return converted / self.largest if converted is x else converted.div_(self.largest)  # a copy may be changed
