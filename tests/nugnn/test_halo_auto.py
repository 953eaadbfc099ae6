"""Training under ``halo_wire auto``: the plan is what travels, the same on all ranks, kept by checkpoints."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph, make_parts
from mocked_link import SECONDS_PER_BYTE, mocked_link
from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.comm import halo_auto
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_auto import FIRST_STEPS, AutoBits
from nugnn.comm.halo_bits import CANDIDATES, HaloBits
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.halo_wire import HaloWire
from nugnn.config import TrainConfig
from nugnn.fit_options import FitOptions
from nugnn.graph_run import fit_arguments
from nugnn.history import History
from nugnn.model_on_shard import ModelOnShard
from nugnn.models import GNN
from nugnn.options import ConfigError
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore
from shard_calls import make_data, shard_of
from trainers import graph_trainer

WIDTH = 24


def _model(name: str = "sage") -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"norm": "batch", "dropout": 0.4} if name != "gat" else {"heads": 2, "dropout": 0.4}
    return GNN(name, NUM_FEATURES, NUM_CLASSES, hidden=WIDTH, layers=3, **options).float()


def _trainer(ranks: Ranks, model: nn.Module, **options: Any) -> Trainer:
    data = make_graph(dtype=torch.float32)
    graph = shard_of(ranks, data, make_parts(data, ranks.world_size, "metis_unequal"))
    ids = graph.global_node_ids
    splits = {"train": data.train_nodes, "val": data.val_nodes, "test": data.test_nodes}
    rows = {split: torch.isin(ids, nodes).nonzero().flatten() for split, nodes in splits.items()}
    make_optimizer = functools.partial(torch.optim.Adam, lr=0.02, eps=1e-5)
    how: dict[str, Any] = {"halo_wire": "auto"} | options
    return graph_trainer(
        model, graph, rows, seed=7, make_optimizer=lambda module: make_optimizer(module.parameters()), **how
    )


def _bits(trainer: Trainer) -> AutoBits:
    bits = trainer.family.net.halo_bits
    assert bits is not None
    return bits


def _is_equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def _planned(ranks: Ranks, how: dict[str, Any]) -> dict[str, Any]:
    with mocked_link(ranks, slow=4.0):
        trainer = _trainer(ranks, _model("gin"), halo_target="0.02s", **how)
        plain = _trainer(ranks, _model("gin"), halo_wire="fp32", **how)
        for _ in range(FIRST_STEPS):
            trainer.train_epoch()
            plain.train_epoch()
    found: dict[str, Any] = {"first steps are exact": _is_equal(trainer.model, plain.model)}
    family, bits = trainer.family, _bits(trainer)
    plan, before = bits.bits, family.report()["halo"]
    said = [family.news(), family.news()]
    trainer.train_epoch()
    after = family.report()["halo"]
    found["is another run now"] = not _is_equal(trainer.model, plain.model)
    found["said once"] = said[0] == plan.as_text() and said[1] is None
    halo_plan, row_bytes = family.graph.index.plan, functools.partial(HaloWire.row_bytes, dtype=torch.float32)
    seconds = 0.0
    for direction in ("forward", "gradient"):
        expected = 0
        for rows_name, wires in plan.wires.items():
            if rows_name.startswith("gradient") != (direction == "gradient"):
                continue
            splits = halo_plan.send_splits if direction == "forward" else halo_plan.recv_splits
            for peer, count in enumerate(splits):
                sent = count * row_bytes(HaloWire(wires[ranks.rank][peer]), num_values=WIDTH)
                expected += sent
                seconds += sent * SECONDS_PER_BYTE * (4 if 0 in (peer, ranks.rank) else 1)
        found[f"{direction} bytes"] = after[f"{direction}_bytes"] - before[f"{direction}_bytes"] == expected
    seconds = float(ranks.sum_(torch.tensor([seconds], dtype=torch.float64)))
    found["predicted"] = abs(seconds / plan.seconds - 1) < 1e-5  # the codec's time, which is next to nothing
    found["within the target"] = plan.seconds <= plan.target_seconds < plan.plain_seconds
    found["reported"] = after["wire"] == "auto" and after["plan"]["seconds"] == plan.seconds
    exact = ModelOnShard(trainer.model, family.graph, seed=7, overlap=how.get("overlap", "auto"))
    found["evaluation is exact"] = torch.equal(trainer.predict_all(), exact.predict_all(trainer.num_steps))
    state = torch.cat([value.flatten().double() for value in trainer.model.state_dict().values()])
    return {"found": found, "plan": asdict(plan), "state": state}


@pytest.mark.parametrize(
    ("num_parts", "how"),
    [(2, {"activations": "recompute"}), (3, {"overlap": "on"}), (3, {"halo_mode": "stale"})],
    ids=str,
)
def test_the_plan_is_what_travels(ranks: Any, num_parts: int, how: dict[str, Any]) -> None:
    first, *others = ranks.run(num_parts, _planned, how)
    for rank in (first, *others):
        assert all(rank["found"].values()), rank["found"]
    assert all(rank["plan"] == first["plan"] and torch.equal(rank["state"], first["state"]) for rank in others)
    assert len({wire for rows in first["plan"]["wires"].values() for row in rows for wire in row} - {"fp32"}) > 1


def _on_a_fast_link(ranks: Ranks) -> list[bool]:
    with mocked_link(ranks, seconds_per_byte=0.0):
        trainer, plain = (
            _trainer(ranks, _model("gat"), **how) for how in ({"halo_target": "0s"}, {"halo_wire": "fp32"})
        )
        for _ in range(FIRST_STEPS + 1):
            trainer.train_epoch()
            plain.train_epoch()
    text = _bits(trainer).bits.as_text()
    return [_is_equal(trainer.model, plain.model), bool(_bits(trainer).bits.wires), "auto: fp32;" in text]


def test_on_a_fast_link_rows_travel_as_they_are(ranks: Any) -> None:
    assert ranks.run(2, _on_a_fast_link) == [[True] * 3] * 2


# -- what arrives --------------------------------------------------------------------------------------------------


def _by_peer(ranks: Ranks, dtype: torch.dtype, mode: str) -> list[bool]:
    """Rows and gradients by peer are those of a run in which all rows travel by that peer's wire."""
    graph = shard_of(ranks, make_data())
    plan, num_ranks = graph.index.plan, ranks.world_size
    x = torch.randn(plan.num_inner, 13, generator=torch.Generator().manual_seed(ranks.rank)).to(dtype)
    weight = torch.randn(plan.num_local, 13, generator=torch.Generator().manual_seed(9 + ranks.rank)).to(dtype)

    def read(wires: tuple[tuple[str, ...], ...] | None, wire: str = "auto") -> tuple[Tensor, Tensor]:
        how: dict[str, Any] = {} if wires is None else {"halo_mode": mode}
        interceptor = nugnn.intercept(nn.Identity(), graph, seed=1, halo_wire=wire, **how)
        if wires is not None:
            bits = interceptor.find(HaloHandler).bits
            assert bits is not None
            name = "halo of source rows of a user function"
            bits.bits = HaloBits({name: wires, f"gradient of {name}": wires})
        rows = x.clone().requires_grad_()
        with interceptor.step(3):
            local = nugnn.halo(rows, graph)
            (local * weight).sum().backward()
        assert rows.grad is not None
        return local.detach(), rows.grad

    mixed = tuple(tuple(CANDIDATES[(2 * a + b) % 5] for b in range(num_ranks)) for a in range(num_ranks))
    alone = {wire: read(None, wire) for wire in CANDIDATES}
    found = []
    for wire in CANDIDATES:
        same = read(((wire,) * num_ranks,) * num_ranks)
        found.append(all(torch.equal(a, b) for a, b in zip(same, alone[wire], strict=True)))
    got, _ = read(mixed)
    parts = got[plan.num_inner :].split(plan.recv_splits)
    for peer, part in enumerate(parts):
        wire = mixed[peer][ranks.rank]
        found.append(torch.equal(part, alone[wire][0][plan.num_inner :].split(plan.recv_splits)[peer]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_each_peer_s_rows_arrive_as_by_its_wire_alone(ranks: Any, dtype: torch.dtype) -> None:
    mode = "stale" if dtype is torch.float64 else "exact"
    assert ranks.run(3, _by_peer, dtype, mode) == [[True] * 8] * 3


# -- runs ----------------------------------------------------------------------------------------------------------


def _resumed(ranks: Ranks, folder: Path, how: dict[str, Any]) -> list[bool]:
    with mocked_link(ranks), mock.patch.object(halo_auto, "STEPS_BETWEEN_PLANS", 2):
        made = functools.partial(_trainer, halo_target="0.01s", **how)
        whole, first = (made(ranks, _model()) for _ in range(2))
        for trainer in (whole, first):
            for _ in range(FIRST_STEPS + 1):
                trainer.train_epoch()
        shared, own = capture(first, History())
        where = write_checkpoint(folder, ranks, epoch=4, shared=shared, own=own, identity={})
        second = made(ranks, _model())
        second.train_epoch()
        restore(second, open_checkpoint(where))
        planned = _bits(second).bits
    # nothing is measured any more, and another link would be noticed
    with mock.patch.object(halo_auto, "measured_speed"), mock.patch.object(halo_auto, "STEPS_BETWEEN_PLANS", 2):
        found = [planned == _bits(first).bits and not all(map(planned.is_plain, planned.wires))]
        for _ in range(2):
            whole.train_epoch()
            second.train_epoch()
            found += [_is_equal(whole.model, second.model), _bits(whole).bits == _bits(second).bits]
        return [*found, _bits(second).bits != planned]


@pytest.mark.parametrize("how", [{}, {"halo_mode": "stale", "overlap": "on"}], ids=str)
def test_a_resumed_run_goes_on_with_its_plan_in_the_same_bits(ranks: Any, tmp_path: Path, how: dict[str, Any]) -> None:
    assert ranks.run(3, _resumed, tmp_path, how) == [[True] * 6] * 3
    if not how:
        assert ranks.run(2, _moved, tmp_path) == [True] * 2


def _moved(ranks: Ranks, folder: Path) -> bool:
    """On another split everything is measured anew."""
    trainer = _trainer(ranks, _model())
    restore(trainer, open_checkpoint(next(folder.iterdir())))
    return _bits(trainer).bits == HaloBits() and _bits(trainer).state()["speed"] is None


def _left_out(ranks: Ranks) -> list[bool]:
    """A step that is left out, or whose rows are not finite, makes no plan; the next one does."""
    with mocked_link(ranks):
        trainer = _trainer(ranks, _model(), halo_target="0s")
        bits, seen = _bits(trainer), []
        for number in range(FIRST_STEPS + 2):
            with trainer.family.around(number):
                loss = trainer.family.loss(None)
                (loss * (torch.inf if number == FIRST_STEPS else 1.0)).backward()
            trainer.family.settle(is_good=number != FIRST_STEPS - 1)
            seen.append(bool(bits.bits.wires))
    return seen


def test_a_step_that_is_left_out_makes_no_plan(ranks: Any) -> None:
    assert ranks.run(2, _left_out) == [[False] * (FIRST_STEPS + 1) + [True]] * 2


def _own_loop(ranks: Ranks) -> list[bool]:
    graph, model = shard_of(ranks, make_data()), nn.Identity()
    interceptor = nugnn.intercept(model, graph, halo_wire="auto", halo_target="0s")
    handler = interceptor.find(HaloHandler)
    assert handler.bits is not None
    x = torch.randn(graph.num_nodes(), 20)
    found = []
    with mocked_link(ranks):
        for step in range(FIRST_STEPS + 1):
            with interceptor.step(step):
                nugnn.halo(x, graph)
            found.append(not handler.bits.bits.wires)
            model.eval()
            with interceptor.step(step):
                exact = nugnn.halo(x, graph)
            model.train()
    with nugnn.intercept(model, graph).step(0):
        return [*found[:-1], not found[-1], torch.equal(exact, nugnn.halo(x, graph))]


def test_own_loops_plan_when_the_next_step_begins(ranks: Any) -> None:
    assert ranks.run(2, _own_loop) == [[True] * (FIRST_STEPS + 2)] * 2


# -- options -------------------------------------------------------------------------------------------------------


def test_options() -> None:
    config = TrainConfig(dataset="digits", workers=2, halo_wire="auto", halo_target="50.0%")
    assert config.halo_target == "50%" and fit_arguments(config)["halo_target"] == "50%"
    assert FitOptions(halo_wire="auto", halo_target="0.10s").deciding()["halo_target"] == "0.1s"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"halo_target": "10"}, "--halo-target 10 is not allowed; allowed: a share of the computation such as 10%"),
        ({"halo_wire": "int8", "halo_target": "10%"}, "--halo-target 10%: halo_target has no effect on halo_wire int8"),
        ({"halo_mode": "sampled:0.5"}, "--halo-wire auto: halo_wire auto plans by the bytes of each pair of workers"),
        ({"halo_feedback": True}, "--halo-feedback has no effect on --halo-wire auto, only on int8, int4, int2"),
    ]
    for values, words in wrong:
        with pytest.raises(ConfigError) as caught:
            TrainConfig(**{"dataset": "digits", "halo_wire": "auto"} | values)
        assert words in str(caught.value)
    graph = shard_of(Ranks(), make_data())
    for values, words in [
        ({"halo_feedback": True}, "halo_wire is auto"),
        ({"halo_mode": "sampled:1"}, "one wire for all"),
    ]:
        with pytest.raises(ValueError, match=words):
            nugnn.intercept(nn.Identity(), graph, halo_wire="auto", **values)
        with pytest.raises(ValueError, match=words):
            nugnn.fit(nn.Identity(), make_graph(), workers=2, halo_wire="auto", **values)
    assert nugnn.intercept(nn.Identity(), graph, halo_wire="auto").find(HaloHandler).bits is None  # one rank
