"""Graph operators on operands of different floating types, as CPU autocast and mixed models produce them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator_call import OperatorCall


class PromotionHandler:
    """Brings the operands of SpMM and SDDMM to their common type.

    DGL refuses operands of two types; torch promotes them. Under autocast a layer easily has bfloat16 features and
    float32 scores. Halo rows have travelled in their own, narrower type by the time this runs.
    """

    kinds = frozenset({"spmm", "sddmm"})

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        operands = [x for x in call.inputs if isinstance(x, Tensor)]
        if len({x.dtype for x in operands}) > 1:
            common = operands[0].dtype
            for x in operands[1:]:
                common = torch.promote_types(common, x.dtype)
            call = call.with_inputs(*(x.to(common) if isinstance(x, Tensor) else x for x in call.inputs))
        return proceed(call)
