"""Whether others use a machine that is about to be measured, or is, and what that says of its rates, in words."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MUCH_USED = 0.1
"""Of a device's time, by others; an idle machine's own services stay far below it."""
MUCH_SPREAD = 0.25
"""Between the 20th and the 80th percentile, beside the median; likewise."""
_SECONDS = 0.5
_LEAST_SECONDS = 0.3
_IDLE, _WAITS_FOR_DISKS, _FIELDS = 3, 4, 8
"""Of a core's line: which counts are no work, and how many there are before those that others have in them."""


def used_of_cores(
    cores: Collection[int],
    *,
    seconds: float = _SECONDS,
    read: Callable[[], str] = lambda: Path("/proc/stat").read_text(encoding="utf-8"),
) -> float | None:
    """Share of the time of ``cores`` in which they compute, while this process waits; None where nobody says it.

    Unlike the load average it is of now, and of these cores alone: what has ended before does not count.

    Args:
        cores: Their numbers.
        seconds: To wait.
        read: Gives the system's counts, as of ``/proc/stat``.
    """
    try:
        before = _counts(read(), cores)
        time.sleep(seconds)
        after = _counts(read(), cores)
    except (OSError, ValueError, IndexError):
        return None
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else None


def _counts(text: str, cores: Collection[int]) -> tuple[int, int]:
    """Ticks of these cores together: in which they computed, and all.

    Raises:
        ValueError: Not all of the cores are counted: one is offline, or a container numbers those it shows anew.
    """
    busy = total = 0
    counted = set()
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(field) for field in fields[:_FIELDS]]
            counted.add(int(name[3:]))
            total += sum(ticks)
            busy += sum(ticks) - ticks[_IDLE] - ticks[_WAITS_FOR_DISKS]
    if missing := set(cores) - counted:
        raise ValueError(f"cores {sorted(missing)} are not counted")
    return busy, total


class CoreWait:
    """How much of the time since it was made the thread that made it was ready to run, and had no core.

    Of a thread that has a core to itself that is next to nothing, whatever it waits for; it is what others took from
    it, other threads of its own program on the same core among them.

    Args:
        read: Gives what the system counts of the thread, as of ``/proc/thread-self/schedstat``: nanoseconds on a core,
            and nanoseconds ready without one.
        now: A clock, in seconds.
    """

    def __init__(
        self,
        read: Callable[[], str] = lambda: Path("/proc/thread-self/schedstat").read_text(encoding="ascii"),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._now = read, now
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._since, self._waited = self._now(), self._seconds()

    @property
    def share(self) -> float | None:
        """Of the time so far; None where nobody says it."""
        waited, took = self._seconds(), self._now() - self._since
        return None if waited is None or self._waited is None or took <= 0 else (waited - self._waited) / took

    def _seconds(self) -> float | None:
        try:
            return int(self._read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None


@dataclass(frozen=True, kw_only=True)
class CoreUse:
    """Who computed on the cores that a process may use, for some time.

    Args:
        cores: Their numbers.
        busy: Share of their time in which anybody computed on them.
        own: Share of it in which this process did, with all its threads and those of its children that have ended.
    """

    cores: tuple[int, ...]
    busy: float
    own: float

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any] | None) -> CoreUse | None:
        """From `dataclasses.asdict`, also by way of JSON; None of None."""
        return None if plain is None else cls(**{**plain, "cores": tuple(plain["cores"])})


