"""Configurations of every module of ``dgl.nn.pytorch`` that takes a graph, and why each other one takes none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dgl.nn.pytorch as dglnn
import torch
from dgl.ops import edge_softmax
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from conformance import NUM_EDGE_FEATURES as E_IN
from conformance import NUM_FEATURES as N_IN
from conformance import NUM_NODES, NUM_TYPES, Case, Inputs

P = object()
"""Stands for the dropout probability among the arguments of `_make`."""


def _make(cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[float], nn.Module]:
    def build(p: float) -> nn.Module:
        return cls(
            *(p if a is P else a for a in args), **{key: p if value is P else value for key, value in kwargs.items()}
        )

    return build


def _with_weight(module: nn.Module, graph: Any, i: Inputs) -> Any:
    return module(graph, i.x, edge_weight=i.w)


def _with_edges(module: nn.Module, graph: Any, i: Inputs) -> Any:
    return module(graph, i.x, i.e)


def _with_attention(module: nn.Module, graph: Any, i: Inputs) -> Any:
    return module(graph, i.x, get_attention=True)


def _mlp(p: float, width: int = N_IN) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(p), nn.Linear(5, 4))


# -- convolutions of neighbours' features, with or without one weight for each edge --------------------------------


class _GivenWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = dglnn.GraphConv(N_IN, 4, weight=False)
        self.weight = nn.Parameter(torch.randn(N_IN, 4))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.conv(graph, x, weight=self.weight)  # type: ignore[no-any-return]


class _Normed(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm, self.conv = dglnn.EdgeWeightNorm(norm, eps=0.1), dglnn.GraphConv(N_IN, 4, norm="none")

    def forward(self, graph: Any, x: Tensor, w: Tensor) -> Tensor:
        return self.conv(graph, x, edge_weight=self.norm(graph, w))  # type: ignore[no-any-return]


def _graph_conv() -> Iterator[Case]:
    for norm in ("none", "both", "right", "left"):
        yield Case("GraphConv", f"norm={norm}", _make(dglnn.GraphConv, N_IN, 4, norm=norm))
        wide = _make(dglnn.GraphConv, N_IN, 8, norm=norm, activation=F.relu)
        yield Case("GraphConv", f"norm={norm}, edge_weight, wider", wide, _with_weight)
    yield Case("GraphConv", "weight given, no bias", _make(_GivenWeight))
    for norm in ("both", "right", "none"):
        # eps: a source without in-edges has weight 0 there, and 0 to the power -1/2 is infinite
        alone = _make(dglnn.EdgeWeightNorm, norm, eps=0.1)
        yield Case("EdgeWeightNorm", f"norm={norm}", alone, lambda m, g, i: m(g, i.w), "e")
        yield Case("EdgeWeightNorm", f"norm={norm}, GraphConv", _make(_Normed, norm), lambda m, g, i: m(g, i.x, i.w))


def _powers() -> Iterator[Case]:
    for k in (1, 3):
        yield Case("TAGConv", f"k={k}", _make(dglnn.TAGConv, N_IN, 4, k=k, bias=k == 1))
        yield Case("SGConv", f"k={k}", _make(dglnn.SGConv, N_IN, 4, k=k, bias=k == 1))
        yield Case("APPNPConv", f"k={k}, edge_drop", _make(dglnn.APPNPConv, k, 0.2, edge_drop=P))
    yield Case("TAGConv", "edge_weight, activation", _make(dglnn.TAGConv, N_IN, 4, activation=F.elu), _with_weight)
    yield Case("SGConv", "edge_weight", _make(dglnn.SGConv, N_IN, 4, k=2), _with_weight)
    yield Case("SGConv", "cached, norm", lambda p: dglnn.SGConv(N_IN, 4, 2, cached=True, norm=nn.BatchNorm1d(N_IN)))
    yield Case("APPNPConv", "edge_weight, edge_drop", _make(dglnn.APPNPConv, 3, 0.1, edge_drop=P), _with_weight)
    yield Case("APPNPConv", "features of 3 axes", _make(dglnn.APPNPConv, 2, 0.1), _three_axes)
    for project in (True, False):
        build = _make(dglnn.GCN2Conv, N_IN, 2, project_initial_features=project, bias=project)
        yield Case("GCN2Conv", f"project_initial_features={project}", build, lambda m, g, i: m(g, i.x, i.x * 2))
    build = _make(dglnn.GCN2Conv, N_IN, 1, alpha=0.4, activation=torch.tanh)
    yield Case("GCN2Conv", "edge_weight, activation", build, lambda m, g, i: m(g, i.x, i.x.tanh(), edge_weight=i.w))
    for k in (1, 2, 4):
        yield Case("ChebConv", f"k={k}, lambda_max=None", _make(dglnn.ChebConv, N_IN, 4, k))
    build = _make(dglnn.ChebConv, N_IN, 4, 3, activation=None, bias=False)
    yield Case("ChebConv", "lambda_max list", build, lambda m, g, i: m(g, i.x, [1.75]))
    yield Case("ChebConv", "lambda_max tensor", build, lambda m, g, i: m(g, i.x, i.x.new_tensor([1.75])))


def _three_axes(module: nn.Module, graph: Any, i: Inputs) -> Any:
    return module(graph, i.x.view(-1, 2, N_IN // 2))


def _aggregators() -> Iterator[Case]:
    for kind in ("mean", "gcn", "pool", "lstm"):
        yield Case("SAGEConv", kind, _make(dglnn.SAGEConv, N_IN, 4, kind, feat_drop=P))
        yield Case("SAGEConv", f"{kind}, edge_weight", _make(dglnn.SAGEConv, N_IN, 8, kind, feat_drop=P), _with_weight)
        yield Case(
            "SAGEConv",
            f"{kind}, norm, activation, no bias",
            lambda p, kind=kind: dglnn.SAGEConv(N_IN, 4, kind, p, False, nn.BatchNorm1d(4), F.elu),
        )
    for kind in ("sum", "max", "mean"):
        yield Case("GINConv", f"{kind}, apply_func", lambda p, kind=kind: dglnn.GINConv(_mlp(p), kind, learn_eps=True))
        build = _make(dglnn.GINConv, None, kind, init_eps=0.3, activation=torch.tanh)
        yield Case("GINConv", f"{kind}, edge_weight", build, _with_weight)
    yield Case("AGNNConv", "learn_beta", _make(dglnn.AGNNConv, init_beta=0.7))
    yield Case("AGNNConv", "fixed beta", _make(dglnn.AGNNConv, learn_beta=False))
    for norm in (False, True):
        yield Case("EdgeConv", f"batch_norm={norm}", _make(dglnn.EdgeConv, N_IN, 4, batch_norm=norm))


# -- attention -----------------------------------------------------------------------------------------------------


def _attention() -> Iterator[Case]:
    drops = dict(feat_drop=P, attn_drop=P)
    for name in ("GATConv", "GATv2Conv"):
        cls = getattr(dglnn, name)
        yield Case(name, "3 heads", _make(cls, N_IN, 4, 3, **drops))
        yield Case(name, "residual, no bias", _make(cls, N_IN, 4, 3, **drops, residual=True, bias=False))
        build = _make(cls, N_IN, N_IN // 2, 2, **drops, residual=True, activation=F.elu)
        yield Case(name, "identity residual, activation", build)
        yield Case(name, "get_attention", _make(cls, N_IN, 4, 2, **drops), _with_attention, "ne")
    yield Case("GATConv", "edge_weight", _make(dglnn.GATConv, N_IN, 4, 3, **drops), _with_weight)
    yield Case(
        "GATConv",
        "edge_weight, get_attention",
        _make(dglnn.GATConv, N_IN, 4, 3, **drops),
        lambda m, g, i: m(g, i.x, edge_weight=i.w, get_attention=True),
        "ne",
    )
    yield Case("GATConv", "features of 3 axes", _make(dglnn.GATConv, N_IN // 2, 4, 2, **drops), _three_axes)
    yield Case("GATv2Conv", "share_weights", _make(dglnn.GATv2Conv, N_IN, 4, 3, **drops, share_weights=True))
    yield Case("DotGatConv", "3 heads", _make(dglnn.DotGatConv, N_IN, 4, 3))
    yield Case("DotGatConv", "get_attention", _make(dglnn.DotGatConv, N_IN, 4, 2), _with_attention, "ne")
    yield Case("EdgeGATConv", "residual", _make(dglnn.EdgeGATConv, N_IN, E_IN, 4, 3, **drops), _with_edges)
    build = _make(dglnn.EdgeGATConv, N_IN, E_IN, 4, 2, **drops, residual=False, bias=False, activation=F.elu)
    yield Case("EdgeGATConv", "no residual, no bias, activation", build, _with_edges)
    yield Case(
        "EdgeGATConv",
        "get_attention",
        _make(dglnn.EdgeGATConv, N_IN, E_IN, 4, 2, **drops),
        lambda m, g, i: m(g, i.x, i.e, get_attention=True),
        "ne",
    )
    # EGATConv has no switch for nodes without in-edges, and with bias=False its constructor fails in DGL
    build, loops = _make(dglnn.EGATConv, N_IN, E_IN, 4, 5, 3), ("loops",)
    yield Case("EGATConv", "3 heads", build, _with_edges, "ne", loops)
    yield Case("EGATConv", "edge_weight", build, lambda m, g, i: m(g, i.x, i.e, edge_weight=i.w), "ne", loops)
    yield Case("EGATConv", "get_attention", build, lambda m, g, i: m(g, i.x, i.e, get_attention=True), "nee", loops)
    yield Case(
        "EGATConv",
        "edge_weight, get_attention",
        build,
        lambda m, g, i: m(g, i.x, i.e, edge_weight=i.w, get_attention=True),
        "nee",
        loops,
    )


# -- edge features -------------------------------------------------------------------------------------------------


def _distances(module: nn.Module, graph: Any, i: Inputs) -> Any:
    return module(graph, i.x, i.w[:, None])


def _kinds_and_distances(module: nn.Module, graph: Any, i: Inputs) -> Any:
    return module(graph, i.ntype[:, None].to(i.w), i.w[:, None])


def _atomic(features_to_use: Tensor | None) -> Callable[[float], nn.Module]:
    def build(p: float) -> nn.Module:
        values = [torch.tensor(v) for v in ([1.2, 1.0], [0.8, 1.1], [2.0, 3.0])]
        return dglnn.AtomicConv(*values, features_to_use=features_to_use)  # type: ignore[no-any-return]

    return build


def _edge_features() -> Iterator[Case]:
    yield Case("CFConv", "", _make(dglnn.CFConv, N_IN, E_IN, 5, 4), _with_edges)
    yield Case("AtomicConv", "all features", _atomic(None), _distances)
    yield Case("AtomicConv", "features_to_use", _atomic(torch.tensor([0.0, 1.0, 2.0])), _kinds_and_distances)
    for kind in ("sum", "mean", "max"):
        build = _make(dglnn.GMMConv, N_IN, 4, E_IN, 3, kind, residual=kind == "sum", bias=kind != "max")
        yield Case("GMMConv", kind, build, _with_edges)

        def nn_conv(p: float, kind: str = kind) -> nn.Module:
            edge_func = nn.Sequential(nn.Linear(E_IN, 5), nn.ReLU(), nn.Dropout(p), nn.Linear(5, N_IN * 4))
            return dglnn.NNConv(N_IN, 4, edge_func, kind, kind == "mean", kind != "max")  # type: ignore[no-any-return]

        yield Case("NNConv", f"{kind}, dropout in edge_func", nn_conv, _with_edges)
    yield Case("GMMConv", "identity residual", _make(dglnn.GMMConv, N_IN, N_IN, E_IN, 2, residual=True), _with_edges)
    for learn in (False, True):
        yield Case(
            "GINEConv",
            f"learn_eps={learn}",
            lambda p, learn=learn: dglnn.GINEConv(_mlp(p, E_IN), 0.2, learn),
            lambda m, g, i: m(g, i.x[:, :E_IN], i.e),
        )
    yield Case("GatedGCNConv", "batch_norm", _make(dglnn.GatedGCNConv, N_IN, E_IN, 5, dropout=P), _with_edges, "ne")
    build = _make(dglnn.GatedGCNConv, E_IN, E_IN, E_IN, dropout=P, activation=torch.tanh)
    yield Case("GatedGCNConv", "residual, tanh", build, lambda m, g, i: m(g, i.x[:, :E_IN], i.e), "ne")
    build = _make(dglnn.GatedGCNConv, N_IN, E_IN, 5, dropout=P, batch_norm=False)
    yield Case("GatedGCNConv", "no batch_norm", build, _with_edges, "ne")
    # "sources" only: at a self-loop the distance is 0 and DGL's gradient of its square root is NaN
    for width in (0, E_IN):
        yield Case(
            "EGNNConv",
            f"edge_feat_size={width}",
            _make(dglnn.EGNNConv, N_IN, 5, 4, width),
            lambda m, g, i: m(g, i.x, i.coord, i.e),
            "nn",
            ("sources",),
        )


_PNA = ["mean", "max", "min", "std", "var", "sum", "moment3", "moment4", "moment5"]
_SCALERS = ["identity", "amplification", "attenuation"]


def _principal() -> Iterator[Case]:
    # DGNConv without a directional aggregator reads eigenvectors that it did not store: an error in DGL itself
    for width in (0, E_IN):
        options = dict(dropout=P, edge_feat_size=width)
        call = _with_edges if width else None
        name = f"edge_feat_size={width}"
        extra = {} if call is None else {"call": call}
        yield Case("PNAConv", f"{name}, all", _make(dglnn.PNAConv, N_IN, 4, _PNA, _SCALERS, 1.7, **options), **extra)
        build = _make(dglnn.PNAConv, N_IN, N_IN, ["mean", "max"], _SCALERS, 1.7, num_towers=2, **options)
        yield Case("PNAConv", f"{name}, 2 towers, residual", build, **extra)
        directed = ["dir1-av", "dir2-av", "dir3-dx", "mean", "sum"]
        build = _make(dglnn.DGNConv, N_IN, N_IN, directed, _SCALERS, 1.7, num_towers=2, **options)
        yield Case("DGNConv", f"{name}, dir-av, dir-dx", build, lambda m, g, i: m(g, i.x, i.e, i.eig))


# -- types ---------------------------------------------------------------------------------------------------------


def _typed() -> Iterator[Case]:
    def etypes(module: nn.Module, graph: Any, i: Inputs) -> Any:
        return module(graph, i.x, i.etype)

    def etypes_norm(module: nn.Module, graph: Any, i: Inputs) -> Any:
        return module(graph, i.x, i.etype, i.w[:, None])

    def etypes_sorted(module: nn.Module, graph: Any, i: Inputs) -> Any:
        return module(graph, i.x, i.etype, presorted=True)

    for regularizer in (None, "basis", "bdd"):
        options = dict(regularizer=regularizer, num_bases=2, dropout=P)
        yield Case("RelGraphConv", f"{regularizer}", _make(dglnn.RelGraphConv, N_IN, 4, NUM_TYPES, **options), etypes)
        build = _make(dglnn.RelGraphConv, N_IN, 10, NUM_TYPES, **options, self_loop=False, layer_norm=True)
        yield Case("RelGraphConv", f"{regularizer}, norm, layer_norm", build, etypes_norm)
        build = _make(dglnn.RelGraphConv, N_IN, 4, NUM_TYPES, **options, bias=False, activation=F.elu)
        yield Case("RelGraphConv", f"{regularizer}, presorted", build, etypes_sorted)
    for presorted in (False, True):
        for use_norm, size in ((False, 3), (True, 5)):
            yield Case(
                "HGTConv",
                f"presorted={presorted}, use_norm={use_norm}",
                _make(dglnn.HGTConv, N_IN, size, 2, NUM_TYPES, NUM_TYPES, dropout=P, use_norm=use_norm),
                lambda m, g, i, presorted=presorted: m(g, i.x, i.ntype, i.etype, presorted=presorted),
            )
    yield Case("GatedGraphConv", "n_etypes=1", _make(dglnn.GatedGraphConv, N_IN, 7, 3, 1))
    build = _make(dglnn.GatedGraphConv, N_IN, 7, 2, 1, bias=False)
    yield Case("GatedGraphConv", "n_etypes=1, types given", build, lambda m, g, i: m(g, i.x, i.etype * 0))
    yield Case("GatedGraphConv", "n_etypes=3", _make(dglnn.GatedGraphConv, N_IN, N_IN, 3, NUM_TYPES), etypes)
    yield Case("TypedLinear", "", _make(dglnn.TypedLinear, N_IN, 4, NUM_TYPES), lambda m, g, i: m(i.x, i.ntype))


# -- deep propagation ----------------------------------------------------------------------------------------------


def _twirls() -> Iterator[Case]:
    drops = dict(dropout=P, attn_dropout=P, inp_dropout=P)
    for precond in (True, False):
        build = _make(dglnn.TWIRLSConv, N_IN, 4, 5, 4, precond=precond, norm="batch", **drops)
        yield Case("TWIRLSConv", f"precond={precond}, norm=batch", build)
        build = _make(
            dglnn.TWIRLSConv, N_IN, 4, 5, 4, precond=precond, attention=True, use_eta=True, attn_bef=True, **drops
        )
        yield Case("TWIRLSConv", f"precond={precond}, attention, eta", build)
    build = _make(dglnn.TWIRLSConv, N_IN, 4, 5, 3, 2, 2, norm="layer", attention=True, T=2, lam=0.7, **drops)
    yield Case("TWIRLSConv", "2 + 2 layers, norm=layer, T", build)
    yield Case("TWIRLSConv", "no layer before, cached", _make(dglnn.TWIRLSConv, N_IN, 4, N_IN, 3, num_mlp_before=0))
    cls = dglnn.TWIRLSUnfoldingAndAttention
    yield Case("TWIRLSUnfoldingAndAttention", "", _make(cls, N_IN, 0.5, 0.6, 3))
    # "loops" only: with lam=1, and with attention, a degree of 0 is raised to a negative power in DGL
    build = _make(cls, N_IN, 0, 1, 4, 2, use_eta=True, init_att=True, attn_dropout=P)
    yield Case("TWIRLSUnfoldingAndAttention", "attention, eta", build, graphs=("loops",))
    build = _make(cls, N_IN, 0.3, 1, 4, 2, p=0.5, T=3, attn_dropout=P, precond=False)
    yield Case("TWIRLSUnfoldingAndAttention", "attention, no precond", build, graphs=("loops",))


class _DroppingConv(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.conv, self.drop = dglnn.GraphConv(N_IN // 2, N_IN // 2), nn.Dropout(p)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.drop(self.conv(graph, x)).tanh()  # type: ignore[no-any-return]


def _reversible() -> Iterator[Case]:
    def call(module: nn.Module, graph: Any, i: Inputs) -> Any:
        return module(graph, i.x * 2)  # a tensor of its own: GroupRevRes frees its input until backward

    yield Case("GroupRevRes", "GraphConv, dropout", lambda p: dglnn.GroupRevRes(_DroppingConv(p), 2), call)
    yield Case("GroupRevRes", "SAGEConv", lambda p: dglnn.GroupRevRes(dglnn.SAGEConv(2, 2, "mean", p), 3), call)
    yield Case(
        "GroupRevRes",
        "NNConv, edge features",
        lambda p: dglnn.GroupRevRes(dglnn.NNConv(3, 3, nn.Linear(E_IN // 2, 9)), 2),
        lambda m, g, i: m(g, i.x * 2, i.e),
    )


# -- whole-graph results -------------------------------------------------------------------------------------------


def _pooling() -> Iterator[Case]:
    for name in ("SumPooling", "AvgPooling", "MaxPooling"):
        yield Case(name, "", _make(getattr(dglnn, name)), outputs="g")
    for k in (5, NUM_NODES + 4):
        yield Case("SortPooling", f"k={k} of {NUM_NODES} nodes", _make(dglnn.SortPooling, k), outputs="g")
    yield Case("WeightAndSum", "", _make(dglnn.WeightAndSum, N_IN), outputs="g")
    yield Case(
        "GlobalAttentionPooling",
        "",
        lambda p: dglnn.GlobalAttentionPooling(nn.Sequential(nn.Dropout(p), nn.Linear(N_IN, 1))),
        outputs="g",
    )
    yield Case(
        "GlobalAttentionPooling",
        "feat_nn, get_attention",
        lambda p: dglnn.GlobalAttentionPooling(nn.Linear(N_IN, 1), _mlp(p)),
        _with_attention,
        "gn",
    )
    yield Case("Set2Set", "3 rounds, 2 layers", _make(dglnn.Set2Set, N_IN, 3, 2), outputs="g")
    for kind in ("sab", "isab"):
        build = _make(dglnn.SetTransformerEncoder, N_IN, 2, 3, 7, 2, kind, m=4, dropouth=P)
        yield Case("SetTransformerEncoder", kind, build)
    build = _make(dglnn.SetTransformerDecoder, N_IN, 2, 3, 7, 2, 3, dropouth=P)
    yield Case("SetTransformerDecoder", "", build, outputs="g")


# -- others --------------------------------------------------------------------------------------------------------


class _EdgeSoftmax(nn.Module):
    def __init__(self, norm_by: str, subset: bool) -> None:
        super().__init__()
        self.norm_by, self.subset = norm_by, subset

    def forward(self, graph: Any, i: Inputs) -> Tensor:
        if not self.subset:
            return edge_softmax(graph, i.e, norm_by=self.norm_by)  # type: ignore[no-any-return]
        eids = (i.etype > 0).nonzero().view(-1)
        picked = edge_softmax(graph, i.e[eids], eids=eids, norm_by=self.norm_by)
        return torch.zeros_like(i.e).index_copy(0, eids, picked)


def _others() -> Iterator[Case]:
    for norm_by in ("dst", "src"):
        for subset in (False, True):
            yield Case(
                "edge_softmax",
                f"norm_by={norm_by}" + (", eids" if subset else ""),
                _make(_EdgeSoftmax, norm_by, subset),
                lambda m, g, i: m(g, i),
                "e",
            )
    yield Case(
        "Sequential",
        "two convolutions",
        lambda p: dglnn.Sequential(dglnn.GraphConv(N_IN, 5, activation=F.relu), dglnn.SAGEConv(5, 4, "pool", p)),
    )
    yield Case(
        "HeteroGraphConv",
        "one relation",
        lambda p: dglnn.HeteroGraphConv({"_E": dglnn.SAGEConv(N_IN, 4, "mean", p)}),
        lambda m, g, i: m(g, {"_N": i.x})["_N"],
    )
    for mode in ("cat", "max", "lstm"):
        options = dict(in_feats=N_IN, num_layers=2) if mode == "lstm" else {}
        build = _make(dglnn.JumpingKnowledge, mode, **options)
        yield Case("JumpingKnowledge", mode, build, lambda m, g, i: m([i.x, i.x.tanh()]))
    # DGL's propagation is float32 whatever the labels are: 3 steps of sums over at most 25 edges
    bound = 3 * 25 * torch.finfo(torch.float32).eps
    for norm, clamp, normalize, reset in (("sym", True, False, False), ("row", False, True, True)):
        build = _make(dglnn.LabelPropagation, 3, 0.6, norm, clamp, normalize, reset)
        yield Case(
            "LabelPropagation",
            f"{norm}, reset={reset}",
            build,
            lambda m, g, i: m(g, i.ntype, i.coord[:, 0] > 0),
            bound=bound,
        )
    yield Case(
        "LabelPropagation",
        "label columns",
        _make(dglnn.LabelPropagation, 3, 0.6),
        lambda m, g, i: m(g, F.one_hot(i.ntype, NUM_TYPES)),
        bound=bound,
    )


def all_cases() -> list[Case]:
    """Every configuration, grouped by module."""
    families = (
        *(_graph_conv, _powers, _aggregators, _attention, _edge_features, _principal, _typed, _twirls, _reversible),
        *(_pooling, _others),
    )
    return sorted((case for family in families for case in family()), key=lambda case: case.name)


REASONS: dict[str, str] = {
    **dict.fromkeys(("DenseGraphConv", "DenseSAGEConv", "DenseChebConv"), "takes an adjacency matrix, not a graph"),
    **dict.fromkeys(
        ("CuGraphGATConv", "CuGraphRelGraphConv", "CuGraphSAGEConv"), "needs pylibcugraphops and a CUDA device"
    ),
    **dict.fromkeys(("KNNGraph", "SegmentedKNNGraph", "RadiusGraph"), "makes a graph of points, takes none"),
    **dict.fromkeys(
        ("WeightBasis", "HeteroLinear", "HeteroEmbedding", "NodeEmbedding"), "holds weights, takes no graph"
    ),
    **dict.fromkeys(("EdgePredictor", "TransE", "TransR"), "scores pairs of rows, takes no graph"),
    **dict.fromkeys(("DeepWalk", "MetaPath2Vec"), "samples walks of the whole graph, no layer"),
    **dict.fromkeys(
        ("DegreeEncoder", "SpatialEncoder", "SpatialEncoder3d", "PathEncoder", "LapPosEncoder", "BiasedMHA"),
        "takes dense tensors, no graph",
    ),
    **dict.fromkeys(("GraphormerLayer", "EGTLayer"), "takes dense tensors, no graph"),
    **dict.fromkeys(
        ("GNNExplainer", "HeteroGNNExplainer", "PGExplainer", "HeteroPGExplainer", "SubgraphX", "HeteroSubgraphX"),
        "explains a trained model, no layer",
    ),
}
"""Why a public class of ``dgl.nn.pytorch`` has no configuration here."""
