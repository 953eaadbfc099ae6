"""``halo_wire auto``: rows and the link are measured, and all ranks take one plan of wires, anew from time to time.

The first steps send rows as they are. In the last of them each rank notes bytes, ranges and squares of what it sends.
Then the link is measured, rank 0 solves (`nugnn.comm.halo_bits`), and all take its plan. Seconds are measured once in a
run and go into its checkpoints; later plans follow from rows alone, so that a resumed run finds the same ones.

Shape suffixes: S rows sent, D values of a row, P ranks, K names, W candidates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nugnn.comm.compression.link import Link
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_bits import (
    CANDIDATES,
    Floats,
    HaloBits,
    LinkSpeed,
    Traffic,
    plan_bits,
    rounding_errors,
)
from nugnn.comm.halo_target import HaloTarget
from nugnn.comm.halo_wire import HaloWire
from nugnn.comm.together import median_seconds
from nugnn.kernels.philox import RandomKey

FIRST_STEPS = 3
"""Before the first plan: one that compiles, and two whose computation is timed; the rows of the last one count."""
STEPS_BETWEEN_PLANS = 50

_ROUNDS = 3
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 22
_SECONDS_OF_A_PROBE = 0.2
_CODEC_VALUES = 1 << 18
_W = len(CANDIDATES)
_WIRES = tuple(map(HaloWire, CANDIDATES))


class RowWatch:
    """What this rank sends in a step, by name and receiver.

    Exchanges come in the same order on every rank, so all note the same names.
    """

    def __init__(self) -> None:
        self._noted: dict[str, Floats] = {}
        self.num_exchanges = 0
        self.num_columns = 1
        """Values of the widest row."""

    def see(self, name: str, rows_SD: Tensor, splits: Sequence[int]) -> None:
        """Note rows that are sent under ``name``, ``splits[r]`` of them to each rank ``r``."""
        rows, width = rows_SD.detach(), rows_SD.shape[1]
        self.num_exchanges, self.num_columns = self.num_exchanges + 1, max(self.num_columns, width)
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        sums_S2 = torch.stack([rows.amax(1) - rows.amin(1), torch.linalg.vector_norm(rows, dim=1)], 1).double().square()
        sums_P2 = torch.stack([part.sum(0) for part in sums_S2.split(list(splits))]).tolist()
        row_bytes = np.array([wire.row_bytes(width, rows_SD.dtype) for wire in _WIRES], dtype=np.float64)
        table_P = np.zeros((len(splits), 2 * _W + 2))
        for noted, count, (squared_ranges, squares) in zip(table_P, splits, sums_P2, strict=True):
            noted[:_W] = count * row_bytes
            noted[_W : 2 * _W] = rounding_errors(squared_ranges, squares, width)
            noted[2 * _W :] = squares, count * width
        table_P[:, _W : 2 * _W] *= row_bytes < row_bytes[0]  # others leave rows as they are
        self._noted[name] = self._noted[name] + table_P if name in self._noted else table_P

    def over_ranks(self, ranks: Ranks) -> Traffic:
        """Of all ranks, on each of them; a collective call."""
        table = torch.zeros(len(self._noted), ranks.world_size, ranks.world_size, 2 * _W + 2, dtype=torch.float64)
        for noted_PP, table_P in zip(table, self._noted.values(), strict=True):
            noted_PP[ranks.rank] = torch.from_numpy(table_P)
        whole = ranks.sum_(table).numpy()  # of one number and zeros: the same bits everywhere
        parts = whole[..., :_W], whole[..., _W : 2 * _W], whole[..., 2 * _W], whole[..., 2 * _W + 1]
        return Traffic(tuple(self._noted), self.num_exchanges, *parts)


class AutoBits:
    """The plan of wires of a run, and what the next one is made from.

    Args:
        ranks: Who takes part, in every step that is begun and settled.
        target: See `nugnn.comm.halo_bits.plan_bits`.
    """

    def __init__(self, ranks: Ranks, target: HaloTarget) -> None:
        self.bits = HaloBits()
        """Of the present step."""
        self.watch: RowWatch | None = None
        """Notes what the present step sends, if the next plan is made from it."""
        self._ranks, self._target = ranks, target
        self._speed: LinkSpeed | None = None
        self._compute_seconds: list[float] = []
        self._num_steps, self._next_plan = 0, FIRST_STEPS
        self._is_open, self._is_told = False, False
        self._began: float | None = None

    def begin_step(self) -> None:
        """A training step begins; the one before counts, unless that was settled."""
        self.settle()
        self._is_open = True
        self.watch = RowWatch() if self._num_steps + 1 >= self._next_plan else None
        if self._speed is None:
            self._began = self._computed()

    def end_step(self) -> None:
        """Forward and backward are done, of a training step or of an evaluation."""
        if self._began is not None:
            self._compute_seconds.append(self._computed() - self._began)
            self._began = None

    def settle(self, *, is_good: bool = True) -> None:
        """The step counts, unless it was left out; a plan follows from it where one is due. A collective call."""
        if not self._is_open:
            return
        watch, self.watch, self._is_open = self.watch, None, False
        self._num_steps += 1
        if watch is not None and is_good:
            self._plan(watch)

    def _computed(self) -> float:
        """Seconds of this rank's work, up to an arbitrary constant."""
        self._ranks.synchronize()
        return time.perf_counter() - self._ranks.clock.halo_seconds()

    def _plan(self, watch: RowWatch) -> None:
        traffic = watch.over_ranks(self._ranks)
        if not np.isfinite(traffic.errors.sum() + traffic.squares.sum()):
            return  # the next step is asked
        self._next_plan = self._num_steps + STEPS_BETWEEN_PLANS
        if self._speed is None:
            largest_KPP = traffic.num_bytes[..., 0]
            busiest_PP = largest_KPP[largest_KPP.sum((1, 2)).argmax()] if traffic.names else largest_KPP.sum(0)
            self._speed = measured_speed(self._ranks, busiest_PP, watch.num_columns)
            fastest = min(self._compute_seconds[1:] or self._compute_seconds)
            slowest = self._ranks.max_(torch.tensor([fastest], dtype=torch.float64))
            self._compute_seconds = slowest.tolist()
        bits = plan_bits(traffic, self._speed, self._compute_seconds[0], self._target)
        self.bits = HaloBits.from_plain(_of_first_rank(asdict(bits), self._ranks))

    # -- what is said and kept ---------------------------------------------------------------------------------------

    def news(self) -> str | None:
        """The first plan of this process, once, in a sentence."""
        if self._is_told or not self.bits.wires:
            return None
        self._is_told = True
        return self.bits.as_text()

    def report(self) -> dict[str, Any]:
        """The plan, with the wires of what this rank sends: for each name to each rank, None to itself."""
        plain, rank = asdict(self.bits), self._ranks.rank
        plain["wires"] = {
            name: [None if receiver == rank else wire for receiver, wire in enumerate(rows[rank])]
            for name, rows in self.bits.wires.items()
        }
        return {**plain, "target": str(self._target)}

    def state(self) -> dict[str, Any]:
        """For a checkpoint of this very split: plain values, the same on every rank but for what is not planned yet."""
        return {
            "bits": asdict(self.bits),
            "speed": None if self._speed is None else asdict(self._speed),
            "compute_seconds": list(self._compute_seconds),
            "num_steps": self._num_steps,
            "next_plan": self._next_plan,
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on where `state` was; from the beginning where it is None."""
        if state is None:
            state = AutoBits(self._ranks, self._target).state()
        self.bits = HaloBits.from_plain(state["bits"])
        speed = state["speed"]
        self._speed = (
            None
            if speed is None
            else LinkSpeed(
                speed["latency_seconds"],
                tuple(map(tuple, speed["seconds_per_byte"])),
                tuple(speed["codec_seconds_per_value"]),
            )
        )
        self._compute_seconds = list(state["compute_seconds"])
        self._num_steps, self._next_plan = state["num_steps"], state["next_plan"]
        self.watch, self._is_open, self._is_told = None, False, False


def _of_first_rank(plain: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What rank 0 has, on every rank; a collective call."""
    text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    size = ranks.broadcast_(torch.tensor([len(text)]))
    received = ranks.broadcast_(text if ranks.rank == 0 else torch.empty(int(size), dtype=torch.uint8))
    plain = json.loads(bytes(received.tolist()))
    return plain


# -- measurements ------------------------------------------------------------------------------------------------------


def measured_speed(ranks: Ranks, busiest_PP: Floats, num_columns: int) -> LinkSpeed:
    """How fast exchanges are between these ranks, all idle otherwise; a collective call.

    Pairs of ranks exchange on their own, as many pairs at once as there are; then all of them, in the proportions of a
    real exchange: what of them runs at once follows from both.

    Args:
        ranks: Who takes part.
        busiest_PP: Bytes of a real exchange, by sender and receiver.
        num_columns: Values of a row for the codec.
    """
    link = Link.of(ranks, aside=True)
    num_ranks = ranks.world_size

    def seconds_of(bytes_PP: Floats, rounds: int = _ROUNDS) -> Floats:
        """Of each rank, for an exchange of so many bytes."""
        sizes, own_sizes = bytes_PP[ranks.rank].astype(int).tolist(), bytes_PP[:, ranks.rank].astype(int).tolist()
        rows = torch.zeros(sum(sizes), dtype=torch.uint8, device=ranks.device)
        taken = torch.zeros(num_ranks, dtype=torch.float64)
        taken[ranks.rank] = median_seconds(lambda: link.exchange(rows, sizes, own_sizes), ranks, rounds)
        return ranks.sum_(taken).numpy()

    with ranks.pulse.waiting("measuring exchanges of halo rows"):
        ones_PP = 1.0 - np.eye(num_ranks)
        latency = float(seconds_of(8 * ones_PP, rounds=_ROUNDS + 2).max())
        first = float(seconds_of(_LEAST_BYTES * ones_PP).max())
        most = min(max(busiest_PP.max(), _LEAST_BYTES), _MOST_BYTES)
        num_bytes = int(np.clip(_LEAST_BYTES * _SECONDS_OF_A_PROBE / max(first, 1e-9), _LEAST_BYTES, most))
        each_PP = np.zeros((num_ranks, num_ranks))
        for pairs in rounds_of_pairs(num_ranks):
            bytes_PP = np.zeros_like(each_PP)
            for a, b in pairs:
                bytes_PP[a, b] = bytes_PP[b, a] = num_bytes
            taken_P = seconds_of(bytes_PP)
            for a, b in pairs:
                each_PP[a, b] = each_PP[b, a] = max(taken_P[a], taken_P[b]) - latency
        each_PP = each_PP.clip(min=0) / num_bytes
        whole_PP = np.floor((busiest_PP if busiest_PP.max() > 0 else ones_PP) * (num_bytes / max(busiest_PP.max(), 1)))
        together = max(0.0, float(seconds_of(whole_PP).max()) - latency)
        codec = ranks.max_(torch.tensor([_codec_seconds(wire, num_columns, ranks) for wire in _WIRES]).double())
    return LinkSpeed(latency, _scaled(each_PP, whole_PP, together), tuple(codec.tolist()))


def _scaled(each_PP: Floats, bytes_PP: Floats, seconds: float) -> tuple[tuple[float, ...], ...]:
    """``each_PP`` times what makes ``bytes_PP`` take ``seconds``."""
    one_by_one = float((each_PP * bytes_PP).sum())
    if one_by_one > 0:
        scaled = each_PP * (seconds / one_by_one)
    else:
        scaled = (1.0 - np.eye(len(each_PP))) * (seconds / max(float(bytes_PP.sum()), 1.0))
    return tuple(map(tuple, scaled.tolist()))


def rounds_of_pairs(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Every two ranks once, each rank at most once in a round.

    >>> rounds_of_pairs(4)
    [[(0, 3), (1, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    """
    odd = num_ranks + num_ranks % 2 - 1
    rounds = []
    for number in range(odd):
        partner = [other if (other := (number - rank) % odd) != rank else odd for rank in range(odd)]
        rounds.append([(a, b) for a, b in enumerate(partner) if a < b < num_ranks])
    return rounds


def _codec_seconds(wire: HaloWire, num_columns: int, ranks: Ranks) -> float:
    """To encode and decode a value on this rank."""
    if wire.name == "fp32":
        return 0.0
    rows = torch.randn(max(1, _CODEC_VALUES // num_columns), num_columns, generator=torch.Generator().manual_seed(0))
    rows, ids = rows.to(ranks.device), torch.arange(len(rows), device=ranks.device)
    out = torch.empty_like(rows)

    def run() -> None:
        wire.decode(wire.encode(rows, RandomKey(0, 0, 0), ids), out)

    run()  # which may compile
    return median_seconds(run, ranks, _ROUNDS) / rows.numel()
