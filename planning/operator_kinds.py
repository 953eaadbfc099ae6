"""Of which kind an operator of torch's is, and the numbers that its cost depends on.

Whatever is not known here is of the kind ``other``, by its name and with the bytes of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nugnn.planning.trace_records import Kind

_WORDS = {
    "metadata": """
        promote_types view _unsafe_view _reshape_alias alias detach t transpose permute expand as_strided unsqueeze
        squeeze slice select narrow split split_with_sizes unbind chunk diagonal lift_fresh empty empty_like
        empty_strided new_empty new_empty_strided unfold movedim real view_as_real set_ resize_ _local_scalar_dense
        is_same_size record_stream empty_permuted _record_function_enter_new _record_function_exit
        sparse_compressed_tensor _sparse_compressed_tensor_unsafe
    """,
    "rows": """
        index_select index gather take embedding embedding_dense_backward index_add index_add_ index_put index_put_
        _index_put_impl_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ scatter_reduce
        scatter_reduce_ take_along_dim masked_select masked_scatter repeat_interleave index_fill_ index_fill nonzero
        _unsafe_index _unsafe_index_put index_select_backward
    """,
    "normalisation": """
        native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward
        _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update batch_norm_backward
        cudnn_batch_norm cudnn_batch_norm_backward native_group_norm native_group_norm_backward _softmax
        _softmax_backward_data _log_softmax _log_softmax_backward_data batch_norm_stats batch_norm_elemt
        batch_norm_backward_reduce batch_norm_backward_elemt batch_norm_gather_stats_with_counts _fused_rms_norm
        _fused_rms_norm_backward
    """,
    "loss": """
        nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits smooth_l1_loss
        smooth_l1_loss_backward huber_loss huber_loss_backward
    """,
    "copy": """
        copy_ clone _to_copy cat stack constant_pad_nd fill_ fill zero_ zeros zeros_like ones ones_like full full_like
        eye new_zeros new_ones new_full arange repeat flip roll slice_backward select_backward slice_scatter
        select_scatter unfold_backward expand_copy scalar_tensor tril triu contiguous _pin_memory
    """,
    "reduction": """
        sum mean amax amin max min argmax argmin any all prod var std var_mean std_mean norm linalg_vector_norm
        logsumexp cumsum topk sort bincount count_nonzero aminmax equal max_pool2d_with_indices
        max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward avg_pool1d max_pool1d upsample_nearest2d upsample_nearest2d_backward
        upsample_bilinear2d upsample_bilinear2d_backward
    """,
    "elementwise": """
        native_dropout native_dropout_backward threshold_backward gelu_backward bernoulli bernoulli_
        leaky_relu_backward elu_backward tanh_backward sigmoid_backward where masked_fill masked_fill_ lerp addcmul
        addcdiv _foreach_add_ _foreach_mul_ rand rand_like randn randn_like uniform_ normal_ randint random_ glu
        glu_backward silu_backward softplus_backward hardtanh_backward prelu _prelu_kernel _prelu_kernel_backward
        _amp_foreach_non_finite_check_and_unscale_
    """,
}
_KIND_OF: dict[str, Kind] = {word: kind for kind, words in _WORDS.items() for word in words.split()}  # type: ignore[misc]
_ADD_ROWS = frozenset("index_add index_add_ index_put index_put_ _index_put_impl_ scatter_add scatter_add_".split())
_PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0, "_int_mm": 0}
"""Where the first factor stands."""


class Described(NamedTuple):
    """A kind, and the numbers and words that a cost of this kind depends on."""

    kind: Kind
    sizes: dict[str, int]
    attrs: dict[str, str]


def describe(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Described:
    """Of a call that torch's dispatcher makes.

    Args:
        func: An ``OpOverload``.
        args: Its arguments.
        kwargs: By name.
        out: What it gave.
    """
    name = func._schema.name.rpartition("::")[2]
    if name in _PRODUCTS:
        a, b = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        return _product(a, b)
    if name == "convolution":
        return Described("product", _of_convolution(args[0], args[1], out, args[8]), {"op": "convolution"})
    if name == "convolution_backward":
        grad, x, weight, groups, mask = args[0], args[1], args[2], args[9], args[10]
        sizes = _of_convolution(x, weight, grad, groups)
        sizes["batch"] *= int(mask[0]) + int(mask[1])  # a product for each gradient of an operand
        return Described("product", sizes, {"op": "convolution", "direction": "backward"})
    if "scaled_dot_product" in name:
        return _attention(name, args)
    if name in _ADD_ROWS:
        values = next(x for x in reversed(args) if isinstance(x, Tensor))
        return Described("rows", {"picked_bytes": _bytes(values)}, {"op": "add"})
    if name == "embedding_dense_backward":
        return Described("rows", {"picked_bytes": _bytes(args[0])}, {"op": "add"})
    kind = _KIND_OF.get(name)
    if kind is None and name.startswith("_foreach_"):
        kind = "reduction" if "norm" in name else "elementwise"
    if kind is None and func.is_view:
        kind = "metadata"
    if kind is None and torch.Tag.pointwise in func.tags:
        kind = "elementwise"
    if kind is None and torch.Tag.reduction in func.tags:
        kind = "reduction"
    return Described(kind or "other", {}, {})


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _product(a: Tensor, b: Tensor) -> Described:
    batch = a.shape[0] if a.dim() == 3 else 1
    m = a.shape[-2] if a.dim() > 1 else 1
    n = b.shape[-1] if b.dim() > 1 else 1
    return Described("product", {"m": m, "k": a.shape[-1], "n": n, "batch": batch}, {})


def _of_convolution(x: Tensor, weight: Tensor, out: Tensor, groups: int) -> dict[str, int]:
    """As the product that it is: a row for each place of the result, a term for each value under the window."""
    places = x.shape[0] * math.prod(out.shape[2:])
    return {"m": places, "k": math.prod(weight.shape[1:]), "n": weight.shape[0] // groups, "batch": groups}


def _attention(name: str, args: Sequence[Any]) -> Described:
    is_backward = name.endswith("_backward")
    q, k = args[1:3] if is_backward else args[:2]  # the gradient comes first
    sizes = {"batch": math.prod(q.shape[:-2]), "queries": q.shape[-2], "keys": k.shape[-2], "width": q.shape[-1]}
    return Described("attention", sizes, {"direction": "backward" if is_backward else "forward"})


# -- operators of our own ----------------------------------------------------------------------------------------------

SEEN_THROUGH = frozenset(
    ("_SplitBatchNorm", "_FusedBatchNorm", "_SumOverRanks", "_GatherRows", "_Products", "_SumOfProducts", "_Tie")
)
"""Made of torch's operators, which are recorded in their place; exchanges among them are too."""
_OWN: dict[str, Kind] = {
    **dict.fromkeys(("_VectorSum", "_Sum", "_Extreme", "_WideExtreme"), "spmm"),
    **dict.fromkeys(("_OverlappedSum", "_RepeatedSum"), "spmm"),
    **dict.fromkeys(("_Sddmm",), "sddmm"),
    **dict.fromkeys(("_EdgeSoftmax",), "edge_softmax"),
    **dict.fromkeys(("_Attention",), "attention"),
    **dict.fromkeys(("_DropoutRows", "_ReluDropoutRows", "_DropoutCsrValues", "_Epilogue"), "elementwise"),
    **dict.fromkeys(("_CrossEntropy", "_BinaryCrossEntropy"), "loss"),
    "_Meet": "metadata",
}  # type: ignore[dict-item]


