"""Makes ``.view/nugnn``, a tree of links in which the packages lie where they import from.

mypy and ``pytest --doctest-modules`` find packages by folder and cannot read setuptools' ``package-dir`` map, which
puts ``comm/`` at ``nugnn.comm``. In ``.view/nugnn/{cli.py, ..., comm -> ../../comm}`` the two agree.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path


def package_folders(root: Path) -> dict[str, str]:
    """Package name -> folder below ``root``, from ``[tool.setuptools.package-dir]``."""
    with open(root / "pyproject.toml", "rb") as file:
        folders: dict[str, str] = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    return folders


def make_link_tree(root: Path, view: Path) -> list[Path]:
    """Bring the links below ``view`` in line with the sources and return them; links to what is gone are removed."""
    wanted: dict[Path, Path] = {}
    for package, folder in package_folders(root).items():
        if "." in package:
            wanted[view / package.replace(".", "/")] = root / folder
        else:
            for source in (root / folder).iterdir():
                if source.name != "__pycache__":
                    wanted[view / package / source.name] = source
    for link in wanted:
        link.parent.mkdir(parents=True, exist_ok=True)
    for entry in view.glob("*/*"):
        if entry.is_symlink() and entry not in wanted:
            entry.unlink()
    for link, source in wanted.items():
        target = os.path.relpath(source, link.parent)
        if link.is_symlink() and os.readlink(link) == target:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return sorted(wanted)


if __name__ == "__main__":
    repository = Path(__file__).resolve().parent.parent
    make_link_tree(repository, repository / (sys.argv[1] if len(sys.argv) > 1 else ".view"))
