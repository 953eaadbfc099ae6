"""What NCCL is told before its first communicator."""

from __future__ import annotations

import os

_REGISTERS = "NCCL_GRAPH_REGISTER"


def exchange_through_own_buffers() -> None:
    """Exchanges in CUDA graphs go through NCCL's own buffers, unless the user's environment says otherwise.

    While a graph is recorded, NCCL registers the tensors of an exchange with the peers, which then read them in place.
    It takes a tensor for one allocation. Where torch's allocator has segments that grow
    (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``) a tensor may lie across several, on one rank and not on the
    other: GPUs then wait for each other for ever when the graph runs, without an error. Which tensors do depends on
    their sizes, so the same run with other shares goes well.

    To be called before the first communicator is made: NCCL reads its environment once.
    """
    os.environ.setdefault(_REGISTERS, "0")
