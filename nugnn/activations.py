"""What a step keeps for its backward pass: everything, the inputs of layers, or copies in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nugnn.kernels.reuse import ReuseHandler
from nugnn.model_on_shard import ModelOnShard
from nugnn.offload import LEAST_BYTES, HostMemory
from nugnn.options import closest
from nugnn.recomputation import Recomputation

ACTIVATIONS = ("keep", "recompute", "offload")


def checked_activations(activations: str) -> str:
    """``activations`` itself.

    Raises:
        ValueError: It is none of `ACTIVATIONS`.
    """
    if activations not in ACTIVATIONS:
        near = closest(str(activations), list(ACTIVATIONS))
        raise ValueError(f"activations {activations!r} is not known{near}; choose one of {', '.join(ACTIVATIONS)}")
    return activations


def refuse_needless_offload(activations: str, devices: Sequence[torch.device]) -> None:
    """Refuse to move activations to the host's memory where all of ``devices`` compute in it.

    Raises:
        ValueError: Says what to do instead.
    """
    if activations == "offload" and all(device.type == "cpu" for device in devices):
        raise ValueError(
            "activations offload moves what backward needs from a GPU into the host's memory, and this run computes on "
            "the CPU, where it is already; use recompute to save memory, or keep"
        )


class Activations:
    """The forward and backward pass of a training step, keeping all that backward needs."""

    why_not_recorded: str | None = None
    """What keeps a step from being a CUDA graph."""

    def __init__(self, net: ModelOnShard) -> None:
        self.net = net

    def step(self) -> AbstractContextManager[None]:
        """To be opened inside ``net.step``, around forward and backward."""
        return nullcontext()

    def forward(self) -> Tensor:
        """`ModelOnShard.forward`."""
        return self.net.forward()


class Recomputed(Activations):
    """Message-passing layers keep their inputs alone and run again in backward; see `nugnn.recomputation`."""

    def __init__(self, net: ModelOnShard) -> None:
        super().__init__(net)
        self._recomputation = Recomputation(net.model, net.interceptor)

    def step(self) -> AbstractContextManager[None]:
        return self._recomputation.step()


class Offloaded(Activations):
    """What backward needs waits in the host's memory, but for what is on the device in any case; see `nugnn.offload`.

    Args:
        net: Its parameters, constants and graph stay on the device.
        least_bytes: Smaller tensors stay, too.
    """

    why_not_recorded = "activations go to the host's memory and back"

    def __init__(self, net: ModelOnShard, *, least_bytes: int = LEAST_BYTES) -> None:
        super().__init__(net)
        self.host = HostMemory(net.graph.device, lambda: _resident(net), least_bytes=least_bytes)

    def forward(self) -> Tensor:
        with self.host.saving():
            return self.net.forward()


def _resident(net: ModelOnShard) -> Iterator[Tensor]:
    """Tensors of ``net`` that live longer than a forward pass."""
    yield from net.model.parameters()  # in half precision: the copies that the step works on
    yield from net.model.buffers()
    if net.features_ND is not None:
        yield net.features_ND
    yield from net.graph.own_tensors()
    for handler in net.interceptor.handlers:
        if isinstance(handler, ReuseHandler):
            yield from handler.kept()


def make_activations(activations: str, net: ModelOnShard) -> Activations:
    """How ``net`` is trained under ``activations``, one of `ACTIVATIONS`.

    Raises:
        ValueError: There is no such choice, or no rank has a GPU whose memory ``offload`` would save.
    """
    ranks = net.graph.ranks
    if ranks.is_uniform:
        refuse_needless_offload(activations, [ranks.device])
    if checked_activations(activations) == "recompute":
        return Recomputed(net)
    # beside a rank with a GPU, one without has all in the host's memory already
    moves = activations == "offload" and ranks.device.type != "cpu"
    return Offloaded(net) if moves else Activations(net)
