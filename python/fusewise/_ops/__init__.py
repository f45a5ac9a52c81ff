"""Loads the operator libraries and adds what the stable ABI cannot: fake kernels and torch's own
error types. Everything here is private; `fusewise.functional` is the door."""

from ._library import CUDA_MISSING, build_info, rephrased
from .squeeze_excite import (
    check_squeeze_excite,
    saved_dtype,
    squeeze_excite,
    squeeze_excite_backward,
    squeeze_excite_explain,
    wrong_type,
)

__all__ = [
    "CUDA_MISSING",
    "build_info",
    "check_squeeze_excite",
    "rephrased",
    "saved_dtype",
    "squeeze_excite",
    "squeeze_excite_backward",
    "squeeze_excite_explain",
    "wrong_type",
]
