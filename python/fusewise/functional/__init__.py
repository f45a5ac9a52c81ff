"""Fused operators as functions.

Each function takes the cheapest correct path. Without gradients it calls the operator directly.
With gradients it goes through a `torch.autograd.Function`. Under `torch.func`, forward-mode AD and
double backward, where the fused operator cannot be used, it computes the same formula with torch's
own operators.

A wrong shape, dtype or device raises a RuntimeError or ValueError that names the argument. An
argument that is no tensor raises a TypeError.
"""

from ._transforms import refuse_script
from .batch_norm import batch_norm_act
from .batch_norm_excite import batch_norm_excite
from .li_conv import li_conv
from .linear_act import linear_act
from .mlp import mlp
from .squeeze_excite import squeeze_excite

__all__ = [
    "batch_norm_act",
    "batch_norm_excite",
    "li_conv",
    "linear_act",
    "mlp",
    "squeeze_excite",
]

for _name in __all__:
    globals()[_name].__prepare_scriptable__ = refuse_script
