"""When a rank that has nobody to wait for is done with its step: the walk through it, thousands of times a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nugnn.planning.rank_time import RankTime
from nugnn.planning.rested import Rested
from nugnn.planning.step_program import Do, Program

Floats = npt.NDArray[np.float64]


class LoneWalk:
    """Host and device of one rank with nobody to wait for, in a few array operations.

    Between exchanges the host launches one operator after the other, and the device runs each when it is launched and
    the one before has ended. When a stretch of operators ends follows from where host and device were at its begin: it
    is the later one of two sums, all operators after the device's time, and the largest of launches followed by
    operators after the host's. Several launches of an instruction are as many operators in a row, each as long; of
    these the first or the last decides.

    Args:
        program: Of the device.
        launched: Of each instruction, how many operators the host launches for it.
        launch_seconds: Of the host.
        blocks_host: Whether the host waits where the device waits for an exchange.
    """

    def __init__(self, program: Program, launched: Sequence[int], launch_seconds: float, *, blocks_host: bool) -> None:
        order: list[int] = []
        starts: list[int] = []
        firsts: list[int] = []
        launches: list[int] = []
        kinds: list[Do] = []
        self._steps: list[tuple[Do, int]] = []
        is_open = False
        for (do, which, _), count in zip(program.instructions, launched, strict=True):
            if do >= Do.BEGIN:
                self._steps.append((do, which))
            else:
                if not is_open:
                    self._steps.append((Do.RUN, len(starts)))
                    starts.append(len(order))
                before = launches[-1] if is_open else 0
                order.append(which)
                firsts.append(before + min(count, 1))
                launches.append(before + count)
                kinds.append(do)
            is_open = do < Do.BEGIN
        self._order, self._starts = np.array(order, np.intp), np.array(starts, np.intp)
        self._segment = np.repeat(np.arange(len(starts)), np.diff([*starts, len(order)]))
        self._first, self._launched = launch_seconds * np.array(firsts), launch_seconds * np.array(launches)
        counts = 1 + np.array(launches) - np.array(firsts)
        self._before_last = 1 - 1 / counts
        self._has_rows = launch_seconds > 0 and bool((counts > 1).any())
        self._of_host = self._launched[np.append(self._starts[1:], len(order)) - 1].tolist()
        self._inner, self._halo, self._early, self._late = (
            np.array([place for place, do in enumerate(kinds) if do == which], np.intp)
            for which in (Do.RUN_INNER, Do.RUN_HALO, Do.RUN_EARLY, Do.RUN_LATE)
        )
        self._blocks_host, self._num_exchanges = blocks_host, len(program.exchanges)

    def seconds(
        self,
        of_record: Floats,
        wires: Sequence[float],
        halo_share: float,
        early_shares: Sequence[float],
        taken: Mapping[int, float],
        time: RankTime,
        rested: Rested,
        passing: Sequence[float],
    ) -> float:
        """Until both have done all.

        Args:
            of_record: ``(R,)`` device seconds of each record.
            wires: Seconds of each exchange.
            halo_share: Of the edges, those from halo rows.
            early_shares: Of each sum that runs early in part, in their order, how much of it does.
            taken: What exchanges take from computing beside them; none where a host launches operators.
            time: Of the device, at the begin of a step.
            rested: How long its link has rested.
            passing: Seconds of each exchange in which bytes are on their way; none where a rested link saves nothing.
        """
        each = of_record[self._order]
        each[self._inner] *= 1.0 - halo_share
        each[self._halo] *= halo_share
        if early_shares:
            each[self._early] *= early_shares
            each[self._late] *= 1.0 - np.array(early_shares)
        totals = np.add.reduceat(each, self._starts)
        before = np.cumsum(each) - each
        rest = totals[self._segment] - (before - before[self._starts][self._segment])
        after_launch = self._first + rest
        if self._has_rows:
            after_launch = np.maximum(after_launch, self._launched + rest - self._before_last * each)
        after_host = np.maximum.reduceat(after_launch, self._starts).tolist()
        after_device = totals.tolist()
        host = free = 0.0
        ends = [0.0] * self._num_exchanges
        for do, which in self._steps:
            if do == Do.RUN:
                time.computes(time.device, after_device[which])
                time.device = max(time.device, host + after_host[which])
                host += self._of_host[which]
            elif do == Do.BEGIN:
                begin = max(time.device, free)
                saved = rested.saved(begin, passing[which]) if passing else 0.0
                free = ends[which] = begin + wires[which] - saved
                time.travels(begin, free, taken.get(which, 0.0))
            else:
                time.waits(ends[which])
                if self._blocks_host:
                    host = max(host, time.device)
        return max(host, time.device)
