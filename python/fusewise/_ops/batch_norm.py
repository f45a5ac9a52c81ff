"""BatchNorm's operators."""

import torch
from torch import Tensor

from ._operator import Operator, wide_dtype

BATCH_NORM_ACT = Operator("batch_norm_act")
BATCH_NORM_ACT_POOL = Operator("batch_norm_act_pool")
BATCH_NORM_EXCITE = Operator("batch_norm_excite", kept=("b1", "b2"))


def batch_norm_statistics(x: Tensor, blanked: Tensor | None) -> Tensor:
    """`[3, C]`, or `[S, 3, C]`: the number of x's values, their mean and biased variance."""
    return torch.ops.fusewise._batch_norm_statistics.default(x, blanked, False, "")[0]


@torch.library.register_fake("fusewise::_batch_norm_statistics")
def _(x, blanked, save, implementation):
    return [x.new_empty((*x.shape[:-4], 3, x.shape[-3]), dtype=wide_dtype(x))]
