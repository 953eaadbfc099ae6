"""Texts with labels as token numbers: one TSV file, or a folder with ``train.tsv`` and the other parts beside it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch

from nugnn.datasets.samples.class_labels import class_numbers, refuse_unseen
from nugnn.datasets.samples.parts import joined, part_files
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.datasets.samples.tensor_samples import TensorSamples
from nugnn.datasets.samples.text_encoder import TextEncoder
from nugnn.datasets.samples.tsv import read_tsv

_SUFFIXES = (".tsv", ".tsv.gz")


def load_text(
    path: Path,
    *,
    vocabulary_size: int | None,
    max_length: int | None,
    tokens: str | None,
    seed: int,
    val_fraction: float | None,
    test_fraction: float | None,
) -> SampleData:
    """``PATH.tsv``, divided by a draw, or a folder with ``train.tsv`` and perhaps ``val.tsv`` or ``dev.tsv`` and
    ``test.tsv``. Tokens are learned from the training texts alone.

    Args:
        path: The file or folder.
        vocabulary_size: Of the tokenizer, at most; see `TextEncoder.learn`.
        max_length: Tokens of a sample; see `TextEncoder.learn`.
        tokens: ``words``, ``pairs`` or ``auto``, the default; see `TextEncoder.learn`.
        seed: Of the division, where one is drawn.
        val_fraction: See `parts.joined`.
        test_fraction: See `parts.joined`.

    Returns:
        ``x`` is int64 ``(max_length,)``, 0 behind the end; kept as int32.

    Raises:
        ImportError: the library ``tokenizers`` is not installed.
        ValueError: see `read_tsv`, `class_numbers`; or a part has a label that no training sample has.
    """
    read = {part: read_tsv(file) for part, file in part_files(path, _SUFFIXES).items()}
    places = [(samples, number) for samples in read.values() for number in range(len(samples.texts))]
    texts = [samples.texts[number] for samples, number in places]

    def place(sample: int) -> str:
        samples, number = places[sample]
        return samples.place(number)

    labels, class_names = class_numbers(list(itertools.chain(*(samples.labels for samples in read.values()))), place)
    counts = {part: len(samples.texts) for part, samples in read.items()}
    division = joined(counts, labels, seed=seed, val_fraction=val_fraction, test_fraction=test_fraction)
    refuse_unseen(labels, division.train, class_names, place)
    encoder = TextEncoder.learn(
        [texts[sample] for sample in division.train],
        vocabulary_size=vocabulary_size,
        max_length=max_length,
        tokens=tokens or "auto",
    )
    train, val, test = (_samples(encoder, texts, labels, ids) for ids in division)
    return SampleData(
        name=path.name.removesuffix(".gz").removesuffix(".tsv"),
        kind="text",
        train=train,
        val=val,
        test=test,
        num_classes=len(class_names),
        class_names=class_names,
        input_shape=(encoder.max_length,),
        vocabulary_size=encoder.vocabulary_size,
        preparation=encoder,
    )


def _samples(encoder: TextEncoder, texts: list[str], labels: np.ndarray, ids: np.ndarray) -> TensorSamples:
    x = encoder.encode([texts[sample] for sample in ids])
    return TensorSamples(x, torch.from_numpy(labels[ids]), dtype=torch.int64)
