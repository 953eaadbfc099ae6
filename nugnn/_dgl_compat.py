"""Makes ``import dgl`` work with a torch that DGL ships no binaries for, without importing either.

DGL 2.1 (the newest on PyPI) has binaries of ``dgl.graphbolt`` and ``dgl.sparse`` for torch 2.0 to 2.2, and ``import
dgl`` needs the first. Neither is needed for graphs, message passing and ``dgl.nn``. An import hook, put in place by
``import nugnn``, therefore answers ``import dgl.graphbolt`` with a package whose every name is an error that says what
is missing, and ``import dgl.sparse`` with an error that names the replacement; a DGL that can load its own is left
alone. The hook acts when DGL is imported, so a failed ``import dgl`` before ``import nugnn`` does no harm.

DGL imports pandas for a few data sets; here that waits for the first use, sparing each worker memory and time. Its
``adj_external`` and ``inc`` make a sparse tensor without saying whether torch should check it, about which newer torch
warns in the user's name; here they say it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_BINARY_NAMES = {
    "graphbolt": {"linux": "libgraphbolt_pytorch_{}.so", "darwin": "libgraphbolt_pytorch_{}.dylib"},
    "sparse": {"linux": "libdgl_sparse_pytorch_{}.so", "darwin": "libdgl_sparse_pytorch_{}.dylib"},
}
_BINARY_FOLDERS = {"graphbolt": "graphbolt", "sparse": "dgl_sparse"}

_IMPORT_PANDAS = ("dgl.data.movielens", "dgl.data.lrgb")  # those that ``import dgl`` loads
_MAKES_SPARSE = "dgl.backend.pytorch.tensor"

_SPARSE_REPLACEMENT = (
    "Instead of g.adj() use g.adj_external(scipy_fmt='csr') for a SciPy matrix or g.adj_tensors('coo' | 'csr' | 'csc') "
    "for its tensors, and torch.sparse for sparse algebra."
)
_GRAPHBOLT_REPLACEMENT = "Graphs, message passing and dgl.nn work without it; sampling is in dgl.dataloading."


def install() -> None:
    """Put the import hook first on ``sys.meta_path``; a second call changes nothing."""
    if not any(isinstance(finder, _DglFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DglFinder())


def require_dgl() -> ModuleType:
    """Import DGL and return it, with the PyTorch backend.

    Raises:
        ImportError: DGL is not installed, cannot be imported, or was loaded with another backend; the text says what to
            do.
    """
    install()
    try:
        import dgl
    except ModuleNotFoundError as error:
        if error.name == "dgl":
            message = f"DGL is not installed for {sys.executable}; install it with: pip install 'dgl>=2.1'"
        else:
            message = f"DGL is installed but needs the missing package {error.name!r}: pip install {error.name}"
        raise ImportError(message) from error
    backend: str = dgl.backend.backend_name
    if backend != "pytorch":
        raise ImportError(
            f"DGL was loaded with the backend {backend!r}, nugnn needs 'pytorch': unset DGLBACKEND, or set "
            "DGLBACKEND=pytorch, before DGL is imported"
        )
    module: ModuleType = dgl
    return module


class _DglFinder(MetaPathFinder):
    """Stands before the ordinary finders and answers only for ``dgl`` and its modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "dgl":
            _prepare_import()
        elif not fullname.startswith("dgl."):
            return None
        part = fullname.split(".")[1] if "." in fullname else ""
        if part in _BINARY_FOLDERS:
            problem = _missing_binary(part, path)
            if problem and fullname == "dgl.graphbolt":
                return ModuleSpec(fullname, _StubLoader(problem), is_package=True)
            if problem:
                raise ImportError(problem, name=fullname)
        return _quiet_spec(fullname, path)


