"""Memory for what roundings leave out, the same from step to step: on a CPU the system takes long to make it anew."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class RestRooms:
    """Tensors for the rests of groups of gradients.

    A group has two: what is kept lies in one of them while the next step's rest is written into the other. On GPUs
    memory comes from torch's pool, in no time, and is made in each step.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, list[Tensor]] = {}

    def room(self, group: str, values: Tensor, kept: Iterable[Tensor]) -> Tensor:
        """Uninitialised, like ``values (n,)``.

        Args:
            group: Whose values they are.
            values: Contiguous.
            kept: What must stay as it is.
        """
        if values.device.type != "cpu":
            return torch.empty_like(values)
        in_use = {x.untyped_storage().data_ptr() for x in kept}
        own = [x for x in self._rooms.get(group, ()) if len(x) == len(values)]
        for x in own:
            if x.untyped_storage().data_ptr() not in in_use:
                self._rooms[group] = own
                return x
        x = torch.empty_like(values)
        self._rooms[group] = [*own[-1:], x]
        return x

    def keep_groups(self, groups: Iterable[str]) -> None:
        """Forget all others: gradients travel in other groups now."""
        here = set(groups)
        self._rooms = {group: rooms for group, rooms in self._rooms.items() if group in here}
