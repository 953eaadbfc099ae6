"""Timing, memory and records of the GPU benchmarks: check first, time after, one JSON row for each measurement.

A row says what was measured (``kind``, ``system``, ``graph``, ``shape``, ``dtype``, ``seed``), on what (card, driver,
versions, commit or the hash of the sources), and how it came out (``median_ms``, ``p20_ms``, ``p80_ms``,
``peak_bytes``), or why there is no figure (``error``). A case whose check fails has no time in its row.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nugnn._counted import counted
from nugnn.planning.timing import sample_calls, synchronize

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median of ``repeats``, and the 20th and 80th percentile."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    repeats: int


def time_ms(
    function: Callable[[], Any],
    device: torch.device,
    *,
    warmup: int = 3,
    budget_seconds: float = 1.0,
    flush_l2: bool = True,
    least_repeats: int = 5,
) -> Timing:
    """Time ``function``, one pair of CUDA events around each call (the host's clock on a CPU).

    Args:
        function: Called without arguments; what it returns is dropped.
        device: Where it runs.
        warmup: Calls before; they compile, fill caches and allocators, and tell how many repeats the budget buys.
        budget_seconds: Aim for the timed calls together: ``least_repeats`` to 100 of them.
        flush_l2: Write over the L2 cache before each call, so that nothing of the last one is left. Calls whose inputs
            are far larger than the cache do not notice.
        least_repeats: Calls that are timed though they take longer than the budget.
    """
    how: dict[str, Any] = {
        "budget_seconds": budget_seconds,
        "warmup": warmup,
        "least_repeats": least_repeats,
        "clear_cache": flush_l2,
    }
    return timing_of([1e3 * seconds for seconds in sample_calls(function, device, **how)])


def timing_of(samples_ms: list[float]) -> Timing:
    """Median and percentiles of single calls."""
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], repeats=len(ordered)
    )


def kernels_of(step: Callable[[], Any], count: int, device: torch.device) -> list[dict[str, Any]]:
    """The ``count`` kernels (operators on a CPU) that take most of one more step: name, calls, milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
        synchronize(device)

    def milliseconds(event: Any) -> float:
        return float(event.self_device_time_total if is_gpu else event.self_cpu_time_total) / 1e3

    events = sorted(profiler.key_averages(), key=milliseconds, reverse=True)[:count]
    return [{"name": event.key, "calls": event.count, "ms": milliseconds(event)} for event in events]


def moment(device: torch.device) -> Any:
    """Now: when the device has come to the end of what it was given so far, by its own clock; the host's on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def milliseconds(begin: Any, end: Any) -> float:
    """Between two moments, after the device was waited for."""
    return float((end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end))


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int | None:
    """Most device memory allocated by tensors during a call, what was there before included; None on a CPU."""
    if device.type != "cuda":
        function()
        return None
    free_memory()
    torch.cuda.reset_peak_memory_stats(device)
    function()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def held_bytes(device: torch.device) -> int | None:
    """Device memory that tensors hold between calls: inputs, the graph, what a system keeps; None on a CPU."""
    if device.type != "cuda":
        return None
    free_memory()
    return torch.cuda.memory_allocated(device)


def free_memory() -> None:
    """Give back the memory of GPUs that only garbage and the allocator's cache hold; nothing without a GPU."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@functools.cache
def machine(device: torch.device) -> dict[str, Any]:
    """Card, driver, versions and the code that ran."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        versions["triton"] = None
    if device.type != "cuda":
        card = f"CPU ({counted(torch.get_num_threads(), 'thread')})"
        return {"card": card, "driver": None, **versions, "code": code_version()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "card": properties.name,
        "card_bytes": properties.total_memory,
        "num_multiprocessors": properties.multi_processor_count,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None,
        **versions,
        "code": code_version(),
    }


def link_between_gpus() -> str:
    """How the first two GPUs are joined: ``NVLink``, or what ``nvidia-smi topo`` calls it; ``unknown`` without it."""
    rows = [line.split() for line in _output("nvidia-smi", "topo", "-m").splitlines()]
    name = next((row[2] for row in rows if row[:1] == ["GPU0"] and len(row) > 2 and row[1] == "X"), "unknown")
    return "NVLink" if name.startswith("NV") else name


@functools.cache
def code_version() -> str:
    """The commit, with ``+`` when files differ from it; where git is not, a hash of the sources."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if commit:
        is_changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
        return commit + ("+" if is_changed else "")
    digest = hashlib.sha256()
    for folder in ("benchmarks", "comm", "datasets", "kernels", "nugnn", "partition", "planning", "precision"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return "sources " + digest.hexdigest()[:12]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class Recorder:
    """Writes rows to a file as they come and shows each in a line of at most 80 columns.

    Args:
        path: JSON lines, appended to; its folder is made. None keeps rows in memory only.
        device: Whose name and versions the rows get.
        line: What is shown of a row; `line_of` unless another is given.
    """

    def __init__(
        self, path: Path | None, device: torch.device, line: Callable[[dict[str, Any]], str] | None = None
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path, self._device, self._line = path, device, line or line_of
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any], timing: Timing | None = None) -> dict[str, Any]:
        """Keep a row; returns it with the machine's columns."""
        row = row | ({} if timing is None else asdict(timing)) | {"machine": machine(self._device)}
        self.rows.append(row)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(self._line(row), flush=True)
        return row

    def measure(
        self,
        row: dict[str, Any],
        make: Callable[[], Callable[[], Any]],
        check: Callable[[Any], str | None] | None,
        **timing_options: Any,
    ) -> dict[str, Any]:
        """Build a case, check its result, and only then time it; whatever goes wrong is in the row instead of a time.

        Args:
            row: What is measured.
            make: Prepares and returns the function to time; its preparation is timed once as ``setup_seconds``.
            check: Gets what the function returned; None, or what is wrong with it.
            timing_options: Of `time_ms`.
        """
        timing, function, result = None, None, None
        try:
            begin = time.perf_counter()
            function = make()
            synchronize(self._device)
            row = row | {"setup_seconds": time.perf_counter() - begin}
            result = function()
            problem = None if check is None else check(result)
            result = None
            if problem is None:
                timing = time_ms(function, self._device, **timing_options)
                held = held_bytes(self._device)
                row = row | {"peak_bytes": peak_bytes(function, self._device), "held_bytes": held}
            else:
                row = row | {"error": f"wrong result: {problem}"}
        except Exception as error:  # a baseline that cannot run is a row of the table, too
            timing, row = None, row | {"error": brief(error)}
        del function, result
        free_memory()
        return self.add(row, timing)


def brief(error: Exception) -> str:
    """One line for a row: running out of memory is said in three words."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def line_of(row: dict[str, Any]) -> str:
    """A row for people, at most 80 columns: system, shape, type, order, then milliseconds and memory."""
    words = [str(row[key]) for key in ("graph", "order", "dtype", "shape") if row.get(key) is not None]
    what = " ".join(words).replace("-like", "")
    head = f"{row['system'][:17]:17} {what[:31]:31}"
    if "error" in row:
        return f"{head} {row['error']}"[:80]
    if row.get("median_ms") is None:
        value = row.get("value")
        return f"{head} {'' if value is None else f'{value:.4g}'} {row.get('unit', '')}"[:80]
    memory = row.get("peak_bytes")
    gib = "" if memory is None else f"{memory / 2**30:6.2f}G"
    spread = f"{row['p20_ms']:.2f}-{row['p80_ms']:.2f}"
    return f"{head}{row['median_ms']:9.2f} {spread:>13}{gib}"[:80]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of the ``.jsonl`` files of a folder, files in the order of their names; or of one file."""
    rows = []
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.jsonl")):
        with open(path, encoding="utf-8") as file:
            rows += [json.loads(line) | {"file": path.name} for line in file if line.strip()]
    for row in rows:
        if row.get("machine", {}).get("card") == "CPU (1 threads)":  # as it was written once; pages group rows by it
            row["machine"]["card"] = "CPU (1 thread)"
    return rows


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table for a page."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def largest_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Of as many numbers, relative to ``expected``; NaN where there is one, which no limit lets pass.

    Raises:
        ValueError: There are not as many.
    """
    differences = [abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True)]
    return next((each for each in differences if math.isnan(each)), max(differences))


def result_differs(result: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> str | None:
    """None where ``|result - exact| <= bound`` everywhere, else the worst place in words.

    Args:
        result: What a system gave, any floating type.
        exact: In float64.
        bound: Of the error, broadcast with ``exact``.
    """
    if result.shape != exact.shape:
        return f"shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
    excess = (result.double() - exact).abs() - bound
    if bool((excess <= 0).all()):  # NaN compares false
        return None
    place = int(torch.nan_to_num(excess, nan=float("inf")).flatten().argmax())
    row, column = divmod(place, exact.shape[-1])
    return (
        f"row {row}, column {column} is {float(result.flatten()[place]):.6g}, exact is "
        f"{float(exact.flatten()[place]):.6g}"
    )