class _GraphboltStub(ModuleType):
    """Stands for ``dgl.graphbolt``: every public name is an AttributeError that says why."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, doc=problem)
        self.__nugnn_problem__ = problem

    def __getattr__(self, name: str) -> Any:
        # AttributeError, not ImportError: pickle and inspect ask every loaded module for names and expect no other.
        raise AttributeError(f"dgl.graphbolt.{name}: {self.__dict__['__nugnn_problem__']}", name=name, obj=self)


class _StubLoader(Loader):
    def __init__(self, problem: str) -> None:
        self._problem = problem

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _GraphboltStub(spec.name, self._problem)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _QuietLoader(SourceFileLoader):
    """Compiles DGL's sources without their invalid-escape warnings, which ``-W error`` would turn into SyntaxError."""

    def source_to_code(  # type: ignore[override]
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> CodeType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code: CodeType = super().source_to_code(data, path, _optimize=_optimize)
            return code

    def exec_module(self, module: ModuleType) -> None:
        with _pandas_on_first_use() if module.__name__ in _IMPORT_PANDAS else contextlib.nullcontext():
            super().exec_module(module)
        if module.__name__ == _MAKES_SPARSE:
            module.__dict__["sparse_matrix"] = _outspoken_sparse_matrix(module.__dict__["sparse_matrix"])


def _outspoken_sparse_matrix(plain: Callable[..., Any]) -> Callable[..., Any]:
    """DGL's ``sparse_matrix`` that hands torch its own current setting of invariant checks, which torch warns about
    when nobody names it. Filtering the warning instead would not be safe where ranks are threads.
    """

    @functools.wraps(plain)
    def sparse_matrix(data: Any, index: tuple[Any, ...], shape: tuple[int, int], force_format: bool = False) -> Any:
        if index[0] != "coo":
            return plain(data, index, shape, force_format)
        import torch

        is_checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()
        return torch.sparse_coo_tensor(index[1], data, shape, check_invariants=is_checked), None

    return sparse_matrix


class _PandasOnFirstUse(ModuleType):
    """Stands for pandas in a module that imports it at its top; any name of it imports the real one."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get("pandas") is self:
            del sys.modules["pandas"]
        return getattr(importlib.import_module("pandas"), name)


@contextlib.contextmanager
def _pandas_on_first_use() -> Iterator[None]:
    if "pandas" in sys.modules:
        yield
        return
    # The import system asks a module in sys.modules for its __spec__; a ModuleType has one, None, so nothing is loaded.
    stand_in = sys.modules["pandas"] = _PandasOnFirstUse("pandas")
    try:
        yield
    finally:
        if sys.modules.get("pandas") is stand_in:
            del sys.modules["pandas"]


def _quiet_spec(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = _QuietLoader(spec.loader.name, spec.loader.path)
    return spec


def _prepare_import() -> None:
    """Choose the backend, and drop what an earlier, failed ``import dgl`` left behind."""
    if os.environ.get("DGLBACKEND") not in ("pytorch", "tensorflow", "mxnet"):
        os.environ["DGLBACKEND"] = "pytorch"  # otherwise DGL prints about it and writes ~/.dgl/config.json
    if "dgl" not in sys.modules:
        # Submodules that did load would be reused without becoming attributes of the new dgl module.
        for name in [name for name in sys.modules if name.startswith("dgl.")]:
            del sys.modules[name]


def _missing_binary(part: str, path: Sequence[str] | None) -> str | None:
    """Why the installed DGL cannot load ``dgl.<part>`` under this torch; None when it can."""
    names = _BINARY_NAMES[part]
    if sys.platform not in names:
        return None
    torch_version = _torch_version()
    binary = names[sys.platform].format(torch_version)
    if any((folder / _BINARY_FOLDERS[part] / binary).exists() for folder in _library_folders(path)):
        if part == "graphbolt" and not _has_datapipes():
            return (
                "dgl.graphbolt needs torchdata.datapipes, which the installed torchdata (0.10 or newer) lacks. "
                + _GRAPHBOLT_REPLACEMENT
            )
        return None
    replacement = _SPARSE_REPLACEMENT if part == "sparse" else _GRAPHBOLT_REPLACEMENT
    return (
        f"dgl.{part} is not available: DGL {_version('dgl')} has no binary of it for torch {torch_version} ({binary}). "
        + replacement
    )


def _library_folders(path: Sequence[str] | None) -> list[Path]:
    """Where DGL looks for its libraries: beside the one it has loaded, else in its package."""
    info = sys.modules.get("dgl._ffi.libinfo")
    if info is not None:
        return [Path(info.find_lib_path()[0]).parent]
    dgl = sys.modules.get("dgl")
    roots = list(getattr(dgl, "__path__", path or []))
    return [Path(root) for root in roots]


def _has_datapipes() -> bool:
    try:
        return importlib.util.find_spec("torchdata.datapipes") is not None
    except (ImportError, ValueError):
        return False


def _torch_version() -> str:
    torch = sys.modules.get("torch")
    version = str(torch.__version__) if hasattr(torch, "__version__") else _version("torch")  # type: ignore[union-attr]
    return version.split("+", maxsplit=1)[0]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"
