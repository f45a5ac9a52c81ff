"""Loads the operator libraries and adds what the stable ABI cannot: fake kernels and torch's own
error types. Everything here is private; `fusewise.functional` is the door."""

from ._library import CUDA_MISSING, build_info, rephrased
from .linear_act import (
    ACTIVATIONS,
    check_linear_act,
    linear_act,
    linear_act_backward,
    linear_act_explain,
    mlp,
    mlp_backward,
    wrong_linear_type,
)
from .squeeze_excite import (
    check_squeeze_excite,
    saved_dtype,
    squeeze_excite,
    squeeze_excite_backward,
    squeeze_excite_explain,
    wrong_type,
)

__all__ = [
    "ACTIVATIONS",
    "CUDA_MISSING",
    "build_info",
    "check_linear_act",
    "check_squeeze_excite",
    "linear_act",
    "linear_act_backward",
    "linear_act_explain",
    "mlp",
    "mlp_backward",
    "rephrased",
    "saved_dtype",
    "squeeze_excite",
    "squeeze_excite_backward",
    "squeeze_excite_explain",
    "wrong_linear_type",
    "wrong_type",
]
