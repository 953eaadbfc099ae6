"""Parts that a data set already has, and those that are still to be drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nugnn.datasets.samples.division import TEST_FRACTION, VAL_FRACTION, Division, divide

PART_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
"""What folders, files and cells call a part."""


def joined(
    counts: Mapping[str, int], labels: np.ndarray, *, seed: int, val_fraction: float | None, test_fraction: float | None
) -> Division:
    """The division of samples that stand part after part.

    Without parts, val and test are drawn from all samples; with train and test, val is drawn from train; with train
    and val there is no test part.

    Args:
        counts: Samples of ``all`` alone, or of ``train`` and perhaps ``val`` and ``test``, in their order.
        labels: ``(n,)`` numbers of classes.
        seed: Of a draw.
        val_fraction: Of what val is drawn from, default 0.1; None where the data have a val part.
        test_fraction: Of all samples, default 0.2; None where the data have parts.

    Raises:
        ValueError: a fraction for a part that is not drawn.
    """
    if "val" in counts and val_fraction is not None:
        raise ValueError("the data have a val part of their own; leave --val-fraction out")
    if "all" not in counts and test_fraction is not None:
        raise ValueError("the data have parts of their own; leave --test-fraction out")
    ends = np.cumsum([0, *counts.values()])
    ids = {part: np.arange(ends[i], ends[i + 1]) for i, part in enumerate(counts)}
    val_drawn = VAL_FRACTION if val_fraction is None else val_fraction
    if "all" in counts:
        test_drawn = TEST_FRACTION if test_fraction is None else test_fraction
        return divide(labels, seed=seed, val_fraction=val_drawn, test_fraction=test_drawn)
    nothing = np.arange(0)
    if "val" in counts:
        return Division(ids["train"], ids["val"], ids.get("test", nothing))
    drawn = divide(labels[ids["train"]], seed=seed, val_fraction=val_drawn, test_fraction=0.0)
    return Division(ids["train"][drawn.train], ids["train"][drawn.val], ids.get("test", nothing))


def part_files(path: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """The files of a data set by part, in the order train, val, test; ``all`` for a file that stands alone.

    Args:
        path: A file, or a folder of files called as in `PART_NAMES`.
        suffixes: What the files' names may end in.

    Raises:
        ValueError: nothing is there, no training file, or two files for one part.
    """
    if path.is_file():
        return {"all": path}
    if not path.is_dir():
        raise ValueError(f"{path}: {'is no file or folder' if path.exists() else 'no such file or folder'}")
    found: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        stem = next((file.name[: -len(suffix)] for suffix in suffixes if file.name.lower().endswith(suffix)), None)
        part = PART_NAMES.get(stem.lower()) if stem is not None else None
        if part is not None:
            if part in found:
                raise ValueError(f"{path}: {found[part].name} and {file.name} are the same part; keep one")
            found[part] = file
    if "train" not in found:
        names = ", ".join(file.name for file in sorted(path.iterdir())) or "nothing"
        raise ValueError(
            f"{path}: train{suffixes[0]} is not in it, only {names!s:.200}; the parts are called train{suffixes[0]}, "
            f"val{suffixes[0]} (or dev) and test{suffixes[0]}; or name one file"
        )
    return {part: found[part] for part in ("train", "val", "test") if part in found}
