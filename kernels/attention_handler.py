"""Attention of torch with dropout whose masks belong to the rows of the query, the same on any parts.

Shape suffixes: n rows (samples, nodes), H heads, L places of the query, S of the key, D width of a head, E of all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator_call import OperatorCall
from nugnn.kernels.random_draws import calling_line
from nugnn.kernels.rows import Rows, identity_of, rows_of, tag

Proceed = Callable[[OperatorCall], Any]
_PARAMETERS = inspect.signature(F.multi_head_attention_forward)


class AttentionHandler:
    """Answers ``F.scaled_dot_product_attention`` and what `torch.nn.MultiheadAttention` calls, where they drop weights.

    The mask of a weight is a function of (seed, step, operator name, row id, head, place, place). Weights are made one
    by one for that, ``(n, H, L, S)``; without dropout torch's own kernels run.

    Args:
        is_split: Whether other ranks hold further rows; queries of unknown identity are then an error, and torch draws
            as ever otherwise.
    """

    kinds = frozenset({"attention"})

    def __init__(self, *, is_split: bool) -> None:
        self._is_split = is_split

    def __call__(self, call: OperatorCall, proceed: Proceed, interceptor: Interceptor) -> Any:
        if call.run is F.multi_head_attention_forward:
            return self._multi_head(call, proceed, interceptor)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        a = dict(zip(names, call.inputs, strict=False)) | call.attrs
        if not a.get("dropout_p", 0.0) > 0:
            return proceed(call)
        query: Tensor = a["query"]
        rows = rows_of(query) if query.dim() > 2 else None
        if rows is None or rows.kind == "replicated":
            return self._by_position(call, proceed)
        ids = _checked(call.name, rows, query.shape[0]).to(query.device).row_ids(len(query))
        mask, key, value = a.get("attn_mask"), a["key"], a["value"]
        if a.get("is_causal", False):
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if a.get("enable_gqa", False):
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        scale = a.get("scale")
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        weights = _weights(query * scale, key, mask)
        return dropout_rows(weights, a["dropout_p"], interceptor.random_key(call.name, rows), ids) @ value

    def _multi_head(self, call: OperatorCall, proceed: Proceed, interceptor: Interceptor) -> Any:
        """Sequences stand on axis 1 here: `torch.nn.MultiheadAttention` turns what ``batch_first`` gave it."""
        bound = _PARAMETERS.bind(*call.inputs, **call.attrs)
        bound.apply_defaults()
        a = bound.arguments
        rows = identity_of(a["query"])
        if rows is not None and (rows.axis != 1 or a["query"].dim() != 3):
            rows = None
        unusual = [name for name in ("bias_k", "bias_v", "static_k", "static_v") if a[name] is not None]
        unusual += ["add_zero_attn"] if a["add_zero_attn"] else []
        if not (a["training"] and a["dropout_p"] > 0):
            if rows is not None and rows.num_rows == 0 and not unusual:  # torch fails on a mask of no samples
                out, weights = _multi_head(a, lambda x: x)
            else:
                out, weights = proceed(call)
            return tag(out, rows), weights
        if rows is None:
            return self._by_position(call, proceed)
        if unusual or (a["is_causal"] and a["attn_mask"] is None):  # torch refuses the latter
            return self._by_position(call, proceed, f" with {', '.join(unusual)}")
        ids = _checked(call.name, rows, a["query"].shape[1]).to(a["query"].device).row_ids(a["query"].shape[1])
        key = interceptor.random_key(call.name, rows)
        out, weights = _multi_head(a, lambda x: dropout_rows(x, a["dropout_p"], key, ids))
        return tag(out, rows), weights

    def _by_position(self, call: OperatorCall, proceed: Proceed, how: str = "") -> Any:
        """Drawn by torch, on one rank; on several only where every rank has the same rows."""
        if not self._is_split:
            return proceed(call)
        query = call.inputs[0] if call.inputs else call.attrs["query"]
        rows = identity_of(query)
        if rows is not None and rows.kind == "replicated":
            return proceed(call)
        function = getattr(call.run, "__name__", "")
        raise NotImplementedError(
            f"{call.name}: {function}{how} draws random numbers by position, so they would depend on the split: it is "
            f"not known whose rows its query of shape {tuple(query.shape)} holds{calling_line()}. Give "
            "torch.nn.MultiheadAttention batch_first=True and rows of the batch on axis 0, mark them with "
            "nugnn.as_rows_of(x, like) where a function has lost them, or give dropout=0."
        )


def _multi_head(a: dict[str, Any], drop: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` on ``(L, n, E)``, weights going through ``drop``."""
    num_heads, (length, n, width) = a["num_heads"], a["query"].shape
    if a["use_separate_proj_weight"]:
        matrices = (a["q_proj_weight"], a["k_proj_weight"], a["v_proj_weight"])
    else:
        matrices = a["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if a["in_proj_bias"] is None else a["in_proj_bias"].chunk(3)
    q_nHLD, k_nHSD, v_nHSD = (
        F.linear(x, w, b).view(len(x), n, num_heads, width // num_heads).permute(1, 2, 0, 3)
        for x, w, b in zip((a["query"], a["key"], a["value"]), matrices, biases, strict=True)
    )
    mask = _additive(a["attn_mask"], q_nHLD.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.view(n, num_heads, *mask.shape[1:])
    padding = _additive(a["key_padding_mask"], q_nHLD.dtype)
    if padding is not None:
        padding = padding[:, None, None, :]
        mask = padding if mask is None else mask + padding
    dropped = drop(_weights(q_nHLD / math.sqrt(width // num_heads), k_nHSD, mask))
    mixed = (dropped @ v_nHSD).permute(2, 0, 1, 3).reshape(length, n, width)
    out = F.linear(mixed, a["out_proj_weight"], a["out_proj_bias"])
    if not a["need_weights"]:
        return out, None
    return out, dropped.mean(1) if a["average_attn_weights"] else dropped


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask whose True means "leave out" as one to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of the scores; a place that may look nowhere gets zeros, as in torch's kernels."""
    scores = q @ k.transpose(-2, -1)
    if mask is None:
        return scores.softmax(-1)
    scores = scores + mask
    nowhere = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(nowhere, 0).softmax(-1).masked_fill(nowhere, 0)


def _checked(name: str, rows: Rows, num_rows: int) -> Rows:
    if rows.source is not None and rows.num_rows != num_rows:
        raise ValueError(f"{name}: marked as {rows.num_rows} {rows.kind} rows but has {num_rows}")
    return rows
