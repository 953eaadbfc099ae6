"""`nugnn.fit` and ``nugnn train`` for processes that ``torchrun`` started and that have joined."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nugnn.checkpointer import CheckpointPlan
from nugnn.comm.groups import Ranks, join_ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.devices import own_device
from nugnn.failure import named
from nugnn.fingerprint import run_identity
from nugnn.fit_options import FitOptions, checked_options
from nugnn.fit_result import FitResult, result_of
from nugnn.inductive import visible_in_training
from nugnn.resume import from_where, raise_if_interrupted
from nugnn.seam import install
from nugnn.shares import checked_shares, own_shard
from nugnn.train_shard import train_shard

_COLLECTIVE_SECONDS = 7 * 24 * 3600.0
"""The processes' own watch judges; see `nugnn.torchrun`."""
_CHECKPOINTING = ("checkpoint_folder", "checkpoint_every", "resume", "settings", "on_begin", "on_note")


def _gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Every rank's ``text`` on every rank, in rank order; a collective call."""
    rows = ranks.gather_rows(torch.tensor(list(text.encode()), dtype=torch.uint8))
    return [bytes(row.tolist()).decode() for row in rows]


def fit_joined(model: Any, data: Any, ranks: Ranks, **options: Any) -> FitResult | None:
    """`nugnn.fit.fit` for processes that have joined already; every one calls it with the same model and data.

    Rank 0 partitions and tells the others; each cuts its own part out of ``data``.

    Args:
        model: As for `fit`.
        data: As for `fit`; the same on every rank.
        ranks: From `joined`.
        **options: As for `fit`; ``workers``, ``timeout`` and ``log_folder`` are for the process that starts others and
            are not used, ``cache_folder`` has to be None. Checkpoints need a folder that all processes share; where
            they do not, none is written, and asking for some is an error.

    Returns:
        The result on rank 0, None elsewhere.

    Raises:
        ValueError: Options or data do not fit.
    """
    install()
    data = data if isinstance(data, GraphData) else GraphData.from_dgl(data)
    shares, method = options.pop("shares", None), options.pop("partitioner", "metis")
    order = options.pop("order", "auto")
    check = options.pop("check", True)
    device = own_device(options.pop("device", "auto"))
    if device != ranks.device:
        ranks = join_ranks(_COLLECTIVE_SECONDS, ranks.pulse, device)
    on_epoch, stage = options.pop("on_epoch", None), options.pop("on_stage", None) or (lambda _: None)
    if options.pop("cache_folder", None) is not None:
        raise ValueError("--partition-cache is not for processes started by torchrun: each cuts its part out itself")
    checkpointing = {name: options.pop(name, None) for name in _CHECKPOINTING}
    for name in ("workers", "timeout", "log_folder"):
        options.pop(name, None)
    inductive = bool(options.pop("inductive", False))
    checkpointing["settings"] = {"inductive": inductive} | dict(checkpointing["settings"] or {})
    fit_options = checked_options(options, data)
    seen = visible_in_training(model, data) if inductive else data
    weights = checked_shares(shares, ranks.world_size, seen, "training nodes" if inductive else "nodes")
    plan = _checkpoints(model, data, ranks, fit_options, checkpointing)
    if ranks.rank == 0 and check:
        from nugnn.check import check_model

        stage("check")
        check_model(model, data, loss=fit_options.loss, regularizer=fit_options.regularizer)
    if ranks.rank == 0:
        stage("partition")
    shards, notes = [], []  # lists, so that nobody keeps a shard that training has turned into a graph
    for graph in [seen, data] if inductive else [data]:
        shard, said = own_shard(graph, ranks, weights, method=method, order=order)
        shards.append(shard)
        notes.append(said)
    del shard
    if ranks.rank == 0:
        stage("train")
    outcome = train_shard(
        lambda: shards.pop(0),
        ranks,
        copy.deepcopy(model),
        fit_options,
        on_epoch if ranks.rank == 0 else None,
        checkpoints=plan,
        make_evaluation_shard=(lambda: shards.pop(0)) if inductive else None,
    )
    raise_if_interrupted(outcome, fit_options, plan)
    reports = [json.loads(text) for text in _gather_texts(ranks, json.dumps(outcome["report"]))]
    if ranks.rank != 0:
        return None
    return result_of(model, [outcome, *({"report": report} for report in reports[1:])], notes[0])


def _checkpoints(
    model: Any, data: Any, ranks: Ranks, options: FitOptions, given: dict[str, Any]
) -> CheckpointPlan | None:
    """Where every process writes its checkpoints and which one to go on from, as rank 0 decides; a collective call."""
    begin = given["on_begin"] or (lambda _: None)
    folder = given["checkpoint_folder"]
    if folder is None:
        begin([])
        return None
    folder = Path(folder).resolve()
    mark = ""
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".shared-", dir=folder)
        os.close(descriptor)
        mark = Path(path).name
    mark = _gather_texts(ranks, mark)[0]
    seen = [answer == "yes" for answer in _gather_texts(ranks, "yes" if (folder / mark).exists() else "no")]
    if ranks.rank == 0:
        (folder / mark).unlink()
    if not all(seen):
        blind = named([rank for rank, sees in enumerate(seen) if not sees])
        if given["resume"] or given["checkpoint_every"] is not None:
            raise ValueError(f"{folder} is not shared: {blind} cannot see it; name one with --out that all hosts share")
        if ranks.rank == 0:
            (given["on_note"] or print)(f"no checkpoints: {folder} is not shared, {blind} cannot see it")
            begin([])
        return None
    plan = CheckpointPlan(
        folder=folder, every=given["checkpoint_every"], identity=run_identity(model, data, options, given["settings"])
    )
    chosen = ""
    if ranks.rank == 0:
        plan, before = from_where(plan, options, bool(given["resume"]), given["on_note"] or print)
        begin(before)
        chosen = "" if plan.resume_from is None else plan.resume_from.name
    chosen = _gather_texts(ranks, chosen)[0]
    return replace(plan, resume_from=folder / chosen if chosen else None)
