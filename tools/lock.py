"""Prints requirements-dev.lock: the exact versions of everything in the running environment that nuGNN needs."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

_HEADER = """\
# Exact versions for development and CI, Linux x86_64, Python 3.11; written by `make lock`, not by hand.
# Python 3.12: pip resolves the same versions, all from wheels.
# torch carries no build tag: pip takes a CPU or a CUDA build, whichever its index offers. The libraries that a CUDA
# build needs are pinned by torch itself.
"""


def required_distributions(root: Path) -> set[str]:
    """Names of the installed distributions reachable from pyproject.toml (run time, dev group, build)."""
    with open(root / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    wanted += project["build-system"]["requires"]
    open_requirements = [Requirement(text) for text in wanted]
    found: set[str] = set()
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonical(requirement.name)
        if name in found or not applies(requirement):
            continue
        found.add(name)
        needs = importlib.metadata.requires(name) or []
        open_requirements += [Requirement(text) for text in needs]
    return {name for name in found if not re.match(r"(nvidia-|cuda-|triton$)", name)}


def applies(requirement: Requirement) -> bool:
    """Whether the requirement holds here, with no extra asked for."""
    return requirement.marker is None or requirement.marker.evaluate({**default_environment(), "extra": ""})


def canonical(name: str) -> str:
    """The name as package indexes compare it: lower case, one dash for each run of ``-_.``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Print the lock."""
    sys.stdout.write(_HEADER)
    for name in sorted(required_distributions(Path(__file__).resolve().parent.parent)):
        version = importlib.metadata.version(name).split("+", maxsplit=1)[0]
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
