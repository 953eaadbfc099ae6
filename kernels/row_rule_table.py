"""Which torch function follows which of the rules of `nugnn.kernels.row_rules`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels import row_rules as rule
from nugnn.kernels.per_sample import BATCH_AXES, SAMPLE_AXES, SAMPLE_AXES_OF_ALL


def _names(*groups: str) -> list[str]:
    return [name for group in groups for name in group.split()]


RESHAPED_IN_PLACE = frozenset(_names("t squeeze unsqueeze transpose swapaxes swapdims resize resize_as as_strided"))
"""The in-place forms of these give a tensor another shape: its identity ends."""

_ELEMENTWISE = _names(
    "add sub rsub mul div true_divide floor_divide remainder fmod pow float_power square sqrt rsqrt exp exp2 expm1 log",
    "log2 log10 log1p abs absolute neg negative positive reciprocal sign sgn sin cos tan asin acos atan atan2 sinh",
    "cosh tanh asinh acosh atanh erf erfc erfinv sigmoid logit relu relu6 leaky_relu elu selu celu gelu silu mish",
    "hardtanh hardswish hardsigmoid softplus softsign tanhshrink hardshrink softshrink logsigmoid threshold rrelu",
    "prelu clamp clip clamp_min clamp_max maximum minimum fmax fmin where masked_fill lerp addcmul addcdiv nan_to_num",
    "round floor ceil trunc frac eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor",
    "bitwise_and bitwise_or bitwise_not bitwise_xor subtract multiply divide sinc digamma lgamma polygamma xlogy",
    "heaviside hypot logaddexp logaddexp2 copysign isclose deg2rad rad2deg arctan2 copy log_sigmoid _threshold",
    "arccos arcsin arctan arccosh arcsinh arctanh fix greater greater_equal less less_equal not_equal signbit ldexp",
    "nextafter isposinf isneginf i0 igamma igammac gcd lcm bitwise_left_shift bitwise_right_shift",
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits",
    "poisson_nll_loss gaussian_nll_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss",
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__",
    "__neg__ __and__ __or__ __xor__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mod__ __floordiv__",
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __rfloordiv__ __abs__ __pos__ __rand__ __ror__ __rxor__",
    "__iand__ __ior__ __ixor__ __imod__ __ifloordiv__ __rmod__ __lshift__ __rshift__",
)
_SAME = _names(
    "to type type_as float double half bfloat16 int long short bool byte clone contiguous detach requires_grad",
    "zeros_like ones_like full_like empty_like cpu cuda char cfloat cdouble conj conj_physical resolve_conj angle",
    "dropout alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d pin_memory",
)
_REDUCE = _names(
    "sum mean max min amax amin prod std var any all argmax argmin logsumexp cumsum cumprod softmax log_softmax",
    "softmin median nanmedian nansum nanmean count_nonzero std_mean var_mean logcumsumexp cummax cummin select aminmax",
)
_WRITTEN = _names("index_copy index_add index_fill index_put masked_scatter scatter scatter_add scatter_reduce")

RULES: dict[Any, rule.Rule] = {
    **dict.fromkeys(_ELEMENTWISE, rule.elementwise),
    **dict.fromkeys(_SAME, rule.same),
    **{name: rule.leading(axes) for name, axes in SAMPLE_AXES.items()},
    **{name: rule.leading_of_all(axes) for name, axes in SAMPLE_AXES_OF_ALL.items()},
    **{name: rule.batch(axes) for name, axes in BATCH_AXES.items()},
    **dict.fromkeys(_WRITTEN, rule.written),
    **{"flip": rule.flip, "set": rule.set_source, "pad": rule.pad},
    **{"embedding": rule.embedding, "embedding_bag": rule.embedding_bag},
    **{"conv_tbc": rule.batch(3, axis=1), F.unfold: rule.leading(3), Tensor.unfold: rule.windows},
    **dict.fromkeys(_names("layer_norm rms_norm"), rule.layer_norm),
    **dict.fromkeys(_REDUCE, rule.along(1, None)),
    **dict.fromkeys(_names("sort argsort glu mode"), rule.along(1, -1)),
    **dict.fromkeys(_names("norm linalg_norm linalg_vector_norm take_along_dim roll"), rule.along(2, None)),
    **dict.fromkeys(_names("topk kthvalue diff"), rule.along(2, -1)),
    "gather": rule.along(1, None),
    "normalize": rule.along(2, 1),
    "cosine_similarity": rule.cosine,
    **dict.fromkeys(_names("matmul mm mv bmm __matmul__"), rule.product),
    **dict.fromkeys(_names("addmm addmv baddbmm"), rule.add_product),
    "einsum": rule.einsum,
    **dict.fromkeys(_names("view reshape unflatten view_as reshape_as"), rule.reshape),
    **dict.fromkeys(_names("flatten ravel"), rule.flatten),
    **{"unsqueeze": rule.unsqueeze, "squeeze": rule.squeeze, "permute": rule.permute},
    **dict.fromkeys(_names("expand expand_as broadcast_to"), rule.expand),
    **dict.fromkeys(_names("repeat tile"), rule.repeat),
    "repeat_interleave": rule.repeat_interleave,
    **dict.fromkeys(_names("transpose swapaxes swapdims"), rule.transpose),
    **dict.fromkeys(_names("movedim moveaxis"), rule.move_axes),
    **{"adjoint": rule.transpose_last, Tensor.mT.__get__: rule.transpose_last},  # type: ignore[attr-defined]
    **{"t": rule.reversed_axes, Tensor.T.__get__: rule.reversed_axes},  # type: ignore[attr-defined]
    Tensor.data.__get__: rule.same,  # type: ignore[attr-defined]
    **{"narrow": rule.narrow, "index_select": rule.index_select, "__getitem__": rule.getitem},
    **dict.fromkeys(_names("cat concat concatenate"), rule.join),
    "stack": rule.stack,
    **dict.fromkeys(_names("hstack column_stack"), rule.join_columns),
}
"""By name, as torch gives it to ``__torch_function__``, or by the function, where a name stands for two."""

RULES_OF_MANY: dict[str, rule.RuleOfMany] = {
    **dict.fromkeys(_names("chunk split tensor_split unbind split_with_sizes"), rule.split),
    **dict.fromkeys(_names("unsafe_chunk unsafe_split unsafe_split_with_sizes"), rule.split),
    **dict.fromkeys(_names("lstm gru rnn_tanh rnn_relu"), rule.recurrent),
    **{"_pack_padded_sequence": rule.packed, "_pad_packed_sequence": rule.padded},
}
"""Functions whose results have rows of different kinds, or lie on different axes."""
