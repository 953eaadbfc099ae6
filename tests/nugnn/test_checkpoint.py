"""Checkpoints: nothing is lost whatever happens, and a resumed run ends where the uninterrupted one does."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn import checkpoint_tree
from nugnn.checkpoint import (
    CheckpointError,
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
    write_checkpoint,
)
from nugnn.checkpoint_tree import decode, encode
from nugnn.checkpointer import Checkpointer, CheckpointPlan
from nugnn.comm.groups import Ranks
from nugnn.config import TrainConfig
from nugnn.fingerprint import graph_facts, run_identity
from nugnn.fit import fit
from nugnn.fit_options import FitOptions
from nugnn.graph_part import GraphPart
from nugnn.history import Epoch, History
from nugnn.interrupt import FirstSignalAsks, Interrupted
from nugnn.models import GNN, WithNodeEmbedding
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.run import run_from_config
from nugnn.shard_graph import ShardGraph
from nugnn.train_rank import train_rank
from nugnn.trainer import Trainer
from nugnn.weights import load_weights, read_weights
from trainers import graph_trainer

NUGNN = Path(sys.executable).with_name("nugnn")

# float64 sums in another order on 61 nodes, as in test_fit: 61 eps = 1e-14 relative, four orders for what norms amplify
FLOAT64_BOUND = 1e-10


def make_model(**options: Any) -> GNN:
    torch.manual_seed(0)
    return GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=5, dropout=0.5, norm="batch", **options)


def small_fit(folder: Path | None = None, *, model: nn.Module | None = None, **options: Any) -> Any:
    return fit(
        make_model() if model is None else model,
        make_graph(dtype=torch.float32),
        checkpoint_folder=folder,
        **{"epochs": 9, "seed": 3} | options,
    )


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def scores(epochs: list[Epoch]) -> list[tuple[float, ...]]:
    return [(e.number, e.loss, e.train, e.val, e.test) for e in epochs]


class Stop(Exception):  # noqa: N818 - it stands for the end of the process
    pass


def stop_after(number: int) -> Callable[[Epoch], None]:
    """A run that ends in the middle of an epoch, as far as its checkpoints can tell."""

    def on_epoch(epoch: Epoch) -> None:
        if epoch.number > number:
            raise Stop

    return on_epoch


# -- resuming in one process: every bit ----------------------------------------------------------------------------

_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(
        [{"params": [p], "lr": 0.01 * (1 + i)} for i, p in enumerate(m.parameters())], betas=(0.8, 0.99)
    ),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, lr_decay=0.1),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = small_fit(make_optimizer=_OPTIMIZERS[name])
    with pytest.raises(Stop):
        small_fit(tmp_path, make_optimizer=_OPTIMIZERS[name], checkpoint_every=2, on_epoch=stop_after(5))
    resumed = small_fit(tmp_path, make_optimizer=_OPTIMIZERS[name], resume=True)
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())
    assert torch.equal(whole.logits, resumed.logits)
    assert scores(whole.history) == scores(resumed.history) and whole.best.number == resumed.best.number


_SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: schedules.StepLR(o, 2, 0.5),
    "multi step": lambda o: schedules.MultiStepLR(o, [3, 6]),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 9),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, 2),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=4), schedules.ExponentialLR(o, 0.9)], milestones=[4]
    ),
}


@pytest.mark.parametrize("name", _SCHEDULES)
def test_every_schedule_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"make_optimizer": _OPTIMIZERS["adam"], "make_scheduler": _SCHEDULES[name]}
    whole = small_fit(**options)
    assert scores(whole.history) != scores(small_fit(make_optimizer=_OPTIMIZERS["adam"]).history), "no schedule ran"
    with pytest.raises(Stop):
        small_fit(tmp_path, checkpoint_every=1, on_epoch=stop_after(5), **options)
    resumed = small_fit(tmp_path, resume=True, **options)
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())
    assert scores(whole.history) == scores(resumed.history)


@pytest.mark.parametrize("stop", range(1, 9))
def test_any_epoch_will_do_and_early_stopping_remembers(stop: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 40, "patience": 9, "evaluate_every": 2}
    whole = small_fit(**options)
    assert 10 < len(whole.history) < 40, "patience has to end the run for this to mean something"
    with pytest.raises(Stop):
        small_fit(tmp_path, checkpoint_every=1, on_epoch=stop_after(stop), **options)
    resumed = small_fit(tmp_path, resume=True, **options)
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())
    # NaN where not evaluated: compare as text
    assert str(scores(whole.history)) == str(scores(resumed.history)) and whole.best.number == resumed.best.number
    again = small_fit(tmp_path, resume=True, **options)
    assert str(scores(again.history)) == str(scores(whole.history)), "a finished run has nothing to train"
    assert torch.equal(again.logits, whole.logits)


class Counting(nn.Module):
    """Draws from torch's generator and counts in a buffer that ``state_dict`` leaves out."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.tied = self.inner.layers[0]

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(graph, x * (1 + 0.01 * self.calls + 0.01 * torch.rand(1)))  # type: ignore[no-any-return]


