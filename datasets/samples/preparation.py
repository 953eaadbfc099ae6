"""What `SampleData.save_preparation` wrote, read again: enough to make predictions on samples of one's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nugnn.datasets.samples.sample_data import Kind
from nugnn.datasets.samples.table_encoder import TableEncoder
from nugnn.datasets.samples.text_encoder import TextEncoder


@dataclass(frozen=True)
class SavedPreparation:
    """How samples became inputs, and what the outputs mean.

    Args:
        kind: Of the samples.
        class_names: One for each label.
        input_shape: Of an input.
        encoder: From raw texts or cells to inputs; None for images.
    """

    kind: Kind
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    encoder: TextEncoder | TableEncoder | None


def load_preparation(path: Path) -> SavedPreparation:
    """Read the file.

    Raises:
        ImportError: it is of texts, and the library ``tokenizers`` is not installed.
        ValueError: no such file, or it is not what nuGNN wrote.
    """
    try:
        content = json.loads(path.read_bytes())
        kind, names, shape = content["kind"], tuple(content["class_names"]), tuple(content["input_shape"])
        if kind not in get_args(Kind):
            raise ValueError(f"it is of the kind {kind!r}")
        encoder: TextEncoder | TableEncoder | None = None
        if kind == "text":
            encoder = TextEncoder.from_json(content["preparation"])
        elif kind == "table":
            encoder = TableEncoder.from_json(content["preparation"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no preparation of samples ({error}); train again to write one") from error
    return SavedPreparation(kind, names, shape, encoder)
