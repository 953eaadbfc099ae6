"""Changes to a graph before training, as pure functions from ``GraphData`` to ``GraphData``.

Order of edges after a change, on which edge ids and so dropout masks depend: edges that stay keep their order, new ones
follow at the end. A function with nothing to do returns the graph it was given.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.sparse import csr_matrix

SelfLoops = Literal["keep", "add", "remove"]
FeatureNorm = Literal["none", "row", "standard"]

_log = logging.getLogger("nugnn.datasets")


def make_undirected(data: GraphData) -> GraphData:
    """Add the missing reverse of every edge and merge parallel edges.

    Of parallel edges the first stays, with its edge data; a self-loop is its own reverse, so it is there once. Added
    edges come last, in the order of the edges that they reverse, each with a copy of that edge's data.
    """
    if data.num_edges == 0:
        return data
    src = data.src.to(torch.int64).numpy()
    dst = data.dst.to(torch.int64).numpy()
    keys = src * data.num_nodes + dst  # below 2^63 up to 3.0e9 nodes
    kept_keys, first = np.unique(keys, return_index=True)
    backward_keys = dst[first] * data.num_nodes + src[first]
    place = np.searchsorted(kept_keys, backward_keys).clip(max=len(kept_keys) - 1)
    without_reverse = kept_keys[place] != backward_keys
    kept = torch.from_numpy(np.sort(first))
    reversed_ = torch.from_numpy(np.sort(first[without_reverse]))
    if len(kept) == data.num_edges and len(reversed_) == 0:
        return data
    return dataclasses.replace(
        data,
        src=torch.cat([data.src[kept], data.dst[reversed_]]),
        dst=torch.cat([data.dst[kept], data.src[reversed_]]),
        edge_data={name: torch.cat([x[kept], x[reversed_]]) for name, x in data.edge_data.items()},
    )


def self_loops(data: GraphData, mode: SelfLoops) -> GraphData:
    """Keep, complete or remove self-loops.

    Args:
        data: Any graph; not modified.
        mode: ``"keep"`` changes nothing. ``"remove"`` drops every self-loop. ``"add"`` gives each node exactly one:
            the first existing one stays with its edge data, further ones of the same node are dropped, missing ones
            follow at the end in order of their nodes. A new loop has ``"weight"`` 1; its other edge data are 0.
    """
    _check_choice("self-loops", mode, SelfLoops)
    if mode == "keep":
        return data
    loops = (data.src == data.dst).nonzero().squeeze(1)
    stays = torch.ones(data.num_edges, dtype=torch.bool)
    stays[loops] = False
    if mode == "remove":
        return _edited(data, stays, torch.empty(0, dtype=data.src.dtype))
    nodes_with_loop, first = np.unique(data.src[loops].numpy(), return_index=True)
    stays[loops[torch.from_numpy(first)]] = True
    lacking = torch.ones(data.num_nodes, dtype=torch.bool)
    lacking[torch.from_numpy(nodes_with_loop).to(torch.int64)] = False
    return _edited(data, stays, lacking.nonzero().squeeze(1).to(data.src.dtype))


def normalize_features(data: GraphData, mode: FeatureNorm) -> GraphData:
    """Scale the node features.

    Args:
        data: Any graph; not modified. A graph without features is returned as it is.
        mode: ``"none"`` changes nothing. ``"row"`` divides each row by the sum of its absolute values (its sum, where
            no feature is negative), so that signs cannot cancel to a division by nearly zero; rows of zeros stay zero,
            sparse features stay sparse. ``"standard"`` gives each column mean 0 and variance 1 over the **train** rows;
            a column that is constant there is only centred. It makes sparse features dense, because a shifted zero
            is no longer zero, and logs how many bytes that takes.

    Raises:
        ValueError: ``"standard"`` without train nodes.
    """
    _check_choice("feature norm", mode, FeatureNorm)
    if mode == "none" or data.features is None:
        return data
    if mode == "row":
        return dataclasses.replace(data, features=_divide_rows(data.features))
    if len(data.train_nodes) == 0:
        raise ValueError(
            f"graph {data.name!r} has no train nodes to take the mean and variance from; use feature norm 'row'"
        )
    x_NF = data.features
    if x_NF.layout == torch.sparse_csr:
        num_bytes = x_NF.shape[0] * x_NF.shape[1] * x_NF.values().element_size()
        _log.warning(
            "graph %r: standard feature norm shifts every zero, so the sparse features become dense (%d bytes); "
            "'row' keeps them sparse",
            data.name,
            num_bytes,
        )
        x_NF = x_NF.to_dense()
    return dataclasses.replace(data, features=_standardise(x_NF, x_NF[data.train_nodes]))


def _edited(data: GraphData, stays: Tensor, looped: Tensor) -> GraphData:
    """The graph with the edges marked in ``stays``, then a self-loop on each node of ``looped``."""
    if bool(stays.all()) and len(looped) == 0:
        return data
    edge_data = {}
    for name, x in data.edge_data.items():
        new = torch.full((len(looped), *x.shape[1:]), 1 if name == "weight" else 0, dtype=x.dtype)
        edge_data[name] = torch.cat([x[stays], new])
    return dataclasses.replace(
        data,
        src=torch.cat([data.src[stays], looped]),
        dst=torch.cat([data.dst[stays], looped]),
        edge_data=edge_data,
    )


def _divide_rows(x_NF: Tensor) -> Tensor:
    if x_NF.layout != torch.sparse_csr:
        norm_N1 = x_NF.abs().sum(dim=1, keepdim=True, dtype=torch.float64)
        norm_N1[norm_N1 == 0] = 1
        return (x_NF.double() / norm_N1).to(x_NF.dtype)
    indptr, values = x_NF.crow_indices(), x_NF.values()
    rows = torch.repeat_interleave(indptr.diff())
    norm_N = torch.zeros(len(x_NF), dtype=torch.float64).index_add_(0, rows, values.double().abs())
    norm_N[norm_N == 0] = 1  # a row may store explicit zeros
    scaled = (values.double() / norm_N[rows]).to(values.dtype)
    return csr_matrix(indptr, x_NF.col_indices(), scaled, (x_NF.shape[0], x_NF.shape[1]))


def _standardise(x_NF: Tensor, train_TF: Tensor) -> Tensor:
    train = train_TF.double()
    low, high = train.aminmax(dim=0)
    # compared exactly: the computed variance of a constant column is rounding noise, not 0
    varies = high > low
    mean = torch.where(varies, train.mean(dim=0), low)
    deviation = (train - mean).square().mean(dim=0).sqrt()
    scale = torch.where(varies & (deviation > 0), deviation, 1.0)
    return ((x_NF.double() - mean) / scale).to(x_NF.dtype)


def _check_choice(option: str, given: str, choices: object) -> None:
    if given not in get_args(choices):
        raise ValueError(f"{option} is {given!r}; allowed are {', '.join(get_args(choices))}")