def test_random_state_and_buffers_that_are_not_in_the_state_come_back(tmp_path: Path) -> None:
    torch.manual_seed(7)
    start = torch.get_rng_state()
    model = Counting()
    torch.set_rng_state(start)
    whole = small_fit(model=model)
    torch.set_rng_state(start)
    with pytest.raises(Stop):
        small_fit(tmp_path, model=model, checkpoint_every=3, on_epoch=stop_after(7))
    torch.manual_seed(99)
    resumed = small_fit(tmp_path, model=model, resume=True)
    assert scores(whole.history) == scores(resumed.history)
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())


def test_more_epochs_than_planned_before(tmp_path: Path) -> None:
    small_fit(tmp_path, epochs=4)
    resumed = small_fit(tmp_path, epochs=9, resume=True)
    whole = small_fit(epochs=9)
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())
    with pytest.raises(ValueError, match="written after epoch 9, but only 5 epochs are asked for"):
        small_fit(tmp_path, epochs=5, resume=True)


def test_times_add_up_over_both_halves(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        small_fit(tmp_path, checkpoint_every=5, on_epoch=stop_after(7))
    written, _ = newest_checkpoint(tmp_path)
    assert written is not None
    before = written.read_shared()
    resumed = small_fit(tmp_path, resume=True)
    later = sum(e.seconds["epoch"] + e.seconds["evaluate"] for e in resumed.history[5:])
    after = open_checkpoint(list_checkpoints(tmp_path)[0]).read_shared()
    assert after["elapsed_seconds"] == pytest.approx(before["elapsed_seconds"] + later, rel=1e-3)
    assert [e.seconds for e in resumed.history[:5]] == [
        dict(zip(("epoch", "compute", "halo", "sync", "evaluate"), row, strict=True))
        for row in written.read_rank(0)["seconds"].tolist()
    ]
    assert resumed.time_to_best_seconds <= after["elapsed_seconds"]


# -- over ranks ----------------------------------------------------------------------------------------------------


def _run_rank(
    ranks: Ranks, folder: Path, how: str, shares: list[float], epochs: int, stop: int | None, resume: bool
) -> Any:
    data = make_graph(features=False)
    torch.manual_seed(0)
    inner = GNN("sage", 6, NUM_CLASSES, hidden=5, dropout=0.5)
    model = WithNodeEmbedding(data.num_nodes, 6, inner).double()
    parts = partition_nodes(data.num_nodes, data.src, data.dst, shares, method=how, seed=3)  # type: ignore[arg-type]
    options = FitOptions(epochs=epochs, seed=3)
    newest, _ = newest_checkpoint(folder) if resume else (None, [])
    plan = CheckpointPlan(
        folder=folder,
        every=3,
        identity=run_identity(model, graph_facts(data), options),
        resume_from=None if newest is None else newest.folder,
    )
    seen: list[int] = []
    outcome = train_rank(
        GraphPart(lambda ranks: build_shard(data, parts, ranks.rank)),
        ranks,
        model,
        options,
        lambda epoch: seen.append(epoch.number),
        checkpoints=plan,
        asked_to_stop=lambda: stop is not None and ranks.rank == 0 and len(seen) >= stop,
    )
    return outcome


def test_resume_on_the_same_split_and_on_others_with_node_embeddings(ranks: Any, tmp_path: Path) -> None:
    """Bit for bit on the same one, to rounding on 1, 2, 3 and 5 ranks and other shares."""
    shares = [0.6, 0.3, 0.1]
    whole = ranks.run(3, _run_rank, tmp_path / "whole", "metis", shares, 8, None, False)
    stopped = ranks.run(3, _run_rank, tmp_path / "run", "metis", shares, 8, 4, False)
    assert [outcome for outcome in stopped] == [{"interrupted_after": [4, 0]}] * 3, "all stop at the same epoch"
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["epoch-00000004", "epoch-00000003"]
    weights = read_weights(tmp_path / "run", which="last")
    assert weights["embedding.weight"].shape == (61, 6) and weights["embedding.weight"].dtype == torch.float64

    for number, (how, others) in enumerate(
        [("metis", shares), ("metis", [1.0]), ("metis", [1.0, 2.0]), ("random", shares), ("random", [1.0] * 5)]
    ):
        folder = tmp_path / f"resumed-{number}"
        shutil.copytree(tmp_path / "run", folder)
        resumed = ranks.run(len(others), _run_rank, folder, how, others, 8, None, True)
        expected, state = whole[0]["state"], resumed[0]["state"]
        if number == 0:
            assert same_bits(expected, state) and torch.equal(whole[0]["logits"], resumed[0]["logits"])
            assert [e["loss"] for e in whole[0]["epochs"]] == [e["loss"] for e in resumed[0]["epochs"]]
        assert resumed[0]["best"]["number"] == whole[0]["best"]["number"]
        for name, value in expected.items():
            assert float((value - state[name]).abs().max()) <= FLOAT64_BOUND * float(value.abs().max()), name
        # the newest checkpoint of the resumed run holds what the rank pool gathered
        last = read_weights(folder)
        assert all(torch.equal(last[name], state[name]) for name in state)


# -- on disk: whole or not at all ----------------------------------------------------------------------------------

_plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)
_tensors = st.sampled_from(
    [torch.tensor(1.5), torch.zeros(0, 3), torch.arange(4), torch.tensor([True]), torch.ones(2, 2)[:, :1]]
)
_trees = st.recursive(
    _plain | _tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab.", max_size=3) | st.integers(0, 9), inner, max_size=3)
        | st.just(Counter({3: 2}))
    ),
    max_leaves=12,
)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b


