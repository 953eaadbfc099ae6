"""Names by which samples are known, told from those of graphs without loading torch."""

from __future__ import annotations

IMAGE_SETS = ("digits-images", "mnist", "fashion-mnist", "cifar10")
PATH_KINDS = ("imagefolder", "text", "csv")
"""Written ``KIND:PATH``."""


def names_samples(spec: str) -> bool:
    """Whether ``spec`` names samples; case and ``-``/``_`` do not matter.

    >>> [names_samples(spec) for spec in ("MNIST", "text:reviews.tsv", "cora", "./mnist", "products-like:1000")]
    [True, True, False, False, False]
    """
    kind, colon, _ = spec.partition(":")
    name = kind.strip().lower().replace("_", "-")
    return name in PATH_KINDS if colon else name in IMAGE_SETS
