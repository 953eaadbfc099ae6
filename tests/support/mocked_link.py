"""Links of ``halo_wire auto`` that are told and not measured, so that every run plans the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from nugnn.comm import halo_auto
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_auto import AutoBits
from nugnn.comm.halo_bits import CANDIDATES, LinkSpeed

SECONDS_PER_BYTE = 1e-6
"""So slow that rows travel in few bits."""


@contextmanager
def mocked_link(ranks: Ranks, seconds_per_byte: float = SECONDS_PER_BYTE, slow: float = 1.0) -> Iterator[None]:
    """Steps that compute nothing, and a link whose bytes from and to rank 0 take ``slow`` times as long."""
    here = range(ranks.world_size)
    each = tuple(tuple(seconds_per_byte * (slow if 0 in (a, b) else 1) * (a != b) for b in here) for a in here)
    speed = LinkSpeed(0.0, each, (0.0, *[1e-12] * (len(CANDIDATES) - 1)))
    with (
        mock.patch.object(halo_auto, "measured_speed", lambda *_: speed),
        mock.patch.object(AutoBits, "_computed", lambda self: 0.0),
    ):
        yield
