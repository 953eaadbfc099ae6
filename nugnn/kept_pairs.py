"""Predicted and measured seconds of runs, kept in the cache folder: a small file for each run, so that nobody waits.

Nothing is ever read, changed and written back: processes that keep runs at the same time lose none.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nugnn.datasets.whole_file import write_whole
from nugnn.machine_profiles import cache_base
from nugnn.planning.run_pairs import PairError, PredictionKind, RunPair, read_pair

MOST_OF_A_MODEL = 8
"""Runs of one model on one data set; the oldest go first: what a machine is used for besides changes."""
MOST = 512
"""Runs in all."""
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}-\d{20}-[0-9a-f]{8}\.json")


@dataclass(frozen=True)
class Kept:
    """What the folder holds.

    Args:
        pairs: Oldest first.
        ignored: Files that are no pair, or not that of their name.
    """

    pairs: tuple[RunPair, ...]
    ignored: tuple[Path, ...]

    @property
    def note(self) -> str:
        """A sentence on what was ignored; empty without any."""
        if not self.ignored:
            return ""
        one = len(self.ignored) == 1
        return (
            f"{len(self.ignored)} file{' is' if one else 's are'} no measured run of this version of nugnn, and "
            f"ignored: {self.ignored[0]}{'' if one else ', ...'}; nugnn calibration --forget removes what is kept"
        )


def pairs_folder() -> Path:
    """Beside profiles and operator times; may not exist."""
    return cache_base() / "measured-runs"


def keep_pair(pair: RunPair) -> Path:
    """Keep a run, and let go of the oldest ones beyond what is kept.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = pairs_folder()
    folder.mkdir(parents=True, exist_ok=True)
    whose = f"{pair.kind.key}-{pair.subject}"
    path = folder / f"{whose}-{time.time_ns():020d}-{secrets.token_hex(4)}.json"
    write_whole(path, lambda file: file.write(pair.to_json().encode()))
    every = _files(folder)
    own = [each for each in every if each.name.startswith(whose)]
    for old in {*own[:-MOST_OF_A_MODEL], *every[:-MOST]}:
        with contextlib.suppress(OSError):  # another process did, or nobody can
            old.unlink()
    return path


def kept_pairs(kind: PredictionKind | None = None) -> Kept:
    """What is kept of one kind of prediction, or of all; never fails."""
    pairs, ignored = list[RunPair](), list[Path]()
    folder = pairs_folder()
    for path in _files(folder) if kind is None else _files(folder, kind.key):
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise PairError(f"{path} is larger than any pair")
            pair = read_pair(path)
            if not path.name.startswith(f"{pair.kind.key}-{pair.subject}-"):
                raise PairError(f"{path} is a pair of another kind")
            pairs.append(pair)
        except (PairError, OSError):
            if path.exists():  # else another process has let go of it meanwhile
                ignored.append(path)
    if kind is None:
        ignored += [path for path in _entries(folder) if path.suffix == ".json" and not _NAME.fullmatch(path.name)]
    return Kept(tuple(pairs), tuple(ignored))


def num_of_other_versions(kind: PredictionKind) -> int:
    """How many kept runs would be of this kind, were it not for the versions that predicted them; never fails."""
    return sum(pair.kind != kind and pair.kind.is_but_for_versions(kind) for pair in kept_pairs().pairs)


def forget_pairs() -> int:
    """Remove all that is kept; how many files that were.

    Raises:
        OSError: The folder cannot be written.
    """
    found = [path for path in _entries(pairs_folder()) if path.suffix in (".json", ".unfinished")]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _files(folder: Path, key: str = "") -> Sequence[Path]:
    """Those with a pair's name, oldest first."""
    found = [path for path in _entries(folder) if path.name.startswith(key) and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name.split("-")[2])


def _entries(folder: Path) -> list[Path]:
    """Nothing where there is no such folder, or it cannot be read."""
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except OSError:
        return []
