"""Fused operators as functions. Each picks the shortest way to its operator: directly where no
gradient is wanted, through a `torch.autograd.Function` where one is, and through the same formula
in plain torch where only that is right (`torch.func`, forward-mode AD, double backward)."""

from ._transforms import refuse_script
from .linear_act import linear_act
from .mlp import mlp
from .squeeze_excite import squeeze_excite

__all__ = [
    "linear_act",
    "mlp",
    "squeeze_excite",
]

for _name in __all__:
    globals()[_name].__prepare_scriptable__ = refuse_script
