"""Names by which samples are known, for all folders, told from those of graphs without loading torch."""

from __future__ import annotations

from typing import Literal, get_args

PublishedImages = Literal["mnist", "fashion-mnist", "cifar10"]
BUILT_IN_IMAGES = "digits-images"
NAMES: tuple[str, ...] = (BUILT_IN_IMAGES, *get_args(PublishedImages))
PATH_KINDS = ("imagefolder", "text", "csv")
"""Written ``KIND:PATH``."""
KNOWN = (*NAMES, *(f"{kind}:PATH" for kind in PATH_KINDS))
"""All of them, as they are written."""


def names_samples(spec: str) -> bool:
    """Whether ``spec`` names samples; case and ``-``/``_`` do not matter.

    >>> [names_samples(spec) for spec in ("MNIST", "text:reviews.tsv", "cora", "./mnist", "products-like:1000")]
    [True, True, False, False, False]
    """
    kind, colon, _ = spec.partition(":")
    name = kind.strip().lower().replace("_", "-")
    return name in PATH_KINDS if colon else name in NAMES
