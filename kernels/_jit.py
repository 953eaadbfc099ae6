"""Compile CPU kernels with numba, keeping machine code on disk under a key that covers every source it came from.

numba's own disk cache looks only at the file of the compiled function, so it misses a change in an imported helper or
constant, and it writes next to the sources. Here the folder name is a hash of all sources of the kernel's package, of
this package's version and of numba's, below ``$XDG_CACHE_HOME/nugnn`` (or ``~/.cache/nugnn``). Of workers that all need
a kernel one compiles it, and the others wait for its file. Where that folder cannot be written the kernels are compiled
anew in each process. numba's global configuration is left as it is.

numba is imported by the first module that compiles a kernel, so operator packages import their ``cpu`` module inside
the functions that need it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import logging
import os
import platform
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nugnn.kernels._one_process import OneProcess

_logger = logging.getLogger(__name__)
_KERNELS = Path(__file__).resolve().parent
_TASKS_PER_THREAD = 4
_PATIENCE_SECONDS = 60.0
"""Until a process compiles a kernel that another one has not finished: longer than any takes on a busy machine."""


def jit(*, parallel: bool = False, inline: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: compile a function with numba on first call, without the GIL and cached on disk.

    Args:
        parallel: ``numba.prange`` loops run on as many threads as torch uses. Such a kernel is called from Python only.
        inline: Substitute the function into its callers (helpers whose call would keep a loop from being vectorised).

    Returns:
        A decorator. The result takes NumPy arrays and scalars and can, unless ``parallel``, be called by other kernels.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        import numba

        options: dict[str, Any] = {"inline": "always"} if inline else {}
        dispatcher = numba.njit(parallel=parallel, nogil=True, **options)(function)
        cache = _disk_cache(function)
        if cache is not None:
            dispatcher._cache = cache
            dispatcher.compile = _then_given_back(dispatcher.compile, cache)
        return _with_torch_threads(dispatcher) if parallel else dispatcher

    return decorate


def _then_given_back(compile_: Callable[..., Any], cache: Any) -> Callable[..., Any]:
    def call(signature: Any) -> Any:
        try:
            return compile_(signature)
        finally:
            cache.alone.give_back()

    return call


def _with_torch_threads(dispatcher: Callable[..., Any]) -> Callable[..., Any]:
    """Run a parallel kernel on torch's number of threads: workers that share a machine set only that one."""
    import numba

    most = numba.config.NUMBA_NUM_THREADS

    @functools.wraps(dispatcher)
    def call(*args: Any) -> Any:
        threads = torch.get_num_threads()  # before numba is asked anything: see below
        before, wanted = numba.get_num_threads(), min(threads, most)
        if wanted != before:
            numba.set_num_threads(wanted)
        try:
            return dispatcher(*args)
        finally:
            if wanted != before:
                numba.set_num_threads(before)
            # numba's thread pool, once started, sets OpenMP, which torch and DGL use too, to every core. On a machine
            # that workers share, each operator then waits for threads without a core, ten times as long.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)

    return call


def row_tasks(indptr: np.ndarray, num_threads: int) -> np.ndarray:
    """Split rows into tasks with about equal numbers of rows plus entries.

    Args:
        indptr: ``(n + 1,)`` offsets, int32 or int64.
        num_threads: Threads that will share the tasks; each gets a few.

    Returns:
        ``(tasks + 1,)`` int64 row bounds from 0 to n, ascending.
    """
    num_rows, first = len(indptr) - 1, int(indptr[0])
    num_tasks = _TASKS_PER_THREAD * num_threads
    total = int(indptr[-1]) - first + num_rows
    targets = [total * task // num_tasks for task in range(1, num_tasks)]
    # a search that asks for a few offsets: arithmetic on all of them would take a millisecond of a call
    inner = [bisect_left(range(num_rows), target, key=lambda row: int(indptr[row]) - first + row) for target in targets]
    return np.array([0, *inner, num_rows], dtype=np.int64)


def cache_folder(function: Callable[..., Any]) -> Path:
    """Folder for the machine code of ``function``; its name changes with any source file the code may depend on."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(inspect.getfile(function)).resolve().parent
    roots = (_KERNELS,) if folder.is_relative_to(_KERNELS) else (_KERNELS, folder)
    return Path(base) / "nugnn" / f"kernels-{_fingerprint(roots)}"


@functools.cache
def _fingerprint(roots: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for name in ("nugnn", "numba", "llvmlite", "numpy"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a source tree on sys.path, not installed
            version = "unknown"
        digest.update(f"{name}={version};".encode())
    digest.update(f"python={platform.python_version()};".encode())
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{path.relative_to(root)}:{len(source)}:".encode())
            digest.update(source)
    return digest.hexdigest()[:24]


def _writable(folder: Path) -> bool:
    try:
        # Only the user may write here: the files are machine code that will be executed.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _logger.info("kernels are compiled without a disk cache: %s", error)
        return False
    return True


def _disk_cache(function: Callable[..., Any]) -> Any:
    """Numba's per-function cache, pointed at our folder; None where it cannot be used."""
    try:
        folder = cache_folder(function)
        if not _writable(folder):
            return None
        return _cache_class()(function)
    except (
        ImportError,
        AttributeError,
        OSError,
        RuntimeError,
        TypeError,
    ) as error:  # numba's caching is not public API
        _logger.info("kernels are compiled without a disk cache: %s", error)
        return None


@functools.cache
def _cache_class() -> Any:
    from numba.core import caching

    class Locator(caching._CacheLocator):  # type: ignore[misc]
        def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
            self._py_file = py_file
            self._folder = cache_folder(py_func)
            self._name = f"{py_func.__module__}-{py_func.__code__.co_firstlineno}"

        def get_cache_path(self) -> str:
            return str(self._folder)

        def get_source_stamp(self) -> str:
            return self._folder.name

        def get_disambiguator(self) -> str:
            return self._name

        @classmethod
        def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Any:
            return cls(py_func, py_file)

    class Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = (Locator,)

    class Cache(caching.FunctionCache):  # type: ignore[misc]
        _impl_class = Implementation

        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__(function)
            lock = Path(self.cache_path) / f"{self._impl.filename_base}.lock"
            self.alone = OneProcess(lock, _PATIENCE_SECONDS)

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            """What is on disk; None, and no other process compiles it meanwhile, where nothing is."""
            found = self._load(sig, target_context)
            if found is None and self.alone.take():
                found = self._load(sig, target_context)  # another process may have made it meanwhile
            return found

        def _load(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)
            except Exception as error:  # a damaged file must cost a compilation, not the run
                _logger.info("ignoring a damaged kernel cache in %s: %s", self.cache_path, error)
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except Exception as error:  # full disk, folder removed meanwhile, damaged index
                _logger.info("a compiled kernel could not be kept in %s: %s", self.cache_path, error)

    return Cache
