"""When nodes should move, and when they should go back to where they were, from one look at the ranks to the next.

When to act is the question of renting or buying: imbalance costs a little in every epoch, a move costs much once. A
move is made when what imbalance has cost since it began comes to what a move costs. Whatever happens afterwards, that
is at most twice the best that was possible, and a hiccup is over before.

Imbalance is one of computing; what a move does to exchanges shows in the epochs after it. Where these are longer than
before, the move is taken back.

Source: Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", Algorithmica 1988, for renting or buying.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from nugnn.planning.imbalance import Levelling, RankLoad, RebalanceRules, levelled
from nugnn.planning.longer_epochs import longer_by
from nugnn.planning.moved_parts import best_fraction

_FIRST_COST_IN_EPOCHS = 4.0
_FIRST_COST_PER_EDGE = 6e-8
"""What a move is taken to cost before one was made: epochs of a balanced run, in which caches are filled again, and
seconds for an in-edge of the largest part, of which lists are made on the host."""
_AFTER_A_SHORTFALL, _AFTER_A_RETURN, _MOST_RELUCTANCE = 2.0, 8.0, 64.0
"""Times longer that the next move waits."""


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """What came of a move that brought less than half of what it promised, or after which epochs are longer.

    Args:
        promised: Seconds of the slowest rank's computing in an epoch.
        brought: Of them.
        longer: Seconds by which epochs are longer than before; 0 where they are not.
    """

    promised: float
    brought: float
    longer: float


@dataclass
class ImbalanceWatch:
    """Decides, from one look at the ranks to the next.

    Args:
        rules: When to act.
    """

    rules: RebalanceRules
    wasted_seconds: float = field(default=0.0, init=False)
    """What imbalance has cost since it began."""
    shortfall: Shortfall | None = field(default=None, init=False)
    """Of the last move, at the look that found it."""
    _cost: float | None = field(default=None, init=False)
    _reluctance: float = field(default=1.0, init=False)
    _promised: Levelling | None = field(default=None, init=False)
    _gain_before: float = field(default=0.0, init=False)
    _passed: tuple[float, ...] = field(default=(), init=False)
    _passed_before: tuple[float, ...] = field(default=(), init=False)
    _lost: float = field(default=0.0, init=False)

    def look(
        self,
        loads: Sequence[RankLoad],
        *,
        num_epochs: int,
        epochs_left: int,
        slow_start: float = 0.0,
        can_return: bool = False,
    ) -> Levelling | None:
        """What to do now; None for nothing.

        Args:
            loads: Of each rank, medians over the last epochs, none of them from before the last move.
            num_epochs: Since the last look.
            epochs_left: Of the run.
            slow_start: By how many seconds the first epoch took longer than those after it; after a move that counts
                for its cost.
            can_return: Whether nodes can go back to where they were before the last move.
        """
        if len(loads) < 2:
            return None
        level = levelled(loads, self.rules)
        self._passed = max((load.passed for load in loads), key=lambda passed: statistics.median(passed or (0.0,)))
        self.shortfall = None
        promised, self._promised = self._promised, None
        if promised is not None and self._cost is not None:  # the first look after a move
            self._cost += max(slow_start, 0.0)
            longer = longer_by(self._passed_before, self._passed)
            if can_return and longer and self._is_worth_it(longer, epochs_left, self._cost):
                self._lost = longer * num_epochs
                return promised.undone(level.seconds)
            self._compare(promised, max(level.seconds), longer)
        slowest = max(level.seconds)
        if not slowest > 0 or level.gain < self.rules.least_imbalance * slowest:
            self.wasted_seconds = self._gain_before = 0.0
            return None
        gain, self._gain_before = min(level.gain, self._gain_before), level.gain  # what two looks agree on will last
        self.wasted_seconds += level.gain * num_epochs
        cost = self.cost_seconds(max(level.predicted), max(load.sizes.edges for load in loads))
        is_paid = self.wasted_seconds >= cost * self._reluctance
        if not is_paid or not self._is_worth_it(gain, epochs_left, cost):
            return None
        return self._with_exchanges(level, loads, epochs_left, cost)

    def cost_seconds(self, epoch_seconds: float, num_edges: int) -> float:
        """Of a move: as the last one took, or a guess from a balanced epoch and the edges of the largest part."""
        if self._cost is not None:
            return self._cost
        return _FIRST_COST_IN_EPOCHS * epoch_seconds + _FIRST_COST_PER_EDGE * num_edges

    def moved(self, levelling: Levelling, seconds: float) -> None:
        """What `look` said was done, and took ``seconds``."""
        self.wasted_seconds = self._gain_before = 0.0
        if levelling.is_return:  # an attempt costs the way there, what epochs took longer, and the way back
            self._cost = (self._cost or 0.0) + self._lost + seconds
            self._wait(_AFTER_A_RETURN)
        else:
            self._promised, self._cost, self._passed_before = levelling, seconds, self._passed

    def _is_worth_it(self, gain: float, epochs_left: int, cost: float) -> bool:
        return gain * epochs_left >= 2 * cost + self.rules.least_gain_seconds

    def _with_exchanges(
        self, level: Levelling, loads: Sequence[RankLoad], epochs_left: int, cost: float
    ) -> Levelling | None:
        """As much of ``level`` as is worth it by the model of whole epochs; None, and a wait, where nothing is."""
        if self.rules.work is None or self.rules.whole is None:
            return level
        best, saved = best_fraction(level, loads, self.rules.work, self.rules.whole)
        is_much = saved >= self.rules.least_imbalance * max(level.seconds)
        if is_much and self._is_worth_it(saved, epochs_left, cost):
            return best
        self.wasted_seconds = self._gain_before = 0.0
        return None

    def _compare(self, promised: Levelling, slowest: float, longer: float) -> None:
        """A move that brought less than half of what it promised makes the next one wait longer."""
        brought = max(promised.seconds) - slowest
        if brought >= 0.5 * promised.gain and not longer:
            self._reluctance = 1.0
            return
        self.shortfall = Shortfall(promised=promised.gain, brought=brought, longer=longer)
        self._wait(_AFTER_A_SHORTFALL)

    def _wait(self, times: float) -> None:
        self._reluctance = min(times * self._reluctance, _MOST_RELUCTANCE)
