"""The files around the code: lock, Makefile, CI script, link tree."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tomllib
from importlib import resources
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked_versions() -> dict[str, str]:
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_lock_satisfies_every_requirement() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    requirements = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    locked = locked_versions()
    for text in requirements + project["build-system"]["requires"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)], prereleases=True), text


def test_lock_holds_plain_exact_versions() -> None:
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)
    assert "torch==2.13.0" in lines


def test_make_train_is_the_documented_command() -> None:
    command = "nugnn train --dataset digits --workers 2 --shares 0.7,0.3 --out runs/digits"
    assert f"\t$(BIN)/{command}\n" in (ROOT / "Makefile").read_text()


def test_make_install_does_nothing_when_up_to_date(tmp_path: Path) -> None:
    """The stamp decides: newer than lock and pyproject.toml means no command but the stamp's own test."""
    for name in ("Makefile", "requirements-dev.lock", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    stamp = tmp_path / ".venv" / ".nugnn-installed"
    stamp.parent.mkdir()
    dry = ["make", "--no-print-directory", "--dry-run", "install"]
    fresh = subprocess.run(dry, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip install" in fresh.stdout
    stamp.touch()
    again = subprocess.run(dry, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip" not in again.stdout


def test_make_install_without_a_python_says_what_to_do(tmp_path: Path) -> None:
    for name in ("Makefile", "requirements-dev.lock", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    result = subprocess.run(["make", "install", "PYTHON="], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "needs Python 3.11 or 3.12" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_script_is_executable_and_valid_bash() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_link_tree_shows_packages_where_they_import_from(tmp_path: Path) -> None:
    link_tree = load_tool("link_tree")
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools.package-dir]\n"top" = "top"\n"top.part" = "part"\n')
    for name in ("top/__init__.py", "top/a.py", "part/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    view = tmp_path / ".view"
    link_tree.make_link_tree(tmp_path, view)
    assert sorted(path.name for path in (view / "top").iterdir()) == ["__init__.py", "a.py", "part"]
    assert (view / "top" / "part").resolve() == tmp_path / "part"
    (tmp_path / "top" / "a.py").rename(tmp_path / "top" / "b.py")
    link_tree.make_link_tree(tmp_path, view)
    assert sorted(path.name for path in (view / "top").iterdir()) == ["__init__.py", "b.py", "part"]


def test_recipes_are_package_data() -> None:
    names = [entry.name for entry in (resources.files("nugnn") / "recipes").iterdir()]
    assert "cora-gcn.yaml" in names and all(name.endswith(".yaml") for name in names)


def test_committed_files_name_no_machine_and_no_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Written in two pieces so that this file passes its own test.
    banned = re.compile("/wo" + "rk/|/ro" + "ot/|files.python" + "hosted|pypi" + ".org|--index" + "-url")
    found = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.suffix in {".npz", ".png", ".pt", ".zip", ".gz"} or not path.is_file():
            continue
        if banned.search(path.read_text(encoding="utf-8", errors="replace")):
            found.append(name)
    assert found == []
