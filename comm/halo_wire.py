"""How halo rows look on the wire: as they are, in 16 bits, or in few bits between the ends of each row.

Rows of few bits are rounded at random, right in the mean, and the random words of a row are a function of seed, step,
what travels and **who the row is**: see `RowIds`. The receiver needs none of this; it only decodes.

Shape suffixes: n rows, N inner, H halo, S rows sent, D values of a row.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nugnn.comm.halo_traffic import Direction, ExchangeTraffic, HaloTraffic
from nugnn.kernels.philox import RandomKey
from nugnn.kernels.quantize import decode_rows, encode_rows, row_bytes
from nugnn.kernels.rows import IdRuns
from nugnn.kernels.structure import Structure

if TYPE_CHECKING:
    from nugnn.comm.halo_auto import RowWatch
    from nugnn.comm.halo_bits import HaloBits
    from nugnn.comm.halo_feedback import HaloFeedback
    from nugnn.comm.halo_sample import HaloSample
    from nugnn.comm.halo_stale import StaleRows

WIRES = ("fp32", "bf16", "fp16", "int8", "int4", "int2")
AUTO = "auto"
"""Wires by what travels and between whom, see `nugnn.comm.halo_auto`."""

_BITS = {"int8": 8, "int4": 4, "int2": 2}
_TOP_EXPONENT = 15
"""``fp16``: the largest value of a row is scaled to below 2**15, half of what the type holds."""


def checked_halo_wire(wire: str) -> str:
    """``wire`` itself.

    Raises:
        ValueError: It is none of `WIRES`, nor ``auto``.
    """
    if wire not in (*WIRES, AUTO):
        raise ValueError(f"halo_wire {wire!r} is not known; choose one of {', '.join((*WIRES, AUTO))}")
    return wire


def check_halo_feedback(wire: str, feedback: bool) -> None:
    """Refuse error feedback where it would have no effect.

    Raises:
        ValueError: ``wire`` is not one of few bits.
    """
    if feedback and checked_halo_wire(wire) not in _BITS:
        raise ValueError(
            f"halo_feedback needs halo_wire {', '.join(_BITS)}, whose rows leave something out that is worth keeping; "
            f"halo_wire is {wire}: leave halo_feedback out, or choose one of these"
        )


@dataclass(frozen=True, slots=True)
class HaloWire:
    """One way for halo rows to travel.

    Args:
        name: One of `WIRES`; ``fp32`` is as they are, in the type of the computation.

    Raises:
        ValueError: There is no such way.
    """

    name: str = "fp32"

    def __post_init__(self) -> None:
        if self.name not in WIRES:
            raise ValueError(f"halo_wire {self.name!r} is not known; choose one of {', '.join(WIRES)}")

    def row_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        """Bytes of a row of ``num_values`` of ``dtype``; its own size where the wire would not make it smaller.

        >>> [HaloWire(name).row_bytes(256, torch.float32) for name in WIRES]
        [1024, 512, 514, 264, 136, 72]
        >>> [HaloWire("int8").row_bytes(n, torch.float32) for n in (1, 2, 3)]
        [4, 8, 11]
        """
        plain = num_values * dtype.itemsize
        if not dtype.is_floating_point or self.name == "fp32":
            return plain
        return min(plain, self._compressed_bytes(num_values))

    def compresses(self, num_values: int, dtype: torch.dtype) -> bool:
        """Whether such rows travel in another form than their own; the same answer on every rank."""
        return self.row_bytes(num_values, dtype) < num_values * dtype.itemsize

    def _compressed_bytes(self, num_values: int) -> int:
        if self.name in _BITS:
            return row_bytes(num_values, _BITS[self.name])
        return 2 * num_values + (2 if self.name == "fp16" else 0)

    @property
    def is_random(self) -> bool:
        """Whether rounding draws random words."""
        return self.name in _BITS

    def encode(self, x: Tensor, key: RandomKey | None, row_ids: Tensor | None) -> Tensor:
        """Rows for the wire.

        Args:
            x: ``(n, D)`` floating. Not modified. ``float64`` goes through float32.
            key: Of rounding at random; few bits are rounded to nearest when None.
            row_ids: ``(n,)`` int64, who each row is to ``key``; not read where nothing is drawn.

        Returns:
            ``(n, row_bytes)`` uint8, the same bytes on every device, but for the NaN of ``bf16``, which each writes its
            own way.
        """
        x = x.detach()
        if self.name == "bf16":
            return x.to(torch.bfloat16).contiguous().view(torch.uint8)
        x = x.float() if x.dtype is torch.float64 else x
        return _scaled_halves(x.float()) if self.name == "fp16" else encode_rows(x, _BITS[self.name], key, row_ids)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fill ``out (n, D)``, floating, with what `encode` made."""
        if self.name == "bf16":
            out.copy_(wire.view(torch.bfloat16))
        elif self.name == "fp16":
            out.copy_(_unscaled(wire))
        elif out.dtype is torch.float32 and out.is_contiguous():
            decode_rows(wire, out.shape[1], _BITS[self.name], out=out)
        else:
            is_wide = out.dtype is torch.float64
            out.copy_(decode_rows(wire, out.shape[1], _BITS[self.name], dtype=torch.float32 if is_wide else out.dtype))