@given(tree=_trees)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    tensors: dict[str, Tensor] = {}
    plain = json.loads(json.dumps(encode(tree, "", tensors)))
    assert _equal(decode(plain, tensors.__getitem__), tree)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": {"b": object()}}, "a.b is a object"),
        ({"a": {1.5: 1}}, "has the key 1.5"),
        ({"a": torch.eye(2).to_sparse()}, "layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_kept_is_named(tree: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode(tree, "", {})


def put(folder: Path, epoch: int) -> Path:
    tree = {"epoch": epoch, "model": {"w": torch.full((3,), float(epoch))}, "best_model": {}, "best_epoch": 0}
    own = {"node_ids": torch.arange(3), "model": {}, "best_model": {}, "random_state": torch.zeros(4)}
    return write_checkpoint(folder, Ranks(), epoch=epoch, shared=tree, own=own, identity={"settings": {}})


def test_two_are_kept(tmp_path: Path) -> None:
    for epoch in (1, 5, 9, 123456789):
        put(tmp_path, epoch)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["epoch-00000009", "epoch-123456789"]
    put(tmp_path, 10)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch-00000010", "epoch-00000009"], (
        "what is newer than the one just written was not fit to go on from"
    )


class Crash(BaseException):
    """The process is gone: nothing that follows is run, no handler sees it."""


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Callable[[], int]]]:
    """``crash_at(n)`` lets the n-th operation on the disk raise; before it is done for even n, after it for odd n."""

    def arrange(when: int) -> Callable[[], int]:
        counted = [0]

        def wrapped(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                counted[0] += 1
                if counted[0] == when // 2 + 1 and when % 2 == 0:
                    raise Crash
                value = original(*args, **kwargs)
                if counted[0] == when // 2 + 1:
                    raise Crash
                return value

            return call

        monkeypatch.undo()
        for owner, name in [
            (checkpoint_tree, "save_file"),
            (os, "fsync"),
            (os, "unlink"),
            (os, "rmdir"),
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "write_text"),
        ]:
            monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
        return lambda: counted[0]

    yield arrange
    monkeypatch.undo()