class CoreUseWatch:
    """Counts `CoreUse` from when it was made.

    Threads that wait for a core are only some of what others cost: where ranks wait for each other in short turns,
    nearly all time goes to those who wait for the thread that waits, and none of them says so.

    Args:
        cores: Of this process.
        read: Gives the system's counts, as of ``/proc/stat``.
        own: Seconds that this process has computed.
        now: A clock, in seconds.
    """

    def __init__(
        self,
        cores: Collection[int],
        read: Callable[[], str] = lambda: Path("/proc/stat").read_text(encoding="utf-8"),
        own: Callable[[], float] = lambda: time.process_time() + sum(os.times()[2:4]),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cores, self._read, self._own, self._now = tuple(sorted(cores)), read, own, now
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._since, self._before, self._own_before = self._now(), self._counts(), self._own()

    @property
    def use(self) -> CoreUse | None:
        """So far; None where nobody says it, or before the system's counts, in hundredths of a second, say much."""
        took, after, own = self._now() - self._since, self._counts(), self._own() - self._own_before
        if self._before is None or after is None or took < _LEAST_SECONDS or after[1] <= self._before[1]:
            return None
        busy = (after[0] - self._before[0]) / (after[1] - self._before[1])
        return CoreUse(cores=self._cores, busy=busy, own=own / took / len(self._cores))

    def _counts(self) -> tuple[int, int] | None:
        try:
            return _counts(self._read(), self._cores)
        except (OSError, ValueError, IndexError):
            return None


def used_by_others(uses: Sequence[CoreUse | None], threads: Sequence[int]) -> tuple[tuple[int, ...], str] | None:
    """Cores on which others computed that these processes needed, and for what share of the time, in words; else None.

    Processes that may use the same cores are taken together; where sets of cores overlap otherwise, or one process says
    nothing, nobody can tell who was on them. Of more cores than the processes have threads others may use what is left.

    Args:
        uses: Of all processes of one host that belong together, over the same time.
        threads: With which each computes on cores; 0 where it computes on a GPU.

    >>> uses = [CoreUse(cores=(0,), busy=0.9, own=0.5), CoreUse(cores=(1,), busy=0.8, own=0.8)]
    >>> used_by_others(uses, [1, 1])
    ((0,), '40 %')
    """
    known = [use for use in uses if use is not None]
    if len(known) < len(uses):
        return None
    sets, found = {use.cores for use in known}, []
    for cores in sets:
        same = [(use, count) for use, count in zip(known, threads, strict=True) if use.cores == cores]
        needed = min(sum(count for _, count in same), len(cores))
        if needed == 0 or any(set(cores) & set(other) for other in sets - {cores}):
            continue
        others = max(use.busy for use, _ in same) - sum(use.own for use, _ in same)
        lacking = others * len(cores) - (len(cores) - needed)
        if lacking > MUCH_USED * needed:
            found.append((others, cores))
    if not found:
        return None
    most, cores = max(found)
    return cores, _per_cent(most)


def longest_wait(waits: Sequence[float | None], threads: int, cores: int) -> tuple[int, str] | None:
    """The worker that waited most for a core, and for what share of the time, in words; None where that is not much.

    Args:
        waits: Of each worker, from `CoreWait`.
        threads: Of all workers that compute on CPUs of this host. Where there are more than cores, workers wait for
            each other, as they are planned to, and nobody can tell who else is there.
        cores: That they may use.

    >>> longest_wait([0.05, None, 0.234], threads=3, cores=4)
    (2, '23 %')
    """
    known = [(share, worker) for worker, share in enumerate(waits) if share is not None]
    if threads > cores or not known or max(known)[0] <= MUCH_USED:
        return None
    most, worker = max(known)
    return worker, _per_cent(most)


def said_of_others(
    waits: Sequence[float | None], uses: Sequence[CoreUse | None], threads: Sequence[int], cores: int
) -> str | None:
    """That others had the cores of workers while something was measured, in words; None where not, or nobody can tell.

    Args:
        waits: Of all workers of one host, from `CoreWait`.
        uses: Of all workers, from `CoreUseWatch`.
        threads: With which each computes on cores; 0 where it computes on a GPU.
        cores: That all of them may use.

    >>> said_of_others([0.02], [CoreUse(cores=(3,), busy=0.9, own=0.6)], [1], cores=4)
    'others computed on core 3 for 30 % of the time'
    """
    if (waited := longest_wait(waits, sum(threads), cores)) is not None:
        return f"worker {waited[0]} was ready and had no core for {waited[1]} of the time"
    if (used := used_by_others(uses, threads)) is None:
        return None
    numbers = _in_spans(used[0])
    return f"others computed on {'core' if len(used[0]) == 1 else 'cores'} {numbers} for {used[1]} of the time"


def _in_spans(cores: Sequence[int]) -> str:
    """Ascending numbers, three and more in a row by the first and the last of them: a host may have hundreds.

    >>> _in_spans([0, 1, 4, 5, 6, 7, 9])
    '0, 1, 4-7, 9'
    """
    spans: list[list[int]] = []
    for core in cores:
        if spans and core == spans[-1][-1] + 1:
            spans[-1].append(core)
        else:
            spans.append([core])
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in spans)


def used_of_gpus(ask: Callable[[], str] | None = None) -> dict[str, float]:
    """Share of the last moment in which each GPU computed, by uuid; those of which nobody says it are left out.

    Args:
        ask: Gives lines of uuid and per cent, as ``nvidia-smi`` does.
    """
    used = {}
    for line in (ask or _by_driver)().splitlines():
        uuid, _, percent = (word.strip() for word in line.partition(","))
        if percent.isdigit():
            used[uuid] = int(percent) / 100
    return used


def _by_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=uuid,utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def said_of_waits(waited: Mapping[str, float]) -> str | None:
    """What was measured beside others' work, in words; None for nothing.

    Args:
        waited: Of each rate, by name, see `nugnn.planning.timing.Timing`.

    >>> said_of_waits({"gemm_flops.fp32": 0.02, "gemm_flops.bf16": 0.4})
    'others had its cores for 40 % of the time while gemm_flops.bf16 was measured'
    """
    much = {name: share for name, share in waited.items() if share > MUCH_USED}
    if not much:
        return None
    most = _per_cent(max(much.values()))
    up_to, were = ("", "was") if len(much) == 1 else ("up to ", "were")
    return f"others had its cores for {up_to}{most} of the time while {', '.join(much)} {were} measured"


def said_of_use(used: float | None, spread: Mapping[str, float], *beside: str | None) -> str | None:
    """What speaks against rates that were measured so; None for nothing.

    Args:
        used: Share of the device that others used just before; None where it is not known.
        spread: Of rates, by name: see `nugnn.planning.timing.Timing`.
        *beside: What others computed meanwhile, in words, as from `said_of_waits`; None for nothing.

    >>> said_of_use(0.48, {"gather_bytes": 0.03})
    'others used 48 % of it when measuring began; its rates may be too low, measure again when it is idle'
    >>> said_of_use(0.02, {"gather_bytes": 0.03}) is None
    True
    """
    most, said = max(spread.values(), default=0.0), []
    if used is not None and used > MUCH_USED:
        said.append(f"others used {_per_cent(used)} of it when measuring began")
    said += [text for text in beside if text is not None]
    if most > MUCH_SPREAD:
        said.append(f"rates varied by up to {_per_cent(most)} from call to call")
    if not said:
        return None
    *first, last = said
    return (
        f"{', '.join(first)}{' and ' if first else ''}{last}; its rates may be too low, measure again when it is idle"
    )


def _per_cent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
