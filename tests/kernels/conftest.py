"""Random structures for the kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nugnn.kernels.structure import Structure

MakeStructure = Callable[..., Structure]


@pytest.fixture(scope="session")
def make_structure() -> MakeStructure:
    """Structure with empty rows, one hub, parallel edges and self-loops, from a seed."""

    def make(
        seed: int, num_dst: int = 7, num_halo: int = 3, max_degree: int = 6, dtype: torch.dtype = torch.int32
    ) -> Structure:
        generator = torch.Generator().manual_seed(seed)
        num_src = num_dst + num_halo
        degrees = torch.randint(0, max_degree + 1, (num_dst,), generator=generator)
        degrees[torch.rand(num_dst, generator=generator) < 0.3] = 0
        if num_dst:
            degrees[torch.randint(0, num_dst, (1,), generator=generator)] += 3 * max_degree
        if num_src == 0:
            degrees.zero_()
        indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
        torch.cumsum(degrees, 0, out=indptr[1:])
        indices = torch.randint(0, max(num_src, 1), (int(indptr[-1]),), generator=generator)
        return Structure(num_src, indptr, indices.to(dtype))

    return make