def describe_own(name: str, args: Sequence[Any]) -> Described:
    """Of an operator of ours at its door, forward; backward is like the forward whose gradient it makes.

    Args:
        name: Of its class, or what else stands at the door.
        args: ``ctx`` first, for a class.
    """
    if name in ("_Fetch", "_AddHome"):
        rows, plan = args[1], args[2]
        is_fetch = name == "_Fetch"
        counts = (plan.num_halo, len(plan.send_rows)) if is_fetch else (len(plan.send_rows), plan.num_halo)
        sizes = {"received": counts[0], "sent": counts[1], "width": math.prod(rows.shape[1:])}
        travel = args[4]
        own = str(rows.dtype).removeprefix("torch.")
        is_plain = travel is None or travel.wire.name == "fp32"
        plain_bytes = sizes["width"] * rows.element_size()
        sizes["row_bytes"] = plain_bytes if is_plain else travel.wire.row_bytes(sizes["width"], rows.dtype)
        attrs = {"what": "halo", "wire": own if is_plain else travel.wire.name}
        return Described("exchange", sizes, attrs | {"direction": "fetch" if is_fetch else "home"})
    if name in ("all_reduce", "gather", "broadcast"):
        (x,) = (a for a in args if isinstance(a, Tensor))
        sizes = {"received": x.numel(), "sent": x.numel(), "width": 1, "row_bytes": x.element_size()}
        return Described("exchange", sizes, {"what": name, "wire": str(x.dtype).removeprefix("torch.")})
    if name == "_CsrMatmul":
        crow, _, values, weight = args[1:5]
        sizes = {"rows": len(crow) - 1, "stored": len(values), "columns": weight.shape[0], "width": weight.shape[1]}
        return Described("sparse_product", sizes, {"direction": "forward"})
    kind = _OWN.get(name, "other")
    structure = next((a for a in args if hasattr(a, "num_dst") and hasattr(a, "num_edges")), None)
    if structure is None:
        return Described(kind, {}, {})
    first = next(a for a in args if isinstance(a, Tensor))
    sizes = {"rows": structure.num_dst, "sources": structure.num_src, "edges": structure.num_edges}
    return Described(kind, sizes | {"width": math.prod(first.shape[1:])}, {"direction": "forward"})


def describe_on_graph(
    kind: str, structure: Any, inputs: Sequence[Any], attrs: dict[str, Any], out: Tensor
) -> Described:
    """Of an operator on a graph, as the interceptor calls it."""
    rows, sources, edges = structure.num_dst, structure.num_src, structure.num_edges
    words = {key: value for key, value in attrs.items() if key in ("op", "reduce", "lhs_target", "rhs_target")}
    sizes = {"rows": rows, "sources": sources, "edges": edges, "width": math.prod(out.shape[1:])}
    if attrs.get("op") == "attention":
        return Described("attention", sizes, {"direction": "forward"})
    if kind == "sddmm" and attrs.get("op") == "dot":
        given = next(x for x in inputs if x is not None)
        sizes["width"] = math.prod(given.shape[1:])
    return Described(kind, sizes, {**words, "direction": "forward"})  # type: ignore[arg-type]
