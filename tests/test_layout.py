"""The rules of the folder layout, read from the sources: one-way imports, no bare names, every package listed."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "kernels": set(),
    "datasets": set(),
    "partition": {"kernels", "datasets"},
    "comm": {"kernels", "datasets"},
    "precision": {"kernels", "datasets"},
    "planning": {"kernels", "datasets", "partition", "comm", "precision"},
    "nugnn": {"kernels", "datasets", "partition", "comm", "precision", "planning"},
}
"""Folder -> the other folders it may know: kernels, datasets <- partition, comm, precision <- planning <- nugnn."""

OPEN_TO_ALL = {"nugnn._counted", "nugnn._dgl_compat", "nugnn._regular_file", "nugnn.sample_sets"}
"""Know no other module of the project. ``require_dgl`` is wanted wherever DGL is used. Readers say what is no file, and
so does the command line, before it loads torch and so before ``nugnn.datasets``; both know samples by their names. All
folders say how many there are of something."""


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """``(line, absolute module)`` of each import in ``source``, a module of ``package``, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")
                module = ".".join([*base[: len(base) - node.level + 1], *([module] if module else [])])
            if module == "nugnn":  # from nugnn import comm
                for alias in node.names:
                    yield node.lineno, f"nugnn.{alias.name}"
            else:
                yield node.lineno, module


def wrong_imports(source: str, folder: str, package: str) -> list[str]:
    """What in ``source`` breaks the rules of ``folder``, one line each."""
    problems = []
    for line, module in imported_modules(source, package):
        parts = module.split(".")
        if parts[0] in MAY_IMPORT and parts[0] != "nugnn":
            problems.append(f"{line}: {module}: write nugnn.{module}, the bare name is not installed")
        if parts[0] != "nugnn" or module in OPEN_TO_ALL:
            continue
        owner = parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "nugnn"
        if owner != folder and owner not in MAY_IMPORT[folder]:
            problems.append(f"{line}: {folder} may not import {module}")
    return problems


def package_of(path: Path, folder: str) -> str:
    """Dotted package of the module at ``path``."""
    inside = path.parent.relative_to(ROOT / folder).parts
    return ".".join(["nugnn", *([] if folder == "nugnn" else [folder]), *inside])


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder: str) -> None:
    problems = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for problem in wrong_imports(path.read_text(encoding="utf-8"), folder, package_of(path, folder)):
            problems.append(f"{path.relative_to(ROOT)}:{problem}")
    assert problems == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("kernels", "import nugnn.partition.shard"),
        ("kernels", "from nugnn import comm"),
        ("datasets", "def f():\n    from nugnn.kernels.spmm import spmm"),
        ("comm", "from nugnn.partition.book import PartitionBook"),
        ("partition", "from ..comm import groups"),
        ("precision", "from nugnn.trainer import Trainer"),
        ("precision", "from .. import trainer"),
        ("nugnn", "import kernels.spmm"),
    ],
)
def test_the_check_finds_each_kind_of_wrong_import(folder: str, source: str) -> None:
    package = "nugnn" if folder == "nugnn" else f"nugnn.{folder}"
    assert len(wrong_imports(source, folder, package)) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("kernels", "from nugnn._dgl_compat import require_dgl"),
        ("kernels", "from .spmm import spmm\nfrom nugnn.kernels.structure import Structure\nimport torch"),
        ("comm", "from nugnn.kernels.structure import Structure\nimport torch.distributed"),
        ("nugnn", "from nugnn.comm import groups\nfrom nugnn.config import TrainConfig\nfrom nugnn import cli"),
    ],
)
def test_the_check_accepts_right_imports(folder: str, source: str) -> None:
    package = "nugnn" if folder == "nugnn" else f"nugnn.{folder}"
    assert wrong_imports(source, folder, package) == []


def test_the_module_open_to_all_knows_no_other() -> None:
    source = (ROOT / "nugnn" / "_dgl_compat.py").read_text(encoding="utf-8")
    assert [module for _, module in imported_modules(source, "nugnn") if module.startswith("nugnn")] == []


def test_every_package_is_listed_for_the_wheel() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    present = {package_of(init, folder) for folder in MAY_IMPORT for init in (ROOT / folder).rglob("__init__.py")}
    assert set(listed) == present, "bring [tool.setuptools] packages in pyproject.toml in line with the folders"