def _scaled_halves(x: Tensor) -> Tensor:
    """A power of two for each row as int16, then values in float16: no overflow, and small values keep their digits.

    A row with a value that is infinite or NaN is NaN throughout.
    """
    largest = x.abs().amax(1) if x.numel() else x.new_zeros(len(x))
    exponent = ((largest.view(torch.int32) >> 23) & 255) - 126  # largest < 2**exponent
    shift = (_TOP_EXPONENT - exponent).clamp(-126, 126)
    halves = (x * _power_of_2(shift)[:, None]).half()
    halves = halves.masked_fill(~torch.isfinite(largest)[:, None], torch.nan)  # last: GPUs make another NaN of a NaN
    return torch.cat([shift.to(torch.int16)[:, None].view(torch.uint8), halves.view(torch.uint8)], 1)


def _unscaled(wire: Tensor) -> Tensor:
    shift = wire.view(torch.int16)[:, 0].int()
    return wire.view(torch.float16)[:, 1:].float() * _power_of_2(-shift)[:, None]


def _power_of_2(exponent: Tensor) -> Tensor:
    """Exactly, on every device; ``exponent`` int32 from -126 to 126."""
    return ((exponent + 127) << 23).view(torch.float32)


@dataclass(frozen=True, eq=False)
class RowIds:
    """Who the travelling rows of a plan are to the random words of their rounding.

    **Rows sent to readers** are their node's global id: all readers get the same bytes, and parts that are cut
    otherwise round a node's row as these do.

    **Rows that go home** are each rank's share of one node's gradient. Were they the node's id, too, all shares of a
    node would be rounded with the same words, and errors of equal fractions would add up instead of averaging out.
    The rank's number would tell them apart, but also tie the rounding to how parts are numbered. What makes a share
    this share are the edges it is a sum over, and each edge belongs to one rank; so a share is the smallest place, in
    the whole graph's CSC order, of the edges from its node into this part. It stays what it is as long as the part
    has the same first reader, whoever computes it.

    Args:
        node_ids: ``(N,)`` int64 global ids of inner nodes.
        send_rows: ``(S,)`` int64, see `nugnn.comm.halo_transfer.HaloPlan`.
        structure: In-edges of the N inner nodes from ``N + H`` local rows.
        edge_places: Of each edge, its place in the whole graph's CSC order.
    """

    node_ids: Tensor
    send_rows: Tensor
    structure: Structure
    edge_places: IdRuns

    @cached_property
    def sent(self) -> Tensor:
        """``(S,)`` int64."""
        return self.node_ids.index_select(0, self.send_rows)

    @cached_property
    def returned(self) -> Tensor:
        """``(H,)`` int64."""
        num_inner = self.structure.num_dst
        first_L = self.node_ids.new_full((self.structure.num_src,), torch.iinfo(torch.int64).max)
        first_L.scatter_reduce_(0, self.structure.indices.long(), self.edge_places.tensor(), "amin")
        return first_L[num_inner:].clone()


@dataclass(frozen=True, slots=True)
class Travel:
    """How the rows of one exchange travel.

    Args:
        wire: In which form, unless ``bits`` says it.
        name: What travels; selects the random words, together with ``seed`` and ``step``.
        seed: Of the run.
        step: Of training.
        traffic: Where the exchange is counted.
        direction: As what it is counted.
        feedback: Adds what earlier steps have left out of rows that are fetched; in place of rounding at random.
        sample: Which of the rows travel, and of their gradients; all when None.
        stale: Gives what was sent in the step before in place of what is sent now.
        bits: Wires by name, sender and receiver.
        watch: Notes what is sent.
    """

    wire: HaloWire
    name: str
    seed: int = 0
    step: int = 0
    traffic: HaloTraffic = field(default_factory=HaloTraffic)
    direction: Direction = "forward"
    feedback: HaloFeedback | None = None
    sample: HaloSample | None = None
    stale: StaleRows | None = None
    bits: HaloBits | None = None
    watch: RowWatch | None = None

    def wire_of(self, sender: int, receiver: int) -> HaloWire:
        """The form in which rows travel from one rank to the other; both ends know it."""
        return self.wire if self.bits is None else HaloWire(self.bits.wire(self.name, sender, receiver))

    @property
    def key(self) -> RandomKey:
        """Of the rounding."""
        return RandomKey(self.seed, self.step, zlib.crc32(self.name.encode()))

    def of_gradient(self) -> Travel:
        """How the gradients of these rows travel.

        Raises:
            NotImplementedError: These are gradients themselves, and stale.
        """
        if self.stale is not None and self.direction == "gradient":
            raise NotImplementedError(
                f"{self.name}: a gradient of a gradient is not defined where gradients are those of the step before; "
                "use halo_mode exact for a loss that holds gradients (create_graph=True)"
            )
        direction: Direction = "gradient" if self.direction == "forward" else self.direction
        return replace(self, name=f"gradient of {self.name}", direction=direction, feedback=None)

    @property
    def counted(self) -> ExchangeTraffic:
        """Where this exchange is counted."""
        return self.traffic.of(self.direction, self.name)