def test_a_crash_at_any_moment_leaves_an_intact_checkpoint(
    tmp_path: Path, crash_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a crash that an earlier one has left its remains for."""
    folder = tmp_path / "checkpoint"
    put(folder, 1)
    put(folder, 2)
    intact, epoch, when, crashes = 2, 3, 0, 0
    while True:
        crash_at(when)
        try:
            put(folder, epoch)
            crashed = False
        except Crash:
            crashed = True
        monkeypatch.undo()
        newest, problems = newest_checkpoint(folder)
        assert newest is not None and problems == [] and newest.epoch in (intact, epoch), when
        assert newest.read_shared()["model"]["w"].tolist() == [float(newest.epoch)] * 3
        intact = newest.epoch
        if not crashed:
            break
        crashes, when, epoch = crashes + 1, when + 1, intact + 1
    assert crashes > 20, "fewer operations than a checkpoint takes"
    put(folder, epoch + 1)
    assert len(list(folder.iterdir())) == 2, "remains of crashes are gone"


def _damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("this is not a checkpoint\n")
    elif how == "gone":
        path.unlink()
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


@pytest.mark.parametrize("how", ["cut", "empty", "text", "gone", "flipped"])
@pytest.mark.parametrize("name", ["checkpoint.json", "shared.safetensors", "rank-00000.safetensors"])
def test_checkpoint_01_damage_is_named_and_the_newest_intact_one_offered(name: str, how: str, tmp_path: Path) -> None:
    good, bad = put(tmp_path, 4), put(tmp_path, 8)
    if (name, how) == ("checkpoint.json", "flipped"):
        pytest.skip("its own content has no hash; what it says is checked against the files")
    _damage(bad / name, how)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(bad)
    text = str(caught.value)
    assert str(bad) in text and name in text and f"newest intact checkpoint beside it is {good}" in text
    assert any(word in text for word in ("incomplete", "damaged", "not a checkpoint", "cannot be read"))
    newest, problems = newest_checkpoint(tmp_path)
    assert newest is not None and newest.folder == good and len(problems) == 1 and name in problems[0]
    _damage(good / name, how)
    with pytest.raises(CheckpointError, match="holds no intact checkpoint"):
        newest_checkpoint(tmp_path)


def _truncated_archive() -> bytes:
    buffer = io.BytesIO()
    torch.save({"step": 3, "model": {"w": torch.arange(12.0)}}, buffer)
    return buffer.getvalue()[: len(buffer.getvalue()) // 2]


@pytest.mark.parametrize(
    ("name", "content"),
    [("truncated.pt", _truncated_archive()), ("empty.pt", b""), ("text.pt", b"this is not a checkpoint\n")],
)
def test_checkpoint_01_files_of_other_kinds(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is incomplete or not a safetensors file") as caught:
        read_weights(path)
    assert "intact" not in str(caught.value)
    good = put(tmp_path / "checkpoint", 6)
    with pytest.raises(CheckpointError, match=f"the newest intact checkpoint is {good}"):
        read_weights(path)
    assert read_weights(good)["w"].tolist() == [6.0] * 3


@pytest.mark.parametrize(
    "meta",
    [
        [],
        {"schema_version": 2},
        {"schema_version": 1},
        {"schema_version": 1, "epoch": True, "num_parts": 1, "files": {}, "identity": {}, "versions": {}},
        {"schema_version": 1, "epoch": 1, "num_parts": 0, "files": {}, "identity": {}, "versions": {}},
        {"schema_version": 1, "epoch": 1, "num_parts": 1, "files": {"../x": {}}, "identity": {}, "versions": {}},
        {"schema_version": 1, "epoch": 1, "num_parts": 1, "files": [], "identity": {}, "versions": {}},
    ],
    ids=str,
)
def test_a_description_that_makes_no_sense_is_refused(meta: Any, tmp_path: Path) -> None:
    folder = tmp_path / "epoch-00000001"
    folder.mkdir()
    (folder / "checkpoint.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        open_checkpoint(folder)


def test_a_full_disk_is_said_and_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_tree, "save_file", full)
    with pytest.raises(OSError, match=r"epoch-00000002.*cannot be written: No space left on device \(\d+ MiB free"):
        put(tmp_path, 2)
    newest, problems = newest_checkpoint(tmp_path)
    assert newest is not None and (newest.epoch, problems) == (1, [])
    assert len(list(tmp_path.iterdir())) == 1, "a full disk needs its room back"


# -- the other cases -----------------------------------------------------------------------------------------------


def test_checkpoint_02_loads_to_the_cpu_whatever_the_default_device(tmp_path: Path) -> None:
    """No tensor is made on another device; a machine without that device can read it (``meta`` stands for it here)."""
    small_fit(tmp_path, epochs=3)
    newest, _ = newest_checkpoint(tmp_path)
    assert newest is not None
    with torch.device("meta"):
        trees = [newest.read_shared(), newest.read_rank(0), read_weights(tmp_path)]
    found: list[Tensor] = []

    def collect(tree: Any) -> None:
        if isinstance(tree, Tensor):
            found.append(tree)
        for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
            collect(item)

    collect(trees)
    assert len(found) > 20 and all(tensor.device.type == "cpu" for tensor in found)
    files = [path for path in newest.folder.iterdir() if path.suffix == ".safetensors"]
    assert not any(b"cuda" in path.read_bytes() for path in files), "a device has no place in a file"
    model = make_model()
    load_weights(model, tmp_path)
    assert all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_03_wrappers_do_not_count_in_either_direction(tmp_path: Path) -> None:
    source = make_model()
    for p in source.parameters():
        nn.init.normal_(p)
    wrapped = {
        "compiled": torch.compile(copy.deepcopy(source)),
        "parallel": nn.DataParallel(copy.deepcopy(source)),
        "layer compiled": copy.deepcopy(source),
        "plain": copy.deepcopy(source),
    }
    wrapped["layer compiled"].layers[0] = torch.compile(wrapped["layer compiled"].layers[0])
    for name, model in wrapped.items():
        path = tmp_path / f"{name}.safetensors"
        save_file(dict(model.state_dict()), path)
        for other in wrapped.values():
            target = copy.deepcopy(other)
            with torch.no_grad():
                for p in target.parameters():
                    p.zero_()
            load_weights(target, path)
            values = zip(source.state_dict().values(), target.state_dict().values(), strict=True)
            assert all(torch.equal(a, b) for a, b in values)


def test_checkpoint_03_every_name_that_does_not_fit_is_listed() -> None:
    model = make_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first, second, *_ = state
    removed = state.pop(first)
    state["head.weight"] = removed
    state[second] = torch.zeros(7, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, state, source="old.safetensors")
    text = str(caught.value)
    assert text.startswith("old.safetensors do not fit GNN")
    assert f"missing: {first}" in text and "unexpected: head.weight" in text
    assert f"reshaped: {second} ((7, 2), the model has {tuple(before[second].shape)})" in text
    assert same_bits(before, dict(model.state_dict())), "a refused load changes nothing"


def test_checkpoint_03_loading_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no name fits at all"):
        load_weights(make_model(), {})
    with pytest.raises(CheckpointError, match="no name fits at all"):
        load_weights(nn.Identity(), {})
    save_file({}, tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="holds no tensor"):
        read_weights(tmp_path / "none.safetensors")


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_checkpoint_04_evaluation_changes_nothing_that_is_saved_or_trained(tmp_path: Path) -> None:
    data = make_graph(dtype=torch.float32)
    parts = partition_nodes(data.num_nodes, data.src, data.dst, [1.0])

    def trainer() -> Trainer:
        shard = build_shard(data, parts, 0)
        rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
        return graph_trainer(make_model(), ShardGraph(shard, Ranks()), rows, seed=3)

    def save(name: str) -> dict[str, bytes]:
        checkpointer = Checkpointer(one, CheckpointPlan(folder=tmp_path / name, identity={}), lambda: False)
        checkpointer.write(history)
        return _files(tmp_path / name)

    one, other = trainer(), trainer()
    history = one.fit(3)
    modes = [m.training for m in one.model.modules()]
    a = save("a")
    one.evaluate()
    one.predict_all()
    b = save("b")
    assert a == b and len(a) == 2
    assert [m.training for m in one.model.modules()] == modes
    later = [one.train_epoch() for _ in range(3)]
    assert [other.train_epoch() for _ in range(6)][3:] == later


# -- another run is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"evaluate_every": 2}, "evaluate_every was 1, is 2"),
        ({"settings": {"hidden": 9}}, "hidden was 5, is 9"),
        ({"class_weights": torch.ones(NUM_CLASSES)}, "class_weights was not set, is "),
        ({"lr": 0.5}, "optimizer group 0: lr was 0.01, is 0.5"),
        ({"make_optimizer": _OPTIMIZERS["sgd"]}, "optimizer was Adam, is SGD"),
        ({"make_scheduler": _SCHEDULES["step"]}, "schedule was not set, is StepLR"),
        ({"model": GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=7, norm="batch")}, "model: reshaped: layers.0"),
        ({"model": GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=5, layers=3, norm="batch")}, "missing: "),
        ({"model": GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=5, dropout=0.1, norm="batch")}, "p=0.5"),
        ({"model": make_model().double()}, "reshaped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_run_is_refused_by_name_old_and_new_value(change: Any, words: str, tmp_path: Path) -> None:
    small_fit(tmp_path, settings={"hidden": 5}, epochs=2)
    before = _files(tmp_path)
    with pytest.raises(CheckpointError, match="is of another run") as caught:
        small_fit(tmp_path, resume=True, **{"settings": {"hidden": 5}} | change)
    assert words in str(caught.value) and "without --resume" in str(caught.value)
    assert _files(tmp_path) == before


def test_another_graph_is_refused(tmp_path: Path) -> None:
    small_fit(tmp_path, epochs=2)
    for other, words in [
        (make_graph(1, dtype=torch.float32), "graph: content was"),
        (make_graph(num_nodes=70), "was 61, is 70"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            fit(make_model(), other, checkpoint_folder=tmp_path, resume=True, seed=3)


def test_a_folder_is_needed() -> None:
    for options in ({"resume": True}, {"checkpoint_every": 2}):
        with pytest.raises(ValueError, match="need a checkpoint_folder"):
            small_fit(None, **options)


# -- when ----------------------------------------------------------------------------------------------------------


def test_every_five_minutes_when_no_number_of_epochs_was_given(tmp_path: Path) -> None:
    """Less often when writing takes long: at most a twentieth of the time."""
    now, written = [0.0], []

    class Slow(Checkpointer):
        def write(self, history: History) -> None:
            written.append(now[0])
            super().write(history)

    data = make_graph(dtype=torch.float32)
    shard = build_shard(data, partition_nodes(data.num_nodes, data.src, data.dst, [1.0]), 0)
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    trainer = graph_trainer(make_model(), ShardGraph(shard, Ranks()), rows)

    def clock() -> float:
        now[0] += 10.0  # between begin and end of a write: 10 s, so 200 s would be enough
        return now[0]

    checkpointer = Slow(trainer, CheckpointPlan(folder=tmp_path, identity={}), lambda: False, clock=clock)
    trainer.fit(100, between_epochs=checkpointer.between_epochs)
    gaps = [b - a for a, b in itertools.pairwise(written)]
    assert written[0] >= 300 and gaps and all(300 <= gap <= 340 for gap in gaps)


# -- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_epoch_and_a_second_one_at_once(number: int, tmp_path: Path) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    whole = small_fit()

    def send(epoch: Epoch) -> None:
        if epoch.number == 4:
            os.kill(os.getpid(), number)

    stages: list[str] = []
    with pytest.raises(Interrupted, match="interrupted after epoch 4 of 9") as caught:
        small_fit(tmp_path, on_epoch=send, on_stage=stages.append)
    assert caught.value.epoch == 4 and stages == ["train", "stop"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch-00000004"]
    assert same_bits(small_fit(tmp_path, resume=True).model.state_dict(), whole.model.state_dict())
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before

    asked: list[bool] = []
    with pytest.raises(KeyboardInterrupt), FirstSignalAsks(lambda: asked.append(True), lambda: None) as signals:
        signals.arm()
        os.kill(os.getpid(), number)
        assert asked == [True]
        os.kill(os.getpid(), number)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_in_the_last_epoch_changes_nothing(tmp_path: Path) -> None:
    result = small_fit(tmp_path, on_epoch=lambda e: os.kill(os.getpid(), signal.SIGINT) if e.number == 9 else None)
    assert len(result.history) == 9


# -- the command ---------------------------------------------------------------------------------------------------


def _config(out: Path, **options: Any) -> TrainConfig:
    return TrainConfig(**{"dataset": "digits", "hidden": 8, "epochs": 6, "out": str(out)} | options)


def test_the_run_folder_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines after the checkpoint's epoch are dropped, the totals are of the whole run."""
    whole = run_from_config(_config(tmp_path / "whole"))
    events: list[dict[str, Any]] = []

    def killed(event: dict[str, Any]) -> None:
        events.append(event)
        if event["kind"] == "epoch" and event["epoch"] == 5:
            raise Stop

    out = tmp_path / "run"
    with pytest.raises(Stop):
        run_from_config(_config(out, checkpoint_every=3, resume=True), killed)
    assert any("no checkpoint in" in e.get("text", "") and "starting with epoch 1" in e["text"] for e in events)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 5
    first = (out / "metrics.jsonl").read_text().splitlines()[:3]
    events.clear()
    resumed = run_from_config(_config(out, resume=True), events.append)
    assert [e["epoch"] for e in events if e["kind"] == "epoch"] == [4, 5, 6]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert lines[:3] == first and [json.loads(line)["number"] for line in lines] == [1, 2, 3, 4, 5, 6]
    own = ("epoch_seconds", "time_to_best_seconds", "peak_memory_bytes", "ranks")
    assert {k: v for k, v in resumed.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert TrainConfig.from_file(out / "config.yaml") == _config(out)


def test_a_refused_resume_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    run_from_config(_config(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"dropout was 0\.5, is 0\.1"):
        run_from_config(_config(tmp_path, resume=True, dropout=0.1))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_replacing_an_unfinished_run_is_said(tmp_path: Path) -> None:
    run_from_config(_config(tmp_path))
    events: list[dict[str, Any]] = []
    run_from_config(_config(tmp_path, epochs=2), events.append)
    assert not [e for e in events if e["kind"] == "note"], "a finished run is replaced without a word"
    (tmp_path / "result.json").unlink()
    run_from_config(_config(tmp_path, epochs=1), events.append)
    (note,) = [e["text"] for e in events if e["kind"] == "note"]
    assert "unfinished run, which is replaced; --resume would go on" in note
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoint")] == ["epoch-00000001"]


def _command(out: Path, *more: str) -> list[str]:
    common = ("train", "--dataset", "digits", "--hidden", "8", "--workers", "2", "--shares", "0.7,0.3")
    return [str(NUGNN), *common, "--out", str(out), *more]


def _wait_for_line(run: subprocess.Popen[str], out: Path, number: int) -> None:
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < number:
        assert run.poll() is None and time.monotonic() < deadline, "the epoch did not come"
        time.sleep(0.01)


@pytest.mark.slow
def test_kill_9_and_ctrl_c_over_two_workers_then_resume_to_the_same_bits(tmp_path: Path) -> None:
    epochs = ("--epochs", "400")
    subprocess.run(_command(tmp_path / "whole", *epochs), check=True, capture_output=True)
    out = tmp_path / "run"
    first = subprocess.Popen(
        _command(out, *epochs, "--checkpoint-every", "3"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    _wait_for_line(first, out, 10)
    psutil.Process(first.pid).children()[1].kill()
    _, error = first.communicate(timeout=120)
    assert first.returncode == 3 and error.endswith(
        f"go on with: nugnn train --config {out / 'config.yaml'} --resume\n"
    )

    second = subprocess.Popen(
        _command(out, *epochs, "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    _wait_for_line(second, out, 20)
    second.send_signal(signal.SIGINT)
    _, error = second.communicate(timeout=120)
    assert second.returncode == 130, error
    assert error.startswith("nugnn: interrupted after epoch ") and error.count("\n") == 1
    assert f"go on with: nugnn train --config {out / 'config.yaml'} --resume" in error

    done = subprocess.run(
        [str(NUGNN), "train", "--config", str(out / "config.yaml"), "--resume"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert same_bits(load_file(tmp_path / "whole" / "model.safetensors"), load_file(out / "model.safetensors"))
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 400


def test_checkpoint_01_resume_without_an_intact_one_is_exit_2_without_a_traceback(tmp_path: Path) -> None:
    folder = put(tmp_path / "checkpoint", 4)
    _damage(folder / "shared.safetensors", "cut")
    done = subprocess.run(_command(tmp_path, "--resume"), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "shared.safetensors is incomplete" in done.stderr and "train without --resume to start anew" in done.stderr
