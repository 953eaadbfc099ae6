"""Whether others use a machine that is about to be measured, or is, and what that says of its rates, in words."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

MUCH_USED = 0.1
"""Of a device's time, by others; an idle machine's own services stay far below it."""
MUCH_SPREAD = 0.25
"""Between the 20th and the 80th percentile, beside the median; likewise."""
_SECONDS = 0.5
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
    except (OSError, ValueError):
        return None
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else None


def _counts(text: str, cores: Collection[int]) -> tuple[int, int]:
    """Ticks of these cores together: in which they computed, and all."""
    busy = total = 0
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(field) for field in fields[:_FIELDS]]
            total += sum(ticks)
            busy += sum(ticks) - ticks[_IDLE] - ticks[_WAITS_FOR_DISKS]
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
    return worker, f"{most:.0%}".replace("%", " %")


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
    most = f"{max(much.values()):.0%}".replace("%", " %")
    up_to, were = ("", "was") if len(much) == 1 else ("up to ", "were")
    return f"others had its cores for {up_to}{most} of the time while {', '.join(much)} {were} measured"


def said_of_use(used: float | None, spread: Mapping[str, float], beside: str | None = None) -> str | None:
    """What speaks against rates that were measured so; None for nothing.

    Args:
        used: Share of the device that others used just before; None where it is not known.
        spread: Of rates, by name: see `nugnn.planning.timing.Timing`.
        beside: From `said_of_waits`.

    >>> said_of_use(0.48, {"gather_bytes": 0.03})
    'others used 48 % of it when measuring began; its rates may be too low, measure again when it is idle'
    >>> said_of_use(0.02, {"gather_bytes": 0.03}) is None
    True
    """
    most, said = max(spread.values(), default=0.0), []
    if used is not None and used > MUCH_USED:
        said.append(f"others used {used:.0%} of it when measuring began".replace("%", " %"))
    if beside is not None:
        said.append(beside)
    if most > MUCH_SPREAD:
        said.append(f"rates varied by up to {most:.0%} from call to call".replace("%", " %"))
    return f"{' and '.join(said)}; its rates may be too low, measure again when it is idle" if said else None
