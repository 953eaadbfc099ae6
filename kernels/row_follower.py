"""What tags the results of a torch function with the identity that their rows inherit, by its rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nugnn.kernels.random_draws import calling_line
from nugnn.kernels.row_rule_table import RESHAPED_IN_PLACE, RULES, RULES_OF_MANY
from nugnn.kernels.row_rules import Args, Kwargs, elementwise, tensors, tensors_of
from nugnn.kernels.rows import ATTRIBUTE, REPLICATED, Rows, identity_of, tag, untag

Follow = Callable[[Args, Kwargs, Any], None]


def follower(func: Callable[..., Any]) -> Follow:
    """What tags the results of ``func``, given arguments and results, with the identity their rows inherit.

    A model calls the same few functions again and again: what depends on the function alone is found out here, once.
    """
    full_name = getattr(func, "__name__", "")
    is_in_place = not full_name.startswith("__") and full_name.endswith("_")
    name = full_name.rstrip("_") if is_in_place else full_name
    unshapes, keeps_given = is_in_place and name in RESHAPED_IN_PLACE, name != "set"
    rule, many = RULES.get(func, RULES.get(name)), RULES_OF_MANY.get(name)
    has_quick = rule is not None and many is None and not unshapes
    is_elementwise = rule is elementwise

    def follow(args: Args, kwargs: Kwargs, out: Any) -> None:
        if has_quick and args and type(out) is Tensor and type(args[0]) is Tensor:
            # nearly all calls: a tensor whose own tag decides, or nothing that could have one
            own: Rows | None = getattr(args[0], ATTRIBUTE, None)
            if own is None:
                if len(args) == 1 and not kwargs:
                    return
            elif own.kind != "replicated":
                if is_elementwise and _quickly_agree(own, args, kwargs, out.dim()):
                    rows: Rows | None = own
                else:
                    rows = rule(args, kwargs, out)  # type: ignore[misc]
                if rows is None or not 0 <= rows.axis < out.dim() or rows.num_rows != out.shape[rows.axis]:
                    return
                known = getattr(out, ATTRIBUTE, None)
                if known is None:
                    setattr(out, ATTRIBUTE, rows)
                elif known is not rows:
                    _inherit(out, rows, tensors_of(args, kwargs), keeps_given)
                return
        follow_any(args, kwargs, out)

    def follow_any(args: Args, kwargs: Kwargs, out: Any) -> None:
        inputs = tensors_of(args, kwargs)
        has_tag = has_own = False
        num_replicated = 0
        for x in inputs:
            if (rows := identity_of(x)) is not None:
                has_tag = True
                if rows.kind == "replicated":
                    num_replicated += 1
                else:
                    has_own = True
        if not has_tag:
            return
        if not has_own and num_replicated == len(inputs):
            for x in tensors((out,)):
                if not isinstance(x, Parameter):
                    tag(x, REPLICATED)
            return
        if isinstance(out, Tensor) and many is None:
            if unshapes and any(out is given for given in inputs):
                untag(out)
            elif rule is not None and has_own:
                _inherit(out, rule(args, kwargs, out), inputs, keeps_given)
            return
        outputs = list(tensors((out,)))
        if unshapes and outputs and any(outputs[0] is given for given in inputs):
            untag(outputs[0])
        elif outputs and has_own and many is not None:
            for x, rows in zip(outputs, many(name, args, kwargs, outputs), strict=True):
                _inherit(x, rows, inputs, keeps_given)
        elif has_own and rule is not None:
            for x in outputs:
                _inherit(x, rule(args, kwargs, x), inputs, keeps_given)

    return follow


def noting_losses(func: Callable[..., Any]) -> Follow:
    """`follower`, which also notes on results without rows which function lost them, for the error of a later one."""
    follow, name = follower(func), getattr(func, "__name__", "a function")

    def follow_and_note(args: Args, kwargs: Kwargs, out: Any) -> None:
        follow(args, kwargs, out)
        inputs = tensors_of(args, kwargs)
        noted = next((note for x in inputs if (note := getattr(x, _LOSS, None)) is not None), None)
        has_rows = any((rows := identity_of(x)) is not None and rows.kind != "replicated" for x in inputs)
        for x in tensors((out,)):
            if identity_of(x) is None and getattr(x, _LOSS, None) is None and (noted or has_rows):
                setattr(x, _LOSS, noted or f"{name}{calling_line()}")

    return follow_and_note


def where_lost(x: Tensor) -> str:
    """`` It was lost in FUNCTION (FILE, line N).`` where that was noted, else nothing."""
    note = getattr(x, _LOSS, None)
    return "" if note is None else f" It was lost in {note}."


_LOSS = "_nugnn_loss_of_rows"


def _quickly_agree(own: Rows, args: Args, kwargs: Kwargs, num_dims: int) -> bool:
    """Whether no argument says anything else than ``own``, the first one's tag, as far as is seen at a glance."""
    for x in args:
        if type(x) is Tensor:
            rows = getattr(x, ATTRIBUTE, None)
            if rows is own:
                if x.dim() != num_dims:  # broadcasting puts its rows elsewhere
                    return False
            elif rows is not None and rows.kind != "replicated":
                return False
        elif type(x) not in _NO_TENSORS:
            return False
    return not kwargs or all([type(x) in _NO_TENSORS for x in kwargs.values()])


_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format})


def _inherit(x: Tensor, rows: Rows | None, inputs: Sequence[Tensor], keeps_given: bool) -> None:
    if rows is None or not 0 <= rows.axis < x.dim() or rows.num_rows != x.shape[rows.axis]:
        return
    # in place, or nothing to do (x.to(its own dtype)): the function returned its argument
    if keeps_given and any(x is given for given in inputs) and identity_of(x) is not None:
        return
    tag(x, rows)
