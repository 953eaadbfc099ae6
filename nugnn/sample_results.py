"""A finished run on samples, opened again: how good its best model is, and what it says of the test samples."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from pathlib import Path

import numpy as np
from torch import Tensor

from nugnn.checkpoint import CheckpointError
from nugnn.comm.groups import Ranks
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.datasets.whole_file import write_whole
from nugnn.devices import devices_of
from nugnn.sample_config import SampleConfig
from nugnn.sample_family import SampleFamily
from nugnn.sample_run import build_model, prepare
from nugnn.weights import load_weights


def opened(folder: Path, config: SampleConfig, device: str) -> tuple[SampleData, SampleFamily]:
    """The samples of a run, and its best model on them, in this process.

    Raises:
        ValueError: The samples are no longer those it was trained on, or the weights do not fit the model.
    """
    data = prepare(config.replaced(predictions=False))
    with tempfile.TemporaryDirectory() as name:
        data.save_preparation(Path(name) / "now.json")
        now = json.loads((Path(name) / "now.json").read_bytes())
    path = folder / "preparation.json"
    if not path.is_file() or json.loads(path.read_bytes()) != now:
        raise ValueError(
            f"{config.dataset} no longer gives what {folder} was trained on: its classes, sizes or vocabulary are not "
            f"those of {path.name}; put the files of that time back, or train again"
        )
    model = build_model(config, data)
    try:
        load_weights(model, folder / "model.safetensors")
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    ranks = Ranks(device=devices_of(device, 1)[0][0])
    assert config.batch_size is not None
    family = SampleFamily(
        model.to(ranks.device),
        data.train,
        ranks,
        sizes=(config.batch_size,),
        val=data.val,
        test=data.test,
        metric=data.metric,
        precision=config.precision,
        num_data_workers=config.data_workers,
    )
    return data, family


def write_classes(path: Path, values: Tensor, data: SampleData) -> None:
    """Write a row for each test sample, in their order; the file appears in one piece.

    Args:
        path: ``.npy``: the array. ``.csv``: column ``sample`` (from 0), then ``class``, by its name, or one column for
            each class.
        values: ``(n,)`` classes, or ``(n, C)`` outputs.
        data: Whose test samples they are.

    Raises:
        ValueError: The file cannot be written.
    """
    text = io.StringIO()
    if path.suffix == ".csv":
        writer = csv.writer(text, lineterminator="\n")
        names = data.class_names
        writer.writerow(["sample", *(["class"] if values.dim() == 1 else names)])
        for number, row in enumerate(values.tolist()):
            writer.writerow([number, *([names[row]] if values.dim() == 1 else row)])
    try:
        if path.suffix == ".csv":
            write_whole(path, lambda file: file.write(text.getvalue().encode()))
        else:
            write_whole(path, lambda file: np.save(file, values.numpy()))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from error
